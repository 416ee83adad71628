"""Eight workers at once: how much they get done together, and whether each gets its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.bench.bars import Reaches, Takes
from tierkv.bench.crowd import Crowd, Work
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import F64, MILLISECONDS, Bench, Line, Measured, gigabytes_per_s
from tierkv.units import KiB

WORKERS = 8
SHARE, TIMES_OF_MEDIAN = 0.9, 3.0


def puts(bench: Bench) -> Iterator[Line]:
    """By copy, of 64 blocks at a time."""
    return _all_do(bench, Work("put", 256 * KiB, bench.pick(64, 8)))


def gets(bench: Bench) -> Iterator[Line]:
    """By copy, of 64 blocks at a time."""
    return _all_do(bench, Work("get", 256 * KiB, bench.pick(64, 8)))


def _all_do(bench: Bench, work: Work) -> Iterator[Line]:
    place, seconds = bench.two_cores, bench.pick(20, 4) / 10
    settings = {"device.bytes": str(4 * WORKERS * work.bytes)}
    name = f"{work.kind}.workers.x{WORKERS}"
    slowest: list[float] = []
    medians: list[float] = []
    with (
        Daemon(bench, place, f"workers-{work.kind}", settings) as daemon,
        Crowd(bench, place.client, daemon, work, WORKERS) as crowd,
    ):

        def together() -> float:
            crowd.start(seconds)
            spent = crowd.wait()
            tails = [float(np.percentile(one, 99)) for one in spent]
            slowest.append(max(tails))
            medians.append(float(np.median(tails)))
            return _seconds_apiece(spent)

        def alone() -> float:
            crowd.start(seconds, members=1)
            return _seconds_apiece(crowd.wait())

        measured = bench.interleave(place, {"together": together, "one worker": alone})
    unit = gigabytes_per_s(work.bytes)
    yield measured.line(
        name, unit, "together", ["one worker"], place, bars=[Reaches(SHARE, "one worker")]
    )
    # The first round warms up, as in ``interleave``.
    tails = Measured(
        {"slowest worker": slowest[1:], "median worker": medians[1:]}, measured.foreign_cores
    )
    bars = [Takes(TIMES_OF_MEDIAN, "median worker")]
    yield tails.line(
        f"{name}.p99", MILLISECONDS, "slowest worker", ["median worker"], place, bars=bars
    )


def _seconds_apiece(spent: Sequence[F64]) -> float:
    """What a piece takes on average when all workers' are counted: they work side by side."""
    rate = sum(len(one) / float(one.sum()) for one in spent)
    return 1 / rate
