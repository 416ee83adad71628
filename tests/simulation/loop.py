"""An event loop in virtual time: nothing runs at once, and the seed decides what runs first.

Threads do not exist here. What a daemon gives to one (``run_in_executor``) runs on the loop itself,
in one piece, after a delay that the seed draws: later than what was asked for after it, or sooner.
So one seed is one history.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import base_events
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")

DELAYS_S = (None, 0.0, 0.0, 0.001, 0.002, 0.005, 0.02)
"""None: the thread is done before the loop's own thread takes another step."""


class Crash(SystemExit):
    """The process dies here.

    A SystemExit, since the loop passes on nothing else from a callback or a task.
    """


class Stuck(AssertionError):
    """Nothing is left to run, and yet somebody waits."""


class SimulatedLoop(base_events.BaseEventLoop):
    """Runs callbacks in order; time jumps to the next timer when there is nothing else to do."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self._now = 0.0
        self._selector = self
        self.thread_step: Callable[[], None] = lambda: None
        """Called before each job of a thread: the moment between two of its steps."""

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """What BaseEventLoop asks when it has run all that is ready."""
        if timeout is None:
            raise Stuck("every task waits for another")
        self._now += timeout
        return []

    def forsake(self) -> None:
        """The process is dead: let its tasks go, without a word and without effect on the loop."""
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]  # tasks here are coroutines
        self.close()

    def _check_closed(self) -> None:
        """What the dead still ask of the loop is ignored."""

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            self.thread_step()
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        delay_s = self._rng.choice(DELAYS_S)
        if delay_s is None:
            run()
        else:
            self.call_later(delay_s, run)
        return future
