"""A killed daemon's store to be damaged, and a process that recovers the damaged copies.

``python damaged.py`` recovers every store whose folder is named by a line of its input, and answers
each by a line that says what it found. It is a process of its own because a damaged file may kill
whoever maps it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from recovery_harness import SIZE, SPEC, Daemon, Machine, chain_of, content
from tierkv_wal.format import FRAME_HEADER, HEADER_BYTES, SLOT_BYTES

from tierkv.core.ids import Tier
from tierkv.errors import TierkvError

SETTINGS = {"device": 48, "host": 8, "disk": 64}
CHAINS = [list(range(1000 * n, 1000 * n + (2 + n % 4) * SIZE)) for n in range(1, 17)]
CHECKPOINTED = 9
"""Chains in the checkpoint. So many that it does not fall on the end of a segment of the log."""

HELD = 3
"""The chain that a worker held when the daemon died. It lives: it is this process."""

ANSWER_S = 30.0
"""Longest wait for one recovery; only one that hangs takes it."""


# --- the store ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogFrame:
    """One frame of the log: where it lies, its LSNs, and what it knew to be durable."""

    path: Path
    offset: int
    end: int
    lsn: int
    last_lsn: int
    durable_lsn: int


@dataclass
class Store:
    """What the daemon left. Paths are relative to the store's folder.

    ``lsn_of``: by chain, the LSN that it was acknowledged at; 0 for those in the checkpoint.
    ``places``: by chain and block, the disk slot. ``device``: the same, offsets in the arena.
    """

    folder: Path
    lsn_of: list[int] = field(default_factory=list)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    device: dict[tuple[int, int], int] = field(default_factory=dict)

    def copy(self, folder: Path, *, with_ram: bool) -> Path:
        """Another store like this one. Without RAM: as after a reboot."""
        for source in sorted(self.folder.rglob("*")):
            target = folder / source.relative_to(self.folder)
            if source.is_dir():
                target.mkdir(parents=True)
            elif with_ram or "arena" not in source.relative_to(self.folder).parts:
                _copy_sparse(source, target)
        return folder

    def log(self) -> list[Path]:
        """The log's segments, oldest first."""
        return [
            p.relative_to(self.folder) for p in sorted((self.folder / "state/wal").glob("*.wal"))
        ]

    def payload_segments(self) -> list[Path]:
        """The files of the disk tier, in order."""
        return [p.relative_to(self.folder) for p in sorted((self.folder / "data").glob("*.seg"))]

    def size(self, path: Path) -> int:
        return (self.folder / path).stat().st_size

    def frames(self) -> list[LogFrame]:
        """All frames of the log in order."""
        found = []
        for path in self.log():
            data, at = (self.folder / path).read_bytes(), HEADER_BYTES
            while at < len(data):
                (header,) = np.frombuffer(data, FRAME_HEADER, 1, at)
                if header["magic"] != b"TKF1":
                    break
                count, lsn = int(header["records"]), int(header["lsn"])
                end = at + (count + 1) * SLOT_BYTES
                durable = int(header["durable_lsn"])
                found.append(LogFrame(path, at, end, lsn, lsn + count, durable))
                at = end
        return found


def make_store(folder: Path) -> Store:
    """A store with blocks in all tiers, half of them in the checkpoint, half in several segments
    of the log behind it; killed."""
    machine, store = Machine(folder), Store(folder)
    daemon = machine.start(**SETTINGS)
    lease = daemon.hello()
    for number, tokens in enumerate(CHAINS):
        if number == CHECKPOINTED:
            daemon.checkpoint()
            store.lsn_of = [0] * number
        daemon.store(lease, number + 1, tokens)
        daemon.write_behind()
        store.lsn_of.append(daemon.writer.written_lsn)
        for step in range(6):  # a longer log
            daemon.run(daemon.planner.reserve(lease, number + 1, len(tokens), len(tokens) + 1))
            daemon.write()
            if step % 2:
                daemon.writer.sync()
            daemon.planner.truncate(lease, number + 1, len(tokens))
            daemon.write()
        daemon.planner.release(lease, [number + 1])
        daemon.write()
    held = CHAINS[HELD]
    daemon.store(lease, 99, held)
    daemon.run(daemon.planner.reserve(lease, 99, len(held), len(held) + 1))
    daemon.write()
    _note_places(daemon, store)
    machine.crash()
    return store


def _note_places(daemon: Daemon, store: Store) -> None:
    blocks, arena = daemon.state.blocks, daemon.recovered.arenas[Tier.DEVICE]
    stride = arena.slots(0).shape[1]
    for number, tokens in enumerate(CHAINS):
        chain = chain_of(tokens)
        rows = daemon.state.index.get(chain.hi, chain.lo, blocks.hash_hi, blocks.hash_lo)
        for block, row in enumerate(rows.tolist()):
            store.places[number, block] = int(blocks.slot[Tier.DISK][row])
            if blocks.has_copy(np.array([row]), Tier.DEVICE)[0]:
                store.device[number, block] = int(blocks.slot[Tier.DEVICE][row]) * stride


def _copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        at = 0
        while at < size:
            try:
                start = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            at = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), at - start, start), start)


# --- recovering copies of it ----------------------------------------------------------------------


@dataclass
class Found:
    """What recovery made of a store. ``refused``: the typed error, if it did not start.

    ``blocks``: of each chain, leading blocks found; ``wrong``: those of them with wrong bytes.
    """

    refused: str = ""
    wal_end: str = ""
    quarantined: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    wrong: list[tuple[int, int]] = field(default_factory=list)


class Recoverer:
    """The process that recovers stores. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def recover(self, folder: Path) -> Found:
        """Recover one store. Fails if the process dies over it, or hangs."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{folder}\n".encode())
        process.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            assert waiting.select(ANSWER_S), "recovery hangs"
        line = process.stdout.readline()
        if not line:
            self._process = None
            process.communicate()
            raise AssertionError(f"recovery died, exit code {process.returncode}")
        return Found(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process


def _look(folder: Path) -> Found:
    machine = Machine(folder)
    try:
        found = _found(machine.start(**SETTINGS))
        again = machine.start()
        assert again.report.wal_end == "clean"
        for tokens, blocks in zip(CHAINS, found.blocks, strict=True):
            assert again.cached(tokens) >= blocks, "the second recovery lost what the first found"
        return found
    except TierkvError as error:
        return Found(refused=f"{type(error).__name__}: {error}")
    finally:
        machine.crash()


def _found(daemon: Daemon) -> Found:
    report = daemon.report
    found = Found(wal_end=report.wal_end, quarantined=report.quarantined)
    lease, namespace = daemon.hello(), daemon.namespace()
    for number, tokens in enumerate(CHAINS):
        chain = chain_of(tokens)
        view = daemon.run(daemon.planner.acquire(lease, namespace, number + 1, chain))
        found.blocks.append(len(view.slots))
        for block, slot in enumerate(view.slots.tolist()):
            if (daemon.payload(slot) != content(tokens, block)).any():
                found.wrong.append((number, block))
        daemon.planner.release(lease, [number + 1])
    # A put and a get: it can be gone on with.
    fresh = list(range(5 * SIZE))
    daemon.store(lease, 1, fresh)
    daemon.write_behind()
    assert daemon.cached(fresh) == 5
    slots = daemon.slots(lease, 1)
    assert all((daemon.payload(s) == content(fresh, b)).all() for b, s in enumerate(slots))
    daemon.planner.close_lease(lease)
    daemon.write()
    return found


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """On a RAM file system where there is one: a sync costs nothing there."""
    ram = "/dev/shm"
    return tempfile.TemporaryDirectory(
        prefix="tierkv-damage-", dir=ram if os.path.isdir(ram) else None
    )


if __name__ == "__main__":
    assert SPEC.block_tokens == SIZE
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(_look(Path(line.strip())))), flush=True)
