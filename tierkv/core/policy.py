"""Which blocks leave a tier first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tierkv.core.ids import I64, U32, U64, Bool

SCAN = 1024


class EvictionPolicy(Protocol):
    """The order of one tier's blocks. The planner owns bytes and eligibility, the policy the order.

    Lookups never touch. A block that cannot leave when it is met either keeps its place (it is
    just being copied, say) or leaves the order; the planner touches it again when it may leave.
    """

    name: str

    def touch(self, rows: I64) -> None:
        """Rows were used, least valuable first (a request's blocks: leaf to root). Mutates."""
        ...

    def forget(self, rows: I64) -> None:
        """Rows left the tier. Mutates."""
        ...

    def victims(
        self,
        need_bytes: int,
        eligible: Callable[[I64], Bool],
        stays: Callable[[I64], Bool],
        size: Callable[[I64], I64],
    ) -> I64:
        """Rows to evict, first victim first, just enough to free ``need_bytes``.

        Fewer if there are not enough eligible ones. Of those that are not, the ones that ``stays``
        names keep their place, the others leave the order. Victims stay in it until forgotten.
        """
        ...


class Lru:
    """Least recently used, exact and amortised O(1): a log of touches, stale entries skipped.

    With requests touched leaf to root, victims come leaf first, so the cached set stays closed
    under prefixes without any child counters.
    """

    name = "lru"

    def __init__(self) -> None:
        self._log: U32 = np.zeros(SCAN, np.uint32)
        self._base = 1
        """Number of the log's entry 0; numbers start at 1 so that 0 can mean "not listed"."""
        self._head = 0
        self._tail = 0
        self._entry: U64 = np.zeros(SCAN, np.uint64)
        """Per row: the number of its latest entry, 0 = not listed."""

    def touch(self, rows: I64) -> None:
        """See EvictionPolicy."""
        if not len(rows):
            return
        self._ensure_rows(int(rows.max()) + 1)
        self._ensure_log(len(rows))
        self._log[self._tail : self._tail + len(rows)] = rows
        first = self._base + self._tail
        self._entry[rows] = np.arange(first, first + len(rows), dtype=np.uint64)
        self._tail += len(rows)

    def forget(self, rows: I64) -> None:
        """See EvictionPolicy."""
        self._entry[rows[rows < len(self._entry)]] = 0

    def victims(
        self,
        need_bytes: int,
        eligible: Callable[[I64], Bool],
        stays: Callable[[I64], Bool],
        size: Callable[[I64], I64],
    ) -> I64:
        """See EvictionPolicy."""
        found: list[I64] = []
        at = self._head
        leading = True
        while need_bytes > 0 and at < self._tail:
            stop = min(at + SCAN, self._tail)
            rows = self._log[at:stop].astype(np.int64)
            numbers = np.arange(self._base + at, self._base + stop, dtype=np.uint64)
            rows = rows[self._entry[rows] == numbers]
            good = eligible(rows)
            kept = good | stays(rows)
            self._entry[rows[~kept]] = 0
            leading = leading and not kept.any()
            if leading:
                self._head = stop
            rows = rows[good]
            sizes = np.cumsum(size(rows))
            enough = int(np.searchsorted(sizes, need_bytes)) + 1
            found.append(rows[:enough])
            need_bytes -= int(sizes[min(enough, len(sizes)) - 1]) if len(sizes) else 0
            at = stop
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _ensure_rows(self, size: int) -> None:
        if size > len(self._entry):
            grown = np.zeros(max(size, 2 * len(self._entry)), np.uint64)
            grown[: len(self._entry)] = self._entry
            self._entry = grown

    def _ensure_log(self, extra: int) -> None:
        if self._tail + extra <= len(self._log):
            return
        numbers = np.arange(self._base + self._head, self._base + self._tail, dtype=np.uint64)
        rows = self._log[self._head : self._tail]
        live = rows[self._entry[rows] == numbers]
        # New numbers lie above all old ones, so a forgotten row cannot match by accident.
        self._base += self._tail
        self._head, self._tail = 0, len(live)
        if 2 * (len(live) + extra) > len(self._log):
            self._log = np.zeros(2 * (len(live) + extra), np.uint32)
        self._log[: len(live)] = live
        self._entry[live] = np.arange(self._base, self._base + len(live), dtype=np.uint64)
