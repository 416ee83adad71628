"""A daemon without its sockets and threads: real tiers, log, index and recovery, driven by hand.

A crash drops everything that lies in the process: the records that were not written, what was
promised in memory. Files and arenas stay as they are, as after ``kill -9``.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tierkv_wal import RealStorage

from tests.tiers.sums import checksum
from tierkv.config import schema
from tierkv.core.counters import Counters
from tierkv.core.ids import Tier
from tierkv.core.inline import run_inline
from tierkv.core.matching import Chain
from tierkv.core.placement import Placement
from tierkv.core.planner import Limits, Planner
from tierkv.core.policy import SCAN
from tierkv.core.prefix import chain_hashes
from tierkv.core.records import Kind, blank
from tierkv.core.spec import KVSpec
from tierkv.core.state import PoolShape, State
from tierkv.service.process import start_time
from tierkv.service.progress import tell_nobody
from tierkv.service.recovered import Recovered
from tierkv.service.recovery import recover, unverified_rows
from tierkv.service.snapshot import index_changes
from tierkv.service.store import StateDirectory
from tierkv.tiers.entry import split_hashes
from tierkv.tiers.mover import Mover
from tierkv.tiers.sizes import slot_bytes
from tierkv.tiers.tables import ArenaTables

SPEC = KVSpec(model="small", layers=1, kv_heads=1, head_dim=8, block_tokens=4)
SHAPE = PoolShape(SPEC.block_bytes, SPEC.block_tokens)
SIZE = SPEC.block_tokens
WAL_SEGMENT_BYTES = 16 << 10
DISK_SEGMENT_BYTES = 64 << 10


class Killed(BaseException):
    """The process dies here. No cleanup of the product's runs that would help it."""


class StoppingStorage(RealStorage):
    """The log's files, until a countdown ends: then a write gets half done, any other call not."""

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found
        countdown = super().__getattribute__("_countdown")

        def call(*args: Any, **kwargs: Any) -> Any:
            if countdown.ends(name):
                if name == "pwrite":
                    fd, data, offset = args
                    half = bytes(data)[: len(data) // 2]
                    found(fd, half, offset)
                raise Killed(name)
            return found(*args, **kwargs)

        return call


@dataclass
class Countdown:
    """Counts the steps of a daemon, and says when it dies. 0: never."""

    left: int = 0
    steps: int = 0
    names: list[str] = field(default_factory=list)

    def ends(self, name: str) -> bool:
        self.steps += 1
        self.names.append(name)
        self.left -= 1
        return self.left == 0

    def step(self, name: str) -> None:
        if self.ends(name):
            raise Killed(name)


def config_of(folder: Path, **settings: Any) -> schema.Config:
    """A configuration with tiers of so many blocks (of SPEC)."""
    blocks = {
        tier: settings.get(tier.label, default)
        for tier, default in ((Tier.DEVICE, 8), (Tier.HOST, 3), (Tier.DISK, 10))
    }
    sizes = {tier: count * slot_bytes(tier, SHAPE) for tier, count in blocks.items()}
    return schema.Config(
        server=schema.Server(socket=str(folder / "socket"), state_dir=str(folder / "state")),
        device=schema.Device(sizes[Tier.DEVICE]),
        host=schema.Host(sizes[Tier.HOST]),
        arena=schema.Arena(str(settings.get("arena_dir", folder / "arena"))),
        disk=schema.Disk(
            dir=str(folder / "data"),
            bytes=sizes[Tier.DISK],
            segment_bytes=settings.get("disk_segment_bytes", DISK_SEGMENT_BYTES),
        ),
        wal=schema.Wal(
            durability=settings.get("durability", "kill"),
            segment_bytes=settings.get("wal_segment_bytes", WAL_SEGMENT_BYTES),
        ),
        index=schema.Index(map_bytes=8 << 20),
    )


class Machine:
    """A host with one store. At most one daemon runs at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon: Daemon | None = None
        self.countdown = Countdown()
        self.settings: dict[str, Any] = {}

    def start(self, **settings: Any) -> Daemon:
        """Crash the running daemon, if any, and start another; settings stay until changed."""
        self.crash()
        self.settings |= settings
        self.daemon = Daemon(config_of(self.folder, **self.settings), self.countdown)
        return self.daemon

    def crash(self) -> None:
        """What kill -9 does."""
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            daemon.vanish()
        self.countdown.left = 0


class Daemon:
    """Recovers the store in a configuration and serves one worker: this process."""

    def __init__(self, config: schema.Config, countdown: Countdown) -> None:
        self.config = config
        self.countdown = countdown
        self.directory = StateDirectory.open(Path(config.server.state_dir))
        self.written: Picture | None = None
        try:
            self.recovered: Recovered = recover(config, self.directory, tell_nobody)
        except BaseException:
            self.directory.close()
            raise
        self.report = self.recovered.report
        self.state: State = self.recovered.state
        self.writer = self.recovered.writer
        self.specs = self.recovered.specs
        self._freed_when_written = self.state.slots_freed
        self.tables = ArenaTables(self.recovered.arenas, self.write_freed)
        self.counters = Counters()
        self.placement = Placement(
            self.state,
            self.tables,
            {tier: self.state.structures.lru(SCAN) for tier in Tier},
            self.commit,
            self.counters,
        )
        self.placement.doubt.mark(unverified_rows(self.state))
        self.placement.list_all()
        self.planner = Planner(self.state, self.placement, Limits())
        self.mover = Mover(self.recovered.arenas, self.recovered.disk, durable_writes=False)
        epoch = blank(1, Kind.EPOCH)
        epoch["id"] = self.state.epoch
        try:
            self.commit(epoch)
            self.write()
        except BaseException:
            self.vanish()
            raise

    # --- the log ----------------------------------------------------------------------------------

    def commit(self, records: Any, *, applied: bool = False) -> None:
        self.countdown.step("before commit")
        self.state.commit(records, applied=applied)
        self.writer.append(records.view(np.uint8).data)
        self.countdown.step("after commit")

    def write(self) -> None:
        """The end of a loop turn: from here on all that happened so far is acknowledged."""
        self.countdown.step("before write")
        self.writer.write()
        self._freed_when_written = self.state.slots_freed
        self.written = picture(self.state)
        self.countdown.step("after write")

    def write_freed(self) -> None:
        if self.state.slots_freed != self._freed_when_written:
            self.write()

    def perform(self, effect: Any) -> Any:
        self.write()
        result = self.mover.perform(effect)
        self.countdown.step("after move")
        return result

    def run(self, flow: Any) -> Any:
        return run_inline(flow, self.perform)

    def checkpoint(self, *, last: bool = False) -> None:
        """What the Checkpointer does, without its thread."""
        self.write()
        lsn = self.writer.written_lsn
        changes = self.state.take_changes()
        self.writer.sync()
        meta = {"checkpoint_lsn": lsn} | ({"replies_ahead": 0} if last else {})
        content = index_changes(self.state, changes, self.specs, meta)
        self.countdown.step("before index commit")
        self.recovered.index.commit(content)
        self.countdown.step("after index commit")
        self.writer.forget(lsn)

    def vanish(self) -> None:
        """Give back what the kernel would; write nothing."""
        for arena in self.recovered.arenas.values():
            arena.close()
        if self.recovered.disk is not None:
            self.recovered.disk.close()
        self.recovered.index.close()
        os.close(self.writer._fd)
        self.directory.close()

    # --- a worker ---------------------------------------------------------------------------------

    def hello(self, token: bytes | None = None, pid: int | None = None) -> int:
        """A lease for this process (or another, or one that never was)."""
        pid = os.getpid() if pid is None else pid
        started = start_time(pid) or 1
        lease = self.planner.open_lease(token or uuid.uuid4().bytes, pid, started, os.getuid())
        return lease.id

    def namespace(self, spec: KVSpec = SPEC) -> int:
        """Open a namespace as the service does, tiers first."""
        shape = PoolShape(spec.block_bytes, spec.block_tokens)
        pools = self.state.pools
        pool = pools.index(shape) if shape in pools else len(pools)
        for arena in self.recovered.arenas.values():
            arena.add_pool(pool, shape.block_bytes, shape.block_tokens)
        if self.recovered.disk is not None:
            self.recovered.disk.add_pool(pool, shape.block_bytes, shape.block_tokens)
        return self.planner.open_namespace(spec.digest, shape)

    def slots(self, lease: int, local: int) -> list[int]:
        view = self.planner.table(self.planner.sequence(lease, local))
        return [int(slot) for slot in view.slots]

    def payload(self, slot: int, pool: int = 0) -> Any:
        return self.recovered.arenas[Tier.DEVICE].payload(pool)[slot]

    def store(
        self, lease: int, local: int, tokens: list[int], spec: KVSpec = SPEC, salt: int = 0
    ) -> None:
        """Begin a sequence of full blocks, write their payload, seal them."""
        namespace = self.namespace(spec)
        pool = self.state.namespaces[namespace].pool
        chain = chain_of(tokens, spec)
        view = self.run(self.planner.acquire(lease, namespace, local, chain))
        have = len(view.slots)
        size = spec.block_tokens
        view = self.run(self.planner.reserve(lease, local, have * size, len(chain) * size))
        self.write()
        self.seal(lease, local, tokens, have, pool, spec, salt)

    def seal(
        self,
        lease: int,
        local: int,
        tokens: list[int],
        first: int,
        pool: int = 0,
        spec: KVSpec = SPEC,
        salt: int = 0,
    ) -> None:
        """Write the payload of all full blocks from ``first`` on and seal them."""
        chain = chain_of(tokens, spec)
        slots = self.slots(lease, local)
        sums = []
        for block in range(first, len(chain)):
            payload = self.payload(slots[block], pool)
            payload[:] = content(tokens, block, spec, salt)
            sums.append(checksum(payload))
        pairs = np.array(sums, np.uint64).reshape(-1, 2)
        part = chain.part(first, len(chain))
        self.run(self.planner.seal(lease, local, first, part, pairs[:, 0], pairs[:, 1]))

    def cached(self, tokens: list[int], spec: KVSpec = SPEC) -> int:
        """How many leading blocks of these tokens are found."""
        chain = chain_of(tokens, spec)
        return sum(self.planner.lookup(self.namespace(spec), chain.hi, chain.lo))

    def write_behind(self) -> None:
        sealed = self.planner.take_sealed()
        for rows, ids in sealed:
            self.run(self.placement.clean_down(rows, ids))
        self.write()


# --- content ----------------------------------------------------------------------------------


def chain_of(tokens: list[int], spec: KVSpec = SPEC) -> Chain:
    """The full blocks of ``tokens``."""
    size = spec.block_tokens
    full = np.array(tokens[: len(tokens) // size * size], np.uint32).reshape(-1, size)
    hashes = chain_hashes(spec.digest, full.reshape(-1), size)
    hi, lo = split_hashes(hashes.tobytes())
    return Chain(hi, lo, full, np.zeros(len(full), np.uint64))


def content(tokens: list[int], block: int, spec: KVSpec = SPEC, salt: int = 0) -> Any:
    """The payload of a full block: follows from its tokens and all before it."""
    size = spec.block_tokens
    seed = [salt, *tokens[: (block + 1) * size]]
    return np.random.default_rng(seed).integers(0, 256, spec.block_bytes, np.uint8)


def tail_content(tokens: list[int]) -> Any:
    """The payload of a partial block."""
    seed = [1, *tokens]
    return np.random.default_rng(seed).integers(0, 256, SPEC.block_bytes, np.uint8)


# --- pictures of a state ----------------------------------------------------------------------

Picture = dict[str, Any]


def picture(state: State) -> Picture:
    """All that a state must keep, comparable by ``==``."""
    rows = state.live_rows()
    return {
        "blocks": dict(zip(rows.tolist(), state.blocks.export(rows).tolist(), strict=True)),
        "sequences": {
            one.id: (one.namespace, one.suspended, one.rows.tolist())
            for one in state.sequences.values()
        },
        "leases": dict(state.leases),
        "namespaces": dict(state.namespaces),
        "pools": list(state.pools),
        "refs": state.blocks.refs[rows].tolist(),
        "active": state.blocks.active[rows].tolist(),
        "next_block": state.next_block,
        "next_lease": state.next_lease,
    }


def kept(picture: Picture) -> Picture:
    """The picture without what every restart moves on."""
    return {key: value for key, value in picture.items() if key != "next_block"}
