"""What the service manager is told of the daemon's life, sd_notify(3)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.service.systemd import Notifier

STATUS_S = 2.0
"""How often it hears how the daemon is."""

EXTENSION_S = 30.0
"""How much longer it shall wait for a start or a stop, counted from each time that it is told."""

STEP_S = 600.0
"""A start that says the same for so long asks for no more time."""


class Announcer:
    """Says to the manager what state the daemon is in; nothing where there is no manager."""

    def __init__(self, notifier: Notifier, clock: Callable[[], float] = time.monotonic) -> None:
        self._notifier = notifier
        self._clock = clock

    def serving(self, status: str) -> None:
        """The start is over, or a reload."""
        self._notifier.send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        """The daemon ends by itself or because it was told to."""
        self._notifier.send("STOPPING=1", "STATUS=stopping")

    @contextmanager
    def reloading(self, status: Callable[[], str]) -> Iterator[None]:
        """Meanwhile the manager waits for the end of a reload."""
        self._notifier.send(
            "RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", "STATUS=reloading"
        )
        try:
            yield
        finally:
            self.serving(status())

    async def keep_telling(self, status: Callable[[], str]) -> None:
        """Tell the status now and then, for ever."""
        while True:
            self._notifier.send(f"STATUS={status()}")
            await asyncio.sleep(STATUS_S)

    async def keep_asking_for_time(self, status: Callable[[], str]) -> None:
        """The same, and ask for more time as long as the status changes."""
        said, since_s = "", self._clock()
        while True:
            now_s, text = self._clock(), status()
            if text != said:
                said, since_s = text, now_s
            lines = [f"STATUS={text}"]
            if now_s - since_s < STEP_S:
                lines.append(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * 1e6)}")
            self._notifier.send(*lines)
            await asyncio.sleep(STATUS_S)
