"""Turns of the daemon's event loop under a mixed load: how long a request may have to wait."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack

from tierkv.bench.bars import AtMost
from tierkv.bench.crowd import Crowd, Work
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import MICROSECONDS, Bench, Line
from tierkv.units import KiB, MiB

METRIC = "tierkv_loop_turn_seconds"
TURN_US, SHARE = 2000.0, 0.999
MINUTES_FULL = 10


def run(bench: Bench) -> Iterator[Line]:
    """Workers that put, get, and fill the disk, all at once."""
    place = bench.two_cores
    seconds = 60 * MINUTES_FULL / bench.rounds if bench.full else bench.pick(10, 1)
    works = [
        (Work("spill", bench.pick(2, 1) * MiB, bench.pick(32, 2)), 1),
        (Work("put", 64 * KiB, 64), 2),
        (Work("get", 256 * KiB, bench.pick(64, 4)), 2),
    ]
    # Each worker's own and as much again, so that puts evict and what was got stays.
    held = sum(4 * work.bytes * count for work, count in works)
    settings = {
        "device.bytes": str(held),
        "host.bytes": str(held // 2),
        "disk.bytes": str(4 * held),
    }
    with ExitStack() as leaving:
        daemon = leaving.enter_context(Daemon(bench, place, "turns", settings))
        crowds = [
            leaving.enter_context(Crowd(bench, place.client, daemon, work, count))
            for work, count in works
        ]

        def load() -> float:
            before = buckets(daemon.metrics(), METRIC)
            for crowd in crowds:
                crowd.start(seconds)
            time.sleep(seconds)
            for crowd in crowds:
                crowd.wait()
            after = buckets(daemon.metrics(), METRIC)
            return quantile({bound: after[bound] - before[bound] for bound in after}, SHARE)

        measured = bench.interleave(place, {"tierkv": load})
    yield measured.line(
        "mixed.turn.p999",
        MICROSECONDS,
        "tierkv",
        [],
        place,
        bars=[AtMost(TURN_US)],
        note=f"at most; {bench.rounds} times {seconds:g} s",
    )


def buckets(page: str, metric: str) -> dict[float, float]:
    """A histogram's counts up to each bound (seconds, the last is inf), from the page /metrics."""
    found = re.findall(rf'^{metric}_bucket\{{le="([^"]+)"\}} (\S+)$', page, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def quantile(counts: dict[float, float], share: float) -> float:
    """The smallest bound that this share of all is below. Raises ValueError if nothing was."""
    total = counts.get(float("inf"), 0.0)
    if not total:
        raise ValueError("nothing was counted")
    return next(bound for bound, count in sorted(counts.items()) if count >= share * total)
