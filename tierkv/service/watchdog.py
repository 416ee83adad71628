"""Tells the service manager that the daemon is alive, but only while all that must beat does.

Fed from the event loop: one that hangs feeds nobody. A thread that has been in one job for longer
than the manager waits does not beat either; then the manager kills the daemon and starts the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from tierkv.service.systemd import Notifier

log = logging.getLogger(__name__)
T = TypeVar("T")

FEEDS_PER_PERIOD = 3


class Pulse:
    """How long the threads of a pool have been in their jobs."""

    def __init__(self) -> None:
        self._began_s: dict[int, float] = {}
        """By thread. Each adds and removes its own entry, in one step each."""

    def watched(self, job: Callable[[], T]) -> Callable[[], T]:
        """The job, seen while a thread is in it."""

        def seen() -> T:
            thread = threading.get_ident()
            self._began_s[thread] = time.monotonic()
            try:
                return job()
            finally:
                del self._began_s[thread]

        return seen

    @property
    def longest_s(self) -> float:
        """The longest that any thread has been in its job by now."""
        return time.monotonic() - min(self._began_s.values(), default=time.monotonic())


def period_s(environment: Mapping[str, str]) -> float:
    """How long the service manager waits for a sign of life; 0 = it does not watch us."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    period_us = environment.get("WATCHDOG_USEC", "")
    return int(period_us) / 1e6 if period_us.isdecimal() else 0.0


async def feed(notifier: Notifier, period_s: float, pulses: Mapping[str, Pulse]) -> None:
    """Give signs of life for ever, if somebody watches. ``pulses``: by whose it is."""
    if not period_s:
        await asyncio.get_running_loop().create_future()
    starving = False
    while True:
        stuck = [name for name, pulse in pulses.items() if pulse.longest_s > period_s]
        if not stuck:
            notifier.send("WATCHDOG=1")
        elif not starving:
            log.critical(
                "%s: a thread has been in one job for more than %.1f s; unless it ends the "
                "service manager kills this daemon, and the next one goes on",
                ", ".join(stuck),
                period_s,
            )
        starving = bool(stuck)
        await asyncio.sleep(period_s / FEEDS_PER_PERIOD)
