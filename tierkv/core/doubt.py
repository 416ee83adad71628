"""Device copies that nobody vouches for until they were checked.

They outlived a daemon, or a worker found them damaged.
"""

from __future__ import annotations

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U64, Bool, Tier
from tierkv.core.space import widest


class Doubt:
    """Which device copies were not checked since the last restart, or since a worker complained."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._is: Bool = np.zeros(0, np.bool_)
        """Per row: whether it is in doubt, if it still holds the block that it held when it came to
        be."""
        self._left = 0
        """How many rows are: at 0, the usual case, nothing need be looked up."""
        self._rows: I64 = np.zeros(0, np.int64)
        self._ids: U64 = np.zeros(0, np.uint64)
        """The rows that came to be in doubt, ascending, and the blocks they held then."""

    def mark(self, rows: I64) -> None:
        """These rows, and no others, are in doubt. Mutates."""
        self._rows = np.sort(rows)
        self._ids = self._blocks.id[self._rows]
        self._is = np.zeros(widest(rows), np.bool_)
        self._is[rows] = True
        self._left = len(rows)

    def add(self, rows: I64) -> None:
        """These rows, distinct ones, are in doubt, too. Mutates."""
        if widest(rows) > len(self._is):
            self._is = np.concatenate([self._is, np.zeros(widest(rows) - len(self._is), np.bool_)])
        others = self._rows[self._is[self._rows] & ~np.isin(self._rows, rows)]
        held = self._ids[np.searchsorted(self._rows, others)]
        self._left += int(np.count_nonzero(~self._is[rows]))
        self._is[rows] = True
        together = np.concatenate([others, rows])
        order = np.argsort(together)
        self._rows = together[order]
        self._ids = np.concatenate([held, self._blocks.id[rows]])[order]

    def clear(self, rows: I64) -> None:
        """The device copies of these rows were checked, or written, just now. Mutates."""
        if self._left:
            known = rows[rows < len(self._is)]
            self._left -= int(np.count_nonzero(self._is[known]))
            self._is[known] = False

    def among(self, rows: I64) -> I64:
        """Those of the rows that are in doubt."""
        if not self._left:
            return rows[:0]
        rows = rows[rows < len(self._is)]
        rows = rows[self._is[rows]]
        held = self._ids[np.searchsorted(self._rows, rows)]
        same = held == self._blocks.id[rows]
        return np.asarray(rows[same & self._blocks.has_copy(rows, Tier.DEVICE)])

    def leading_sound(self, rows: I64) -> int:
        """How many leading rows are free of doubt."""
        doubtful = self.among(rows)
        return int(np.argmax(np.isin(rows, doubtful))) if len(doubtful) else len(rows)
