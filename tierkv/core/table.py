"""Chain hash -> block row: a vectorised open-addressing table.

The table stores rows only (4 bytes a place); keys are compared in the block columns themselves.
Whole batches are probed at once, so that cache misses overlap: about ten times faster than a dict
of bytes objects at random keys, and no Python object per block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierkv.core.arrays import distinct, leading, some
from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U32, U64, Bool
from tierkv.core.space import Memory, zeros

EMPTY = 0
TOMBSTONE = 0xFFFFFFFF
LOAD_MAX = 0.5
FIRST_PROBE = 64

SWEEP = 4
"""Places of the old array that are emptied per row put while the table grows. At least 2, or it
would have to grow again before that."""

SWEEP_MIN = 256

PREPARE = 0.75
"""How full, of what it may be, the array is when the next one is made ready."""


class HashTable:
    """Maps 128-bit hashes to rows of the columns ``hash_hi`` and ``hash_lo``.

    The owner passes the columns on every call because they move when they grow. Values are stored
    as row + 1.

    A table that is too full gets an array of twice the size. Rows move there little by little, with
    every ``put``; until all have, what is not found in the new array is looked for in the old one,
    where tombstones take the places of rows that have left.
    """

    def __init__(self, places: int = 1024, array: Callable[[int], Places] | None = None) -> None:
        """``array`` makes arrays of so many places; they are numpy's if it is left out."""
        self._array = array or Places
        self._now = self._array(places)
        self._old: Places | None = None
        self._next: Places | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory the table takes."""
        return self._now.values.nbytes + (self._old.values.nbytes if self._old else 0)

    def ahead(self, rows_max: int) -> list[Memory]:
        """What it will write to next: the array to come, when the present one is nearly full.

        ``rows_max``: so many rows there will ever be. Mutates: makes it.

        A few requests would touch all of that one's pages.
        """
        places = len(self._now.values)
        full = LOAD_MAX * places
        if self._next is None and self._count > PREPARE * full and rows_max > full:
            self._next = self._array(2 * places)
        return [self._next.values] if self._next is not None else []

    def get(self, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """Rows of the hashes (shape [n] each), -1 where absent. Mutates nothing."""
        rows = self._now.get(hi, lo, column_hi, column_lo)
        if self._old is not None:
            missing = np.flatnonzero(rows < 0)
            rows[missing] = self._old.get(hi[missing], lo[missing], column_hi, column_lo)
        return rows

    def get_prefix(self, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """Rows of the leading hashes that are present, shape [<= n]; stops early on a miss."""
        if not len(hi):
            return np.zeros(0, np.int64)
        head = self.get(hi[:FIRST_PROBE], lo[:FIRST_PROBE], column_hi, column_lo)
        missing = head < 0
        if some(missing):
            return head[: int(missing.argmax())]
        if len(hi) <= FIRST_PROBE:
            return head
        rest = self.get(hi[FIRST_PROBE:], lo[FIRST_PROBE:], column_hi, column_lo)
        missing = rest < 0
        return np.concatenate([head, rest[: int(missing.argmax())] if some(missing) else rest])

    def get_chain(
        self, hi: U64, lo: U64, blocks: Blocks, namespace: int, parent: int
    ) -> tuple[I64, bool]:
        """Rows of the longest chain under these hashes whose links hold, shape [<= n].

        Each block is of the ``namespace`` and its parent is the block before it; the first one's
        parent has the id ``parent``. And whether the chain ends where a link does not hold.
        """
        rows = self.get_prefix(hi, lo, blocks.hash_hi, blocks.hash_lo)
        if not len(rows):
            return rows, False
        linked = self._linked(rows, blocks, namespace, parent)
        return rows[:linked], linked < len(rows)

    def _linked(self, rows: I64, blocks: Blocks, namespace: int, parent: int) -> int:
        """How many leading rows' links hold; there is at least one row."""
        parents = np.empty(len(rows), np.uint64)
        parents[0], parents[1:] = parent, blocks.id[rows[:-1]]
        good = (blocks.parent[rows] == parents) & (blocks.namespace[rows] == namespace)
        return leading(good)

    def repeats(self, halves: U64) -> bool:
        """Whether one of these halves of hashes (shape [n]) is there twice. Mutates nothing."""
        return len(distinct(halves)) < len(halves)

    def put(self, rows: I64, column_hi: U64, column_lo: U64) -> None:
        """Add rows whose hashes are distinct and absent. Mutates the table."""
        if not len(rows):
            return
        self._make_room(len(rows), column_lo)
        self._now.put(rows, column_lo)
        self._count += len(rows)

    def remove(self, rows: I64, column_hi: U64, column_lo: U64) -> None:
        """Remove rows that are present under their own hash. Mutates the table."""
        if not len(rows):
            return
        found = self._now.remove(rows, column_lo)
        if self._old is not None:
            self._old.bury(rows[~found], column_lo)
        self._count -= len(rows)

    def _make_room(self, extra: int, column_lo: U64) -> None:
        places = len(self._now.values)
        while self._count + extra > LOAD_MAX * places:
            places *= 2
        if places != len(self._now.values):
            if self._old is not None:
                self._sweep(self._old, len(self._old.values), column_lo)
            is_prepared = self._next is not None and len(self._next.values) == places
            self._old = self._now
            self._now = self._next if self._next and is_prepared else self._array(places)
            self._next = None
        if self._old is not None:
            self._sweep(self._old, SWEEP * extra + SWEEP_MIN, column_lo)

    def _sweep(self, old: Places, count: int, column_lo: U64) -> None:
        """Move the rows in the next ``count`` places of the old array to the new one."""
        rows = old.sweep(count)
        self._now.put(rows, column_lo)
        if old.swept == len(old.values):
            self._old = None


class Places:
    """One array of places, its length a power of two. A row lies at the first free place from its
    hash's low bits on."""

    def __init__(self, count: int) -> None:
        self.values: U32 = zeros(count, np.uint32)
        self.swept = 0
        """The places before this one were emptied for good. What began there and was not, lies from
        here on."""
        self._mask = np.uint64(count - 1)

    def get(self, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """See HashTable.get."""
        place = np.maximum((lo & self._mask).astype(np.int64), self.swept)
        value = self.values.take(place)
        pending = np.arange(len(lo))
        found, wanted = value, lo
        while True:
            # Half of the hash tells nearly all apart; the other half is compared at the end.
            on = column_lo.take(found.astype(np.int64) - 1, mode="clip") != wanted
            on &= found != EMPTY
            pending = pending[on]
            if not pending.size:
                break
            place[pending] = at = (place[pending] + 1) & int(self._mask)
            value[pending] = found = self.values.take(at)
            wanted = lo[pending]
        rows = value.astype(np.int64) - 1
        doubtful = (value == TOMBSTONE) | (column_hi.take(rows, mode="clip") != hi)
        doubtful &= value != EMPTY
        for one in np.flatnonzero(doubtful).tolist():
            rows[one] = self._get_one(int(place[one]), hi[one], lo[one], column_hi, column_lo)
        return rows

    def _get_one(self, place: int, hi: np.uint64, lo: np.uint64, all_hi: U64, all_lo: U64) -> int:
        """The row with this hash from ``place`` on, -1 if there is none."""
        while (value := int(self.values[place])) != EMPTY:
            if value != TOMBSTONE and all_hi[value - 1] == hi and all_lo[value - 1] == lo:
                return value - 1
            place = (place + 1) & int(self._mask)
        return -1

    def put(self, rows: I64, column_lo: U64) -> None:
        """Add rows that are not there. Mutates."""
        mask = int(self._mask)
        place = (column_lo[rows] & self._mask).astype(np.int64)
        value = (rows + 1).astype(np.uint32)
        pending = np.arange(len(rows))
        while pending.size:
            at = place[pending]
            free = self.values[at] == EMPTY
            contenders, at = pending[free], at[free]
            self.values[at] = value[contenders]
            # Several keys may want one place; the last writer won it.
            won = self.values[at] == value[contenders]
            pending = np.concatenate([pending[~free], contenders[~won]])
            place[pending] = (place[pending] + 1) & mask

    def remove(self, rows: I64, column_lo: U64) -> Bool:
        """Remove rows; returns which were there, shape [n]. Mutates. Not for swept arrays.

        What lies behind a row up to an empty place may have its own place before it, so all of that
        is taken out and put again: a tombstone in the row's stead would stay for good.
        """
        there, at = self._find(rows, column_lo[rows])
        self.values[at] = EMPTY
        moved = []
        while at.size:
            at = (at + 1) & int(self._mask)
            value = self.values[at]
            at, value = at[value != EMPTY], value[value != EMPTY]
            self.values[at] = EMPTY
            moved.append(value)
        behind = np.concatenate([np.zeros(0, np.int64), *moved]).astype(np.int64) - 1
        self.put(behind, column_lo)
        return there

    def sweep(self, count: int) -> I64:
        """Empty the next ``count`` places; returns the rows that were there. Mutates."""
        part = self.values[self.swept : self.swept + count]
        rows = part[_is_row(part)].astype(np.int64) - 1
        part[:] = EMPTY
        self.swept += len(part)
        return rows

    def bury(self, rows: I64, column_lo: U64) -> None:
        """Remove rows that are there; tombstones take their places. Mutates."""
        _, at = self._find(rows, column_lo[rows])
        self.values[at] = TOMBSTONE

    def _find(self, rows: I64, lo: U64) -> tuple[Bool, I64]:
        """Which of the rows are there (shape [n]), and in which places those are."""
        place = np.maximum((lo & self._mask).astype(np.int64), self.swept)
        wanted = (rows + 1).astype(np.uint32)
        there = np.zeros(len(rows), np.bool_)
        pending = np.arange(len(rows))
        while pending.size:
            value = self.values[place[pending]]
            same = value == wanted[pending]
            there[pending[same]] = True
            pending = pending[~same & (value != EMPTY)]
            place[pending] = (place[pending] + 1) & int(self._mask)
        return there, place[there]


def _is_row(values: U32) -> Bool:
    """Which places hold a row: those that are neither empty nor a tombstone."""
    return np.asarray(values + np.uint32(1) > 1)
