"""A sequence whose blocks come up while its worker works on the first of them already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tierkv.core.effects import Flow, Signal, Wait
from tierkv.errors import TierkvError

T = TypeVar("T")

MOVE_BYTES = 8 << 20
"""A worker that looks on hears of arrivals at this grain: some milliseconds of a disk's time."""


class Coming(Generic[T]):
    """Watches the flow that brings a sequence up, for those who wait for parts of it."""

    def __init__(self) -> None:
        self._next = Signal()
        self._result: T | TierkvError | None = None

    @property
    def ended(self) -> bool:
        """Whether the flow has come to its end, good or bad."""
        return self._result is not None

    def arrived(self) -> None:
        """Some blocks came up. Wakes who waits."""
        passed, self._next = self._next, Signal()
        passed.set()

    def end(self, result: T | TierkvError) -> None:
        """The flow has ended, like this. Wakes who waits."""
        self._result = result
        self.arrived()

    def result(self) -> T:
        """What the flow returned. Raises what it raised. Only after its end."""
        if isinstance(self._result, TierkvError):
            raise self._result
        assert self._result is not None
        return self._result

    def until(self, enough: Callable[[], bool]) -> Flow[None]:
        """Return when the flow has ended, or ``enough`` after an arrival or now."""
        while not self.ended and not enough():
            yield Wait(self._next)
