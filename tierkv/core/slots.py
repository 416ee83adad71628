"""Which places are taken: slots of one pool in one tier, or rows of the block table."""

from __future__ import annotations

import numpy as np

from tierkv.core.arrays import first_of_each
from tierkv.core.ids import I64, U8, U32, Bool
from tierkv.core.space import Memory, ahead, column, stretched, widest
from tierkv.errors import require

FREE, HELD, USED = 0, 1, 2
NONE: I64 = np.zeros(0, np.int64)

TAKEN_TWICE = "a slot was taken twice"
NOT_USED = "a slot was freed that was not used"


class SlotSet:
    """A set of integers 0 .. capacity - 1, each free, held (promised in memory) or used (logged).

    ``take`` and ``give`` follow the log; ``hold`` and ``unhold`` do not and vanish with the
    process. Low numbers go out first, so that files grow only as far as they must.
    """

    def __init__(self, capacity: int, room: int | None = None) -> None:
        """``room``: how far it grows without copying, if that is less than ``capacity``."""
        self.capacity = capacity
        room = capacity if room is None else room
        self._is: U8 = column(room, np.uint8)
        """What each number is."""
        self._stack: U32 = column(room, np.uint32)
        self._depth = 0
        self._fresh = 0
        self.used_count = 0
        self.held_count = 0

    @property
    def free_count(self) -> int:
        """How many can still be held."""
        return self.capacity - self.used_count - self.held_count

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self._is.nbytes + self._stack.nbytes

    def ahead(self) -> list[Memory]:
        """What it will write to next."""
        return [ahead(self._is), ahead(self._stack)]

    @property
    def given_out(self) -> int:
        """Below which all numbers lie that were ever held or used since ``reindex``."""
        return self._fresh

    def used(self) -> I64:
        """All used numbers, ascending, shape [n]."""
        return np.flatnonzero(self._is == USED)

    def left(self) -> I64:
        """Numbers that were given out at some time and are not used now, shape [n]."""
        return np.flatnonzero(self._is[: self._fresh] != USED)

    def is_used(self, numbers: I64) -> Bool:
        """Which of the numbers are used, shape [n]."""
        known = numbers < len(self._is)
        known[known] = self._is[numbers[known]] == USED
        return known

    def are_used(self, numbers: U32) -> bool:
        """Whether these numbers are the used ones, each named once."""
        if len(numbers) != self.used_count or int(numbers.max(initial=0)) > len(self._is):
            return False
        named = np.zeros(len(self._is) + 1, np.bool_)
        named[numbers] = True
        once = np.count_nonzero(named) == len(numbers)
        return once and np.array_equal(named[:-1], self._is == USED)

    def hold(self, count: int) -> I64:
        """Promise ``count`` free numbers, shape [count]. The caller has checked free_count.

        Mutates the free stack. Raises InvariantViolation if there are not enough.
        """
        require(count <= self.free_count, "held more slots than are free")
        popped = self._pop(count) if self._depth else NONE
        parts, missing = [popped], count - len(popped)
        while missing:
            fresh = np.arange(self._fresh, min(self._fresh + missing, self.capacity))
            require(len(fresh), "free count disagrees with the free stack")
            self._fresh += len(fresh)
            self._ensure(self._fresh)
            free = fresh[self._is[fresh] == FREE]
            self._is[free] = HELD
            parts.append(free)
            missing -= len(free)
        self.held_count += count
        return np.concatenate(parts) if len(parts) > 1 else popped

    def unhold(self, numbers: I64) -> None:
        """Take promises back; numbers that were taken meanwhile are left alone."""
        if len(numbers):
            self.held_count -= self._set_free(numbers, HELD)

    def take(self, numbers: I64) -> None:
        """Mark as used (each must be free or held). Mutates; called by apply only."""
        if not len(numbers):
            return
        self._ensure(widest(numbers))
        self.held_count -= self._use(numbers)
        self.used_count += len(numbers)

    def give(self, numbers: I64) -> None:
        """Mark used numbers as free. Mutates; called by apply only."""
        if len(numbers):
            self.used_count -= self._set_free(numbers, USED)

    def reindex(self) -> None:
        """Rebuild the free stack after replay, which takes numbers without holding them."""
        self._is[self._is == HELD] = FREE
        self.held_count = 0
        self._fresh = widest(self.used())
        self._depth = 0
        self._push(np.flatnonzero(self._is[: self._fresh] == FREE)[::-1])

    def _pop(self, count: int) -> I64:
        """Hold numbers from the stack of free ones: ``count``, or all that are there."""
        parts: list[I64] = []
        missing = count
        while missing and self._depth:
            size = min(missing, self._depth)
            top = self._stack[self._depth - size : self._depth][::-1].astype(np.int64)
            self._depth -= size
            # An entry may be stale (taken by replay, or listed twice).
            free = top[self._is[top] == FREE]
            free = free[first_of_each(free)]
            self._is[free] = HELD
            parts.append(free)
            missing -= len(free)
        return np.concatenate(parts) if parts else NONE

    def _use(self, numbers: I64) -> int:
        """Mark as used; returns how many were held."""
        were = self._is[numbers]
        require(not (were == USED).any(), TAKEN_TWICE)
        self._is[numbers] = USED
        return int(np.count_nonzero(were == HELD))

    def _set_free(self, numbers: I64, were: int) -> int:
        """Mark those as free that are HELD, or all if ``were`` is USED; returns how many."""
        require(widest(numbers) <= len(self._is), NOT_USED)
        chosen = numbers[self._is[numbers] == were]
        require(were != USED or len(chosen) == len(numbers), NOT_USED)
        self._is[chosen] = FREE
        self._push(chosen)
        return len(chosen)

    def _push(self, numbers: I64 | U32) -> None:
        if not len(numbers):
            return
        needed = self._depth + len(numbers)
        self._stack = stretched(self._stack, needed)
        self._stack[self._depth : needed] = numbers
        self._depth = needed

    def _ensure(self, size: int) -> None:
        require(size <= self.capacity, "a slot lies beyond the pool's capacity")
        self._is = stretched(self._is, size)
