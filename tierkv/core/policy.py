"""Which blocks leave a tier first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tierkv.core.arrays import every, some
from tierkv.core.ids import I64, U32, Bool
from tierkv.core.space import Memory, ahead, column, stretched, widest

SCAN = 1024
SCAN_MAX = 8192
"""Entries of the log that are looked at together, at first and at most."""

TIDY = 4
"""Entries of the log that are tidied per row touched: at least 2, or it would never be done."""


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

    def ahead(self) -> list[Memory]:
        """The memory that it will write to next: it should be there by then."""
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

    When half of the log or so is stale, its live entries are moved to its beginning, some with each
    touch: those up to ``_to`` have been moved, the next to be moved is at ``_from``, and what lies
    between is stale.
    """

    name = "lru"

    def __init__(self, room: int = SCAN) -> None:
        """``room``: rows that can be listed before something must grow by copying."""
        self._log: U32 = column(2 * room, np.uint32)
        self._head = 0
        """Before it all is stale."""
        self._tail = 0
        self._to = 0
        self._from = 0
        self._entry: U32 = column(room, np.uint32)
        """Per row: the place of its latest entry in the log, plus 1; 0 = not listed."""
        self._listed = 0
        self._touched: list[I64] = []
        """Rows of the latest touches, not in the log yet: many small ones are entered together."""
        self._touched_count = 0

    def __len__(self) -> int:
        self._enter()
        return self._listed

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self._log.nbytes + self._entry.nbytes

    def ahead(self) -> list[Memory]:
        """What it will write to next."""
        return [ahead(self._entry), ahead(self._log)]

    def touch(self, rows: I64) -> None:
        """See EvictionPolicy."""
        if not len(rows):
            return
        self._touched.append(rows)
        self._touched_count += len(rows)
        if self._touched_count >= SCAN:
            self._enter()

    def _enter(self) -> None:
        """Put the latest touches at the end of the log."""
        if not self._touched:
            return
        rows = self._touched[0] if len(self._touched) == 1 else np.concatenate(self._touched)
        self._touched, self._touched_count = [], 0
        self._entry = stretched(self._entry, widest(rows))
        self._log = stretched(self._log, self._tail + len(rows))
        self._listed += self._append(rows)
        self._tail += len(rows)
        self._tidy(TIDY * len(rows))

    def _append(self, rows: I64) -> int:
        """Write rows behind the log's end; returns how many were not listed."""
        end = self._tail + len(rows)
        self._log[self._tail : end] = rows
        places = np.arange(self._tail + 1, end + 1, dtype=np.uint32)
        fresh = self._entry[rows] == 0
        self._entry[rows] = places
        # A row that is there twice has its last place, and is listed once.
        return int(np.count_nonzero(fresh & (self._entry[rows] == places)))

    def forget(self, rows: I64) -> None:
        """See EvictionPolicy."""
        self._enter()
        self._forget(rows)

    def _forget(self, rows: I64) -> None:
        if len(rows):
            self._listed -= self._strike(rows)

    def _strike(self, rows: I64) -> int:
        """Make rows' entries stale; returns how many were listed."""
        known = rows[rows < len(self._entry)]
        listed = int(np.count_nonzero(self._entry[known]))
        self._entry[known] = 0
        return listed

    def victims(
        self,
        need_bytes: int,
        eligible: Callable[[I64], Bool],
        stays: Callable[[I64], Bool],
        size: Callable[[I64], I64],
    ) -> I64:
        """See EvictionPolicy."""
        self._enter()
        found: list[I64] = []
        at = self._head
        leading = True
        scan = SCAN
        while need_bytes > 0 and at < self._tail:
            if self._to <= at < self._from:
                at = self._from
                continue
            stop = min(at + scan, self._to if at < self._to else self._tail)
            scan = min(2 * scan, SCAN_MAX)  # who needs many gets them in a few looks
            rows = self._live(at, stop)
            good = eligible(rows)
            if every(good):  # most often
                leading = leading and not len(rows)
            else:
                kept = good | stays(rows)
                self._forget(rows[~kept])
                leading = leading and not some(kept)
                rows = rows[good]
            if leading:
                self._head = stop
            sizes = np.cumsum(size(rows))
            enough = int(np.searchsorted(sizes, need_bytes)) + 1
            found.append(rows[:enough])
            need_bytes -= int(sizes[min(enough, len(sizes)) - 1]) if len(sizes) else 0
            at = stop
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _live(self, start: int, stop: int) -> I64:
        """The rows whose latest entries are in this part of the log."""
        rows = self._log[start:stop].astype(np.int64)
        places = np.arange(start + 1, stop + 1, dtype=np.uint32)
        return np.asarray(rows[self._entry[rows] == places])

    def _tidy(self, count: int) -> None:
        """Look at the next ``count`` entries to be moved, if there is enough to be gained."""
        if self._head >= self._from:
            # Nothing that was moved is left.
            if self._tail < 1.5 * self._listed + SCAN:
                return
            self._from, self._head, self._to = self._head, 0, 0
        stop = min(self._from + count, self._tail)
        self._to += self._move(self._from, stop, self._to)
        self._from = stop
        if stop == self._tail:
            self._tail = self._to
            self._from = self._to = 0

    def _move(self, start: int, stop: int, to: int) -> int:
        """Move what is alive in a part of the log to ``to`` and behind; returns how much."""
        rows = self._live(start, stop)
        end = to + len(rows)
        self._log[to:end] = rows
        self._entry[rows] = np.arange(to + 1, end + 1, dtype=np.uint32)
        return len(rows)
