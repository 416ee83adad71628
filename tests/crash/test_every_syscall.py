"""kill -9 at every system call by which a daemon changes its store, and a start after each.

The daemon starts on what a killed one left (or on nothing), so the calls are those of recovery,
seals, spills, copies to disk, rotations of the log, checkpoints, and of the stop.
TIERKV_CRASH_SWEEP=full also sweeps the other durabilities, and the calls that change nothing.
"""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from tests.crash.sweep import FULL, Sweep, named, needs_strace, places, prepared_store, table
from tests.crash.sweeper import Job

pytestmark = [needs_strace, pytest.mark.slow, pytest.mark.timeout(1800 if FULL else 300)]

PATHS = {
    "/state/wal/0000000000000002.wal": ("fdatasync", "unlink"),
    "/state/wal/0000000000000005.wal": ("pwrite64", "fdatasync", "unlink"),
    "/state/wal/next.tmp": ("openat", "fallocate", "pwrite64", "fdatasync", "rename"),
    "/state/wal": ("fsync",),
    "/state/index/data.mdb": ("writev", "pwrite64", "fdatasync"),
    "/data/4096x8-00000000.seg": ("fdatasync",),
    "/data/4096x8-00000002.seg.tmp": ("openat", "fallocate", "fdatasync", "rename"),
    "/data": ("fsync",),
}
"""What the sweep of a restart must contain, or the script no longer does what it should."""

OPERATORS = {
    "/state/DELETED": ("openat", "pwrite64", "fdatasync"),
    "/state": ("fsync",),
    "/state/index/data.mdb": ("writev", "fdatasync"),
}
"""And that of what operators do."""

CALLS_OF_A_PIN = 4


@pytest.mark.parametrize("durability", ["kill", "power", "none"] if FULL else ["kill"])
@pytest.mark.parametrize("script", ["restart", "first start", "operators"])
def test_a_kill_at_any_call_loses_nothing(
    script: str, durability: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with prepared_store(durability) as store, Sweep() as sweep:
        plain = Job(script, "" if script == "first start" else store, durability)
        reference = sweep.reference(plain)
        made = {(call.place, call.name) for call in reference}
        paths = {"restart": PATHS, "operators": OPERATORS}.get(script, {})
        wanted = {(place, name) for place, names in paths.items() for name in names}
        assert wanted <= made, wanted - made
        counts = Counter(call.name for call in reference)
        points = [point for point in places(reference) if FULL or point[2].changes]
        if script == "operators" and not FULL:
            # What comes before the pin is a restart like any other.
            first = next(n for n, call in enumerate(reference) if call.place == "/state/DELETED")
            points = [point for point in points if point[0] >= first - CALLS_OF_A_PIN]
        jobs = [
            Job(script, plain.store, durability, call.name, "signal=KILL", number)
            for _, number, call in points
        ]
        for (index, number, call), result in zip(points, sweep.run(jobs), strict=True):
            at = f"killed at {call.name} number {number}, of {call.place}"
            # Exactly there: all before it was done, nothing after it.
            assert result.ended == -signal.SIGKILL, f"not {at}: {result.said}"
            assert named(result.calls) == named(reference[: index + 1]), f"not {at}"
            assert result.problems == [], at
        # One beyond the last is never reached: the counts are complete.
        beyond = [
            Job(script, plain.store, durability, name, "signal=KILL", count + 1)
            for name, count in counts.items()
        ]
        for job, result in zip(beyond, sweep.run(beyond), strict=True):
            assert result.ended == 0, job
            assert named(result.calls) == named(reference), job
            assert result.problems == [], job
    with capsys.disabled():
        print(f"\n{script}, {durability}: {table(Counter(call.name for *_, call in points))}")
