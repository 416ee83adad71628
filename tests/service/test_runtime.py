"""What the daemon's process measures of itself, and how it is set."""

from __future__ import annotations

import asyncio
import gc
import mmap
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from tierkv.obs.histogram import Histogram
from tierkv.service.runtime import LOOK_S, take_memory, watch_loop, watched_collector

BOUNDS = (0.001, 0.01, 0.1)
BLOCKED_S = 0.05
TURN_S = 0.005
Factory = Callable[[], asyncio.AbstractEventLoop]


def _factories() -> list[Factory]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.new_event_loop]
    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("factory", _factories())
def test_a_blocked_loop_wakes_up_late(factory: Factory) -> None:
    turns, delays = Histogram(BOUNDS), Histogram(BOUNDS)

    async def main() -> None:
        watching = asyncio.ensure_future(watch_loop(turns, delays))
        await asyncio.sleep(0)  # its timer is set, and due while nothing runs
        block(BLOCKED_S)
        await until(lambda: delays.count > 0)
        watching.cancel()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert delays.largest >= BLOCKED_S - LOOK_S


@pytest.mark.parametrize("factory", _factories())
def test_a_turn_is_as_long_as_what_runs_in_it(factory: Factory) -> None:
    turns, delays = Histogram(BOUNDS), Histogram(BOUNDS)

    async def busy() -> None:
        while True:
            block(TURN_S)
            await asyncio.sleep(0)

    async def main() -> None:
        tasks = [asyncio.ensure_future(one) for one in (busy(), watch_loop(turns, delays))]
        await until(lambda: turns.count >= 3)
        for task in tasks:
            task.cancel()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert turns.quantile(0.01) >= TURN_S


def block(seconds: float) -> None:
    """What nobody may do on the loop."""
    time.sleep(seconds)


async def until(true: Callable[[], bool]) -> None:
    """Let the loop turn until then."""
    while not true():  # noqa: ASYNC110  # nothing sets an event when a histogram is told something
        await asyncio.sleep(0)


def test_runs_of_the_collector_are_counted_meanwhile_and_not_after() -> None:
    pauses = Histogram(BOUNDS)
    with watched_collector(pauses):
        gc.collect()
    counted = pauses.count
    gc.collect()
    assert counted == pauses.count >= 1
    assert 0 < pauses.largest <= pauses.total


def test_memory_is_there_before_it_is_touched_and_its_content_stays() -> None:
    whole = np.frombuffer(mmap.mmap(-1, 8 << 20), np.uint64)
    whole[1 << 18] = 7
    before = _resident_bytes()
    take_memory([whole[(1 << 17) + 5 :]])
    assert _resident_bytes() - before >= 6 << 20
    assert whole[1 << 18] == 7
    assert np.count_nonzero(whole) == 1


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


PASSING = """
import threading
from pathlib import Path
import numpy as np
from tierkv.service.runtime import keep_objects, set_interpreter

def own_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

def work():
    np.ones(3 << 20)  # glibc now keeps arrays of less than this in its heaps
    kept.append([np.ones(1 << 18) for _ in range(64)][::8])

set_interpreter()
kept = []
before = own_kib()
thread = threading.Thread(target=work)
thread.start()
thread.join()
keep_objects()
print(own_kib() - before)
"""


def test_memory_that_a_thread_of_a_start_needed_goes_back_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", PASSING], check=True, stdout=subprocess.PIPE)
    assert int(done.stdout) < (16 + 8) << 10  # KiB; 16 MiB of 128 are kept
