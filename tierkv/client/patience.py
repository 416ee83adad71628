"""How long a call waits: for a daemon that is there to answer, and for one that is gone to come."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

TICK_S = 0.2
"""How often a blocking wait looks at its deadline, at least. A socket timeout in Python costs a
second system call per receive; the kernel's own costs none, but is set once."""


GREETING_S = 0.05
"""A daemon that is there greets sooner, unless it is very busy. So long waits even who waits for
none that is gone."""


class Limits(NamedTuple):
    """What ``connect`` was told: see there."""

    timeout_s: float
    call_timeout_s: float
    reconnect_s: float

    def patience(self, call_s: float | None = None) -> Patience:
        """That of a call, which takes ``call_s`` if it is not any call."""
        return Patience(self.call_timeout_s if call_s is None else call_s, self.reconnect_s)

    def opening(self) -> Patience:
        """That of ``connect`` itself."""
        return Patience(self.timeout_s, self.timeout_s, in_all_s=self.timeout_s)

    @property
    def attempt_s(self) -> float:
        """How long something may take that nobody asked for."""
        return min(self.timeout_s, self.call_timeout_s)

    @property
    def tick_s(self) -> float:
        """How often a blocking wait looks at its deadline."""
        return max(min(TICK_S, self.call_timeout_s / 4), 0.005)


class Patience:
    """One call's. It takes ``call_s`` at most with a daemon that is there.

    Waiting for one that is gone does not count as that; it takes ``away_s`` at most. ``in_all_s``
    bounds both together.
    """

    def __init__(self, call_s: float, away_s: float, *, in_all_s: float = math.inf) -> None:
        now_s = time.monotonic()
        self.answer_by_s = now_s + call_s
        """When an answer must be there, by the monotonic clock; later once the daemon was away."""
        self._away_s = away_s
        self._end_s = now_s + in_all_s

    @property
    def longest_s(self) -> float:
        """How long it can wait from now on, if it need not say yet for what."""
        left_s = max(self.answer_by_s - time.monotonic(), 0)
        return max(left_s, self._away_s)

    def attempt_by_s(self, attempt_s: float) -> float:
        """When an attempt to connect that begins now ends, at most ``attempt_s`` long."""
        return min(time.monotonic() + attempt_s, self.answer_by_s, self._end_s)

    def greeting_by_s(self, attempt_by_s: float) -> float:
        """When the daemon must have greeted within such an attempt.

        A socket that a service manager keeps takes connections while no daemon runs. So who does
        not greet may be gone, and is waited for as such.
        """
        return min(attempt_by_s, time.monotonic() + max(self._away_s, GREETING_S))

    def may_wait(self, delay_s: float) -> bool:
        """Whether to wait so long for a daemon that is gone. If so, it is about to."""
        now_s = time.monotonic()
        if delay_s > self._away_s or now_s >= self.answer_by_s or now_s + delay_s >= self._end_s:
            return False
        self.was_away(delay_s)
        return True

    def was_away(self, waited_s: float) -> None:
        """Somebody waited so long while the daemon was gone."""
        counted_s = min(waited_s, self._away_s)
        self._away_s -= counted_s
        self.answer_by_s += counted_s
