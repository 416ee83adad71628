"""How far a long job is: told by the thread that does it, read by whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tierkv.obs.status import ProgressStatus

Tell = Callable[[str, int, int], None]
"""``tell(what, done, total)``; ``total`` is 0 where nobody knows how much there is."""


def tell_nobody(what: str, done: int, total: int) -> None:
    """A ``Tell`` for jobs that nobody watches."""


class _Step(NamedTuple):
    what: str
    done: int
    total: int
    started_s: float


class Progress:
    """The step that a job is at. Replaced as a whole, so that no lock is needed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = _Step("", 0, 0, clock())

    def tell(self, what: str, done: int, total: int) -> None:
        """See ``Tell``. Another ``what`` is another step, whose time begins now."""
        started_s = self._step.started_s if what == self._step.what else self._clock()
        self._step = _Step(what, done, total, started_s)

    def status(self) -> ProgressStatus:
        """The step as the status document has it."""
        step = self._step
        elapsed_s = self._clock() - step.started_s if step.what else 0.0
        return ProgressStatus(what=step.what, done=step.done, total=step.total, elapsed_s=elapsed_s)

    def __str__(self) -> str:
        step = self._step
        if not step.total:
            return step.what
        return f"{step.what}, {min(step.done, step.total):,} of {step.total:,}"
