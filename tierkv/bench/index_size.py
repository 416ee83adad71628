"""What a big index costs: memory, the garbage collector, and the time to a first answer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tierkv.bench.bars import AtMost, Takes
from tierkv.bench.daemon import Daemon
from tierkv.bench.full_store import disk_bytes, make_full
from tierkv.bench.harness import (
    BYTES_PER_BLOCK,
    MILLISECONDS,
    SECONDS,
    Bench,
    Line,
    Measured,
    Sample,
    each_call,
)
from tierkv.bench.replay import last_checkpoint
from tierkv.core.state import State

SMALL, BIG, FULL = 10_000, 1_000_000, 10_000_000
SMALL_QUICK, BIG_QUICK = 1000, 20_000
BYTES_MAX, GC_MS_MAX, TIMES_OF_INDEX = 110.0, 5.0, 1.5


def run(bench: Bench) -> Iterator[Line]:
    """With ten thousand blocks on disk, with a million, and with ten million in a full run."""
    small = bench.pick(SMALL, SMALL_QUICK)
    for blocks in (bench.pick(BIG, BIG_QUICK), *([FULL] if bench.full else [])):
        yield from _of(bench, small, blocks)


class _Store:
    """A daemon whose index names so many blocks on disk."""

    def __init__(self, daemon: Daemon, blocks: int) -> None:
        self._daemon = daemon
        self._blocks = blocks
        self.resident: list[int] = []
        daemon.kill()
        if blocks:
            make_full(daemon, blocks)

    def start(self) -> float:
        """Seconds until it serves; ``resident`` gets the memory that is its own."""
        spent = self._daemon.start()
        with self._daemon.connect() as cache:
            found = cache.stat()["blocks"]
        if found != self._blocks:
            raise RuntimeError(f"{found} of {self._blocks} blocks were recovered")
        self.resident.append(_own_memory(self._daemon.pid))
        self._daemon.kill()
        return spent

    def read(self) -> State:
        """Read the index into a state, and do nothing else that a start does."""
        state = last_checkpoint(self._daemon.state).state
        state.reindex()
        return state


def _of(bench: Bench, few: int, many: int) -> Iterator[Line]:
    place = bench.two_cores
    with ExitStack() as leaving:

        def store(blocks: int) -> _Store:
            settings = {"disk.bytes": disk_bytes(max(blocks, 1)), "wal.segment_bytes": "16 MiB"}
            daemon = Daemon(bench, place, f"index-{blocks}", settings)
            return _Store(leaving.enter_context(daemon), blocks)

        small, big, empty = store(few), store(many), store(0)
        variants: dict[str, Callable[[], Sample]] = {
            "big": big.start,
            "small": small.start,
            "empty": empty.start,
            "read big": lambda: bench.on(place.server, big.read),
            "read small": lambda: bench.on(place.server, small.read),
        }
        found = bench.interleave(place, variants)
        seconds = {name: found.seconds(name) for name in variants}
        extra = {
            "start": _less(seconds["big"], seconds["small"]),
            "reading the index": _less(seconds["read big"], seconds["read small"]),
        }
        # The first round warms up, as in ``interleave``.
        memory = [
            (mine - none) / many
            for mine, none in zip(big.resident[1:], empty.resident[1:], strict=True)
        ]
        yield Measured(extra, found.foreign_cores).line(
            f"growth.start.{many}",
            SECONDS,
            "start",
            ["reading the index"],
            place,
            bars=[Takes(TIMES_OF_INDEX, "reading the index")],
            note=f"more than with {few:,} blocks",
        )
        yield Measured({"memory": memory}, found.foreign_cores).line(
            f"growth.memory.{many}",
            BYTES_PER_BLOCK,
            "memory",
            [],
            place,
            bars=[AtMost(BYTES_MAX)],
            note="a block",
        )
        with _collected(big) as collections:
            measured = bench.interleave(bench.same_core, {"tierkv": collections})
    yield measured.line(
        f"growth.gc.{many}", MILLISECONDS, "tierkv", [], bench.same_core, bars=[AtMost(GC_MS_MAX)]
    )


def _less(ours: list[float], theirs: list[float]) -> list[Sample]:
    # Never quite nothing, so that it can be divided by; only tiny stores get there.
    return [max(1e-6, one - other) for one, other in zip(ours, theirs, strict=True)]


@contextmanager
def _collected(store: _Store) -> Iterator[Callable[[], Sample]]:
    """Full collections in a process that has the state of the store, and else nothing."""
    gc.collect()
    gc.freeze()
    try:
        state = store.read()
        yield lambda: each_call(gc.collect, 20)
        del state
    finally:
        gc.unfreeze()


def _own_memory(pid: int) -> int:
    """Bytes of a process that are no part of a file or of shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"process {pid} has gone")
