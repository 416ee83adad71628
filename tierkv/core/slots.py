"""Which places are taken: slots of one pool in one tier, or rows of the block table."""

from __future__ import annotations

import numpy as np

from tierkv.core.ids import I64, U32, Bool
from tierkv.errors import require


class SlotSet:
    """A set of integers 0 .. capacity - 1, each free, held (promised in memory) or used (logged).

    ``take`` and ``give`` follow the log; ``hold`` and ``unhold`` do not and vanish with the
    process. Low numbers go out first, so that files grow only as far as they must.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: Bool = np.zeros(min(capacity, 1024), np.bool_)
        self._held: Bool = np.zeros(min(capacity, 1024), np.bool_)
        self._stack: U32 = np.zeros(1024, np.uint32)
        self._depth = 0
        self._fresh = 0
        self.used_count = 0
        self.held_count = 0

    @property
    def free_count(self) -> int:
        """How many can still be held."""
        return self.capacity - self.used_count - self.held_count

    def used(self) -> I64:
        """All used numbers, ascending, shape [n]."""
        return np.flatnonzero(self._used)

    def hold(self, count: int) -> I64:
        """Promise ``count`` free numbers, shape [count]. The caller has checked free_count.

        Mutates the free stack. Raises InvariantViolation if there are not enough.
        """
        require(count <= self.free_count, "held more slots than are free")
        parts: list[I64] = []
        missing = count
        while missing and self._depth:
            size = min(missing, self._depth)
            top = self._stack[self._depth - size : self._depth][::-1].astype(np.int64)
            self._depth -= size
            # An entry may be stale (taken by replay, or listed twice).
            free = top[~(self._used[top] | self._held[top])]
            if len(free) > 1:
                _, first = np.unique(free, return_index=True)
                free = free[np.sort(first)]
            self._held[free] = True
            parts.append(free)
            missing -= len(free)
        while missing:
            fresh = np.arange(self._fresh, min(self._fresh + missing, self.capacity))
            require(len(fresh), "free count disagrees with the free stack")
            self._fresh += len(fresh)
            self._ensure(self._fresh)
            free = fresh[~(self._used[fresh] | self._held[fresh])]
            self._held[free] = True
            parts.append(free)
            missing -= len(free)
        self.held_count += count
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def unhold(self, numbers: I64) -> None:
        """Take promises back; numbers that were taken meanwhile are left alone."""
        still = numbers[self._held[numbers]]
        self._held[still] = False
        self.held_count -= len(still)
        self._push(still)

    def take(self, numbers: I64) -> None:
        """Mark as used (each must be free or held). Mutates; called by apply only."""
        if not len(numbers):
            return
        self._ensure(int(numbers.max()) + 1)
        require(not self._used[numbers].any(), "a slot was taken twice")
        self.held_count -= int(np.count_nonzero(self._held[numbers]))
        self._held[numbers] = False
        self._used[numbers] = True
        self.used_count += len(numbers)

    def give(self, numbers: I64) -> None:
        """Mark used numbers as free. Mutates; called by apply only."""
        if not len(numbers):
            return
        require(
            int(numbers.max()) < len(self._used) and self._used[numbers].all(),
            "a slot was freed that was not used",
        )
        self._used[numbers] = False
        self.used_count -= len(numbers)
        self._push(numbers)

    def reindex(self) -> None:
        """Rebuild the free stack after replay, which takes numbers without holding them."""
        self._held[:] = False
        self.held_count = 0
        used = np.flatnonzero(self._used)
        self._fresh = int(used[-1]) + 1 if len(used) else 0
        self._depth = 0
        self._push(np.flatnonzero(~self._used[: self._fresh])[::-1])

    def _push(self, numbers: I64) -> None:
        if not len(numbers):
            return
        needed = self._depth + len(numbers)
        if needed > len(self._stack):
            grown = np.zeros(max(needed, 2 * len(self._stack)), np.uint32)
            grown[: self._depth] = self._stack[: self._depth]
            self._stack = grown
        self._stack[self._depth : needed] = numbers
        self._depth = needed

    def _ensure(self, size: int) -> None:
        require(size <= self.capacity, "a slot lies beyond the pool's capacity")
        if size > len(self._used):
            grown = min(self.capacity, max(size, 2 * len(self._used)))
            self._used = np.concatenate([self._used, np.zeros(grown - len(self._used), np.bool_)])
            self._held = np.concatenate([self._held, np.zeros(grown - len(self._held), np.bool_)])
