"""Answers while the disk is busy: a small request meanwhile, and the turns of the event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from tierkv.bench.bars import AtLeast, AtMost, Takes
from tierkv.bench.crowd import Crowd, Work
from tierkv.bench.daemon import Daemon, Link
from tierkv.bench.harness import F64, MICROSECONDS, Bench, Line, Measured, gigabytes_per_s
from tierkv.rpc.messages import Release
from tierkv.rpc.wire import encode
from tierkv.units import MiB

PAUSE_S = 0.002
"""Between two pings."""

SPILL_GB_S = 1.0
P99_US, TIMES_OF_IDLE = 1000.0, 5.0


def run(bench: Bench) -> Iterator[Line]:
    """A ping while nothing happens, and while a worker caches blocks that go to disk."""
    place, seconds = bench.two_cores, bench.pick(40, 3) / 10
    work = Work("spill", bench.pick(2, 1) * MiB, bench.pick(32, 4))
    settings = {"device.bytes": str(3 * work.bytes), "disk.bytes": str(6 * work.bytes)}
    spilled: list[float] = []
    with (
        Daemon(bench, place, "mixed", settings) as daemon,
        Crowd(bench, place.client, daemon, work, 1) as crowd,
    ):
        link = Link(daemon.socket)

        def spilling() -> F64:
            crowd.start(seconds)
            pings = _pings(link, seconds)
            (spent,) = crowd.wait()
            spilled.append(float(spent.mean()))
            return pings

        measured = bench.interleave(
            place, {"spilling": spilling, "idle": lambda: _pings(link, seconds)}
        )
        link.close()
    for percent in (50, 99):
        yield measured.line(
            f"mixed.ping.p{percent}",
            MICROSECONDS,
            "spilling",
            ["idle"],
            place,
            percentile=percent,
            bars=[Takes(TIMES_OF_IDLE, "idle"), AtMost(P99_US)] if percent == 99 else [],
        )
    rate = Measured({"spilling": spilled[1:]}, measured.foreign_cores)
    yield rate.line(
        "mixed.spill",
        gigabytes_per_s(work.bytes),
        "spilling",
        [],
        place,
        bars=[AtLeast(SPILL_GB_S)],
        note="meanwhile",
    )


def _pings(link: Link, seconds: float) -> F64:
    """Seconds of each round trip that does nothing, one every few milliseconds (shape [n])."""
    request = encode(1, Release([]))
    until, spent = time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        link.exchange(request)
        spent.append(time.perf_counter() - began)
    return np.array(spent)
