"""How the daemon's process is set, and how well its event loop keeps up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tierkv.core.space import Memory
from tierkv.obs.histogram import Histogram
from tierkv.pages import PAGE_BYTES, libc, populate

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter: bounds how late the loop wakes up."""

GC_THRESHOLDS = (50_000, 50, 1000)
"""Objects that survive, and runs over younger ones, until the collector looks: seldom, for what a
request leaves behind is no garbage that it would have to find."""

# From malloc.h. By itself glibc makes a heap for each thread, up to so many for each CPU.
_M_ARENA_MAX = -8
_HEAPS_PER_CPU = 8

LOOK_S = 0.01
"""How often a turn of the event loop is measured."""


def set_interpreter() -> None:
    """Set what the whole process shares: how threads take turns, when garbage is collected."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    _limit_heaps(1)


def keep_objects() -> None:
    """All objects there are now are here to stay: the collector looks at them no more.

    What memory a start needed and does not any more goes back to the kernel.
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):
        libc().malloc_trim(0)
    _limit_heaps(_HEAPS_PER_CPU * (os.cpu_count() or 1))


def _limit_heaps(count: int) -> None:
    """All threads to come share so many heaps. Until a start is over it is one: memory that is free
    at the end of another one would stay there for good.
    """
    # Only glibc has them.
    with contextlib.suppress(AttributeError):
        libc().mallopt(_M_ARENA_MAX, count)


@contextlib.contextmanager
def watched_collector(pauses: Histogram) -> Iterator[None]:
    """Meanwhile the garbage collector's runs are measured, seconds.

    Whatever thread one falls upon: no other can begin before it has ended.
    """
    started = 0.0

    def ran(phase: str, _info: dict[str, Any]) -> None:
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            pauses.observe(time.perf_counter() - started)

    gc.callbacks.append(ran)
    try:
        yield
    finally:
        gc.callbacks.remove(ran)


def take_memory(parts: Iterable[Memory]) -> None:
    """Have the kernel give the parts their pages; no byte changes. On a thread: it takes its time.

    A page that is touched first takes microseconds, a huge one up to milliseconds.
    """
    for part in parts:
        part_bytes = part.view(np.uint8)
        pages = part_bytes[-part_bytes.ctypes.data % PAGE_BYTES :]
        # An older kernel refuses: then requests take the pages.
        with contextlib.suppress(OSError):
            populate(pages, 0, len(pages))


async def watch_loop(
    turns: Histogram, delays: Histogram, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Measure, for ever, how long turns of the running loop take and how late it wakes up."""
    while True:
        due = clock() + LOOK_S
        await asyncio.sleep(LOOK_S)
        delays.observe(max(0.0, clock() - due))
        # From the first step of one turn to that of the next: all that lies between is one turn.
        await asyncio.sleep(0)
        began = clock()
        await asyncio.sleep(0)
        turns.observe(clock() - began)
