"""Chain hash -> block row: a vectorised open-addressing table.

The table stores rows only (4 bytes a place); keys are compared in the block columns themselves.
Whole batches are probed at once, so that cache misses overlap: about ten times faster than a dict
of bytes objects at random keys, and no Python object per block.
"""

from __future__ import annotations

import numpy as np

from tierkv.core.ids import I64, U32, U64

EMPTY = 0
TOMBSTONE = 0xFFFFFFFF
LOAD_MAX = 0.4
TOMBSTONES_MAX = 0.1
FIRST_PROBE = 64


class HashTable:
    """Maps 128-bit hashes to rows of the columns ``hash_hi`` and ``hash_lo``.

    The owner passes the columns on every call because they move when they grow. Values are stored
    as row + 1.
    """

    def __init__(self, places: int = 1024) -> None:
        self._places: U32 = np.zeros(places, np.uint32)
        self._mask = np.uint64(places - 1)
        self._count = 0
        self._tombstones = 0

    def __len__(self) -> int:
        return self._count

    def get(self, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """Rows of the hashes (shape [n] each), -1 where absent. Mutates nothing."""
        place = (lo & self._mask).astype(np.int64)
        value = self._places[place]
        pending = np.flatnonzero(self._differs(value, hi, lo, column_hi, column_lo))
        mask = int(self._mask)
        while pending.size:
            place[pending] = (place[pending] + 1) & mask
            value[pending] = found = self._places[place[pending]]
            differs = self._differs(found, hi[pending], lo[pending], column_hi, column_lo)
            pending = pending[differs]
        return np.asarray(value, np.int64) - 1

    def get_prefix(self, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """Rows of the leading hashes that are present, shape [<= n]; stops early on a miss."""
        head = self.get(hi[:FIRST_PROBE], lo[:FIRST_PROBE], column_hi, column_lo)
        missing = np.flatnonzero(head < 0)
        if missing.size:
            return head[: missing[0]]
        if len(hi) <= FIRST_PROBE:
            return head
        rest = self.get(hi[FIRST_PROBE:], lo[FIRST_PROBE:], column_hi, column_lo)
        missing = np.flatnonzero(rest < 0)
        return np.concatenate([head, rest[: missing[0]] if missing.size else rest])

    def put(self, rows: I64, column_hi: U64, column_lo: U64) -> None:
        """Add rows whose hashes are distinct and absent. Mutates the table."""
        if not len(rows):
            return
        self._make_room(len(rows), column_hi, column_lo)
        self._insert(rows, column_lo)
        self._count += len(rows)

    def remove(self, rows: I64, column_hi: U64, column_lo: U64) -> None:
        """Remove rows that are present under their own hash. Mutates the table."""
        if not len(rows):
            return
        mask = int(self._mask)
        place = (column_lo[rows] & self._mask).astype(np.int64)
        pending = np.arange(len(rows))
        wanted = (rows + 1).astype(np.uint32)
        while pending.size:
            pending = pending[self._places[place[pending]] != wanted[pending]]
            place[pending] = (place[pending] + 1) & mask
        self._places[place] = TOMBSTONE
        self._tombstones += len(rows)
        self._count -= len(rows)
        if self._tombstones > TOMBSTONES_MAX * len(self._places):
            self._rebuild(len(self._places), column_lo)

    @staticmethod
    def _differs(value: U32, hi: U64, lo: U64, column_hi: U64, column_lo: U64) -> I64:
        """Which probes must go on: the place holds a tombstone or another key."""
        row = value.astype(np.int64) - 1
        occupied = value != EMPTY
        known = occupied & (value != TOMBSTONE)
        row[~known] = 0
        same = known & (column_lo[row] == lo) & (column_hi[row] == hi)
        return np.asarray(occupied & ~same)

    def _make_room(self, extra: int, column_hi: U64, column_lo: U64) -> None:
        places = len(self._places)
        while (self._count + extra) > LOAD_MAX * places:
            places *= 2
        if places != len(self._places):
            self._rebuild(places, column_lo)

    def _rebuild(self, places: int, column_lo: U64) -> None:
        live = self._places[(self._places != EMPTY) & (self._places != TOMBSTONE)]
        self._places = np.zeros(places, np.uint32)
        self._mask = np.uint64(places - 1)
        self._tombstones = 0
        self._insert(live.astype(np.int64) - 1, column_lo)

    def _insert(self, rows: I64, column_lo: U64) -> None:
        mask = int(self._mask)
        place = (column_lo[rows] & self._mask).astype(np.int64)
        value = (rows + 1).astype(np.uint32)
        pending = np.arange(len(rows))
        while pending.size:
            at = place[pending]
            # Tombstones are not reused here: they go when the table is rebuilt.
            free = self._places[at] == EMPTY
            contenders = pending[free]
            self._places[place[contenders]] = value[contenders]
            # Several keys may want one place; the last writer won it.
            won = self._places[place[contenders]] == value[contenders]
            pending = np.concatenate([pending[~free], contenders[~won]])
            place[pending] = (place[pending] + 1) & mask
