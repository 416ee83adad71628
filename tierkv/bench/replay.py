"""From kill -9 to serving again, by the size of the store; and how fast the log is replayed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from tierkv_wal import RealStorage, WalReader

from tierkv.bench.daemon import Daemon, spec_of
from tierkv.bench.full_store import disk_bytes, make_full
from tierkv.bench.harness import SECONDS, Bench, Line, child_environment, once, thousands_per_s
from tierkv.bench.lookup import fill
from tierkv.bench.rebuild import rebuild_line
from tierkv.bench.small import SPEC as CYCLE_SPEC
from tierkv.bench.small import cycle, prompts
from tierkv.core.ids import U8, Tier
from tierkv.core.records import RECORD
from tierkv.core.replay import replay
from tierkv.core.state import State
from tierkv.native.loops import loops
from tierkv.service.snapshot import restore
from tierkv.service.store import read_format
from tierkv.tiers.index import Index
from tierkv.tiers.sizes import slot_bytes

IMPORTS = "import tierkv.cli.serve, tierkv.service.daemon"
DEVICE_BYTES = 16 << 20
INDEX_BYTES = 16 << 30


def run(bench: Bench) -> Iterator[Line]:
    """Blocks stay in the RAM tier, which outlives the process; index and log are on disk."""
    segment_mib = bench.pick(64, 1)
    settings = {"device.bytes": str(DEVICE_BYTES), "wal.segment_bytes": f"{segment_mib} MiB"}
    for blocks in (1000,) if bench.quick else (0, 10_000, 100_000, 1_000_000):
        settings["device.bytes"] = str(DEVICE_BYTES + 64 * blocks)
        with Daemon(bench, bench.two_cores, f"recovery-{blocks}", settings) as daemon:
            with daemon.connect() as cache:
                fill(cache.namespace(spec_of(64, block_tokens=1)), blocks)
            daemon.kill()
            kept = Kept(daemon)
            yield _start(bench, daemon, kept, f"replay.start.{blocks}", blocks)
            kept.remove()
    blocks, records = bench.pick(500_000, 5000), bench.pick(1_000_000, 10_000)
    settings["disk.bytes"] = disk_bytes(blocks)
    with Daemon(bench, bench.two_cores, "recovery-full", settings) as daemon:
        daemon.kill()
        make_full(daemon, blocks, records)
        kept = Kept(daemon)
        yield _start(bench, daemon, kept, f"replay.full.{blocks}.{records}", blocks)
        yield _replay(bench, kept, f"replay.log.{records}.records")
        kept.remove()
    del settings["disk.bytes"]
    with Daemon(bench, bench.two_cores, "recovery-cycles", settings) as daemon:
        count = bench.pick(5000, 50)
        with daemon.connect() as cache:
            namespace = cache.namespace(CYCLE_SPEC)
            for tokens in prompts(count):
                cycle(namespace, tokens)
        daemon.kill()
        kept = Kept(daemon)
        yield _replay(bench, kept, f"replay.log.{count}.cycles")
        kept.remove()
    yield rebuild_line(bench)


class Kept:
    """What a killed daemon left, to be recovered again and again."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.folder = daemon.state.with_name(daemon.state.name + "-kept")
        self._copy(daemon.state, self.folder / "state")
        self._copy(daemon.arenas, self.folder / "arenas")

    @property
    def segments(self) -> list[Path]:
        """The files of the log, oldest first."""
        return sorted((self.folder / "state" / "wal").glob("*.wal"))

    def remove(self) -> None:
        """Give the space back."""
        shutil.rmtree(self.folder)

    def put_back(self) -> None:
        """Make it as it was when the daemon was killed."""
        self._daemon.kill()
        for kept, place in (("state", self._daemon.state), ("arenas", self._daemon.arenas)):
            shutil.rmtree(place)
            self._copy(self.folder / kept, place)

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        # The arenas are sparse: cp keeps the holes.
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def _start(bench: Bench, daemon: Daemon, kept: Kept, name: str, blocks: int) -> Line:
    place = bench.two_cores
    imports = [sys.executable, "-c", IMPORTS]
    files = [kept.folder / "state" / "index" / "data.mdb", *kept.segments]
    records = 0

    def start() -> float:
        nonlocal records
        kept.put_back()
        spent = daemon.start()
        with daemon.connect() as cache:
            recovery = cache.stat()["recovery"]
        if recovery["blocks"] != blocks:
            raise RuntimeError(f"{recovery['blocks']} of {blocks} blocks were recovered")
        records = recovery["records"]
        return spent

    def imported() -> None:
        bench.reap(bench.spawn(place.server, imports, env=child_environment()))

    def read() -> None:
        for path in files:
            path.read_bytes()

    measured = bench.interleave(
        place,
        {
            "tierkv": start,
            "imports": lambda: once(imported),
            "read": lambda: bench.on(place.server, read),
        },
    )
    note = f"{records} records"
    return measured.line(name, SECONDS, "tierkv", ["imports", "read"], place, note=note)


class Checkpoint(NamedTuple):
    """What a store's last checkpoint holds, and behind what it is in the log of that store."""

    state: State
    lsn: int
    store_uuid: bytes


def last_checkpoint(state_dir: Path) -> Checkpoint:
    """Read the index into a state. Raises RuntimeError if there is no store."""
    stored = read_format(state_dir)
    if stored is None:
        raise RuntimeError(f"there is no store in {state_dir}")
    index = Index(state_dir / "index", INDEX_BYTES)
    try:
        contents = index.load()
        state = State(dict.fromkeys(Tier, 1 << 50), slot_bytes, loops().structures())
        restore(state, contents, index.blocks())
    finally:
        index.close()
    return Checkpoint(state, int(contents.meta["checkpoint_lsn"]), stored.store_uuid)


def _replay(bench: Bench, kept: Kept, name: str) -> Line:
    """The log's records into the state of the last checkpoint, in this process."""
    place = bench.same_core
    directory = kept.folder / "state"
    _, after_lsn, uuid = last_checkpoint(directory)

    def frames() -> list[U8]:
        reader = WalReader(RealStorage(), str(directory / "wal"), uuid, after_lsn)
        return [frame.records for frame in reader.frames()]

    def replayed() -> float:
        state = last_checkpoint(directory).state
        return once(lambda: replay(state, np.concatenate(frames()).view(RECORD).reshape(-1)))

    records = sum(map(len, frames()))

    def read() -> None:
        left = records * RECORD.itemsize
        for path in kept.segments:
            with path.open("rb") as file:
                content = file.read(left)
            xxhash.xxh3_64_digest(content)
            left -= len(content)

    measured = bench.interleave(
        place,
        {
            "tierkv": replayed,
            "frames alone": lambda: once(frames),
            "read + xxh3": lambda: once(read),
        },
    )
    return measured.line(
        name,
        thousands_per_s(records),
        "tierkv",
        ["frames alone", "read + xxh3"],
        place,
        note=f"{records} records",
    )
