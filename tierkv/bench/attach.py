"""Attaching to a large arena: what a worker waits for before it touches memory at full speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tierkv.bench.bars import Takes
from tierkv.bench.ceilings import nanoseconds, program
from tierkv.bench.daemon import Daemon, spec_of
from tierkv.bench.harness import MILLISECONDS, Bench, Line, Sample
from tierkv.units import GiB, KiB, MiB

SPEC = spec_of(64 * KiB)
TIMES_OF_C = 1.2
WAIT_S = 120.0


def run(bench: Bench) -> Iterator[Line]:
    """Connect, map and populate memory that the daemon has taken already."""
    place = bench.two_cores
    size = 8 * GiB if bench.full else bench.pick(GiB, 16 * MiB)
    with Daemon(bench, place, "attach", {"device.bytes": str(size)}) as daemon:
        with daemon.connect() as cache:
            cache.namespace(SPEC)
            _wait(lambda: cache.stat()["memory"]["device"]["prefault"] == "done")

        def attach() -> float:
            began = time.perf_counter()
            with daemon.connect() as cache:
                cache.namespace(SPEC)
                _wait(lambda: not cache.populating)
                return time.perf_counter() - began

        variants: dict[str, Callable[[], Sample]] = {"tierkv": attach}
        populate = program(bench.folder, "populate")
        if populate is not None:
            command = [populate, str(daemon.arenas / "device.arena"), str(size)]
            variants["mmap + populate in C"] = lambda: nanoseconds(bench, place.client, command)
        measured = bench.interleave(place, variants)
    references = list(variants)[1:]
    yield measured.line(
        f"get.attach.{size // MiB}m",
        MILLISECONDS,
        "tierkv",
        references,
        place,
        bars=[Takes(TIMES_OF_C, name) for name in references],
    )


def _wait(ready: Callable[[], bool]) -> None:
    """Wait for work in the background. Raises TimeoutError."""
    deadline = time.perf_counter() + WAIT_S
    while not ready():
        if time.perf_counter() > deadline:
            raise TimeoutError("the memory did not get ready")
        time.sleep(0.001)
