"""Device copies that outlived a daemon: nobody vouches for their bytes until they were checked."""

from __future__ import annotations

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U64, Tier


class Doubt:
    """Which device copies were not checked since the last restart."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        # Per row: the block that is in doubt, or 0. A row that holds another by now is not.
        self._id: U64 = np.zeros(0, np.uint64)
        self._left = 0
        """How many rows have an id there: at 0, the usual case, nothing need be looked up."""

    def mark(self, rows: I64) -> None:
        """These rows, and no others, are in doubt. Mutates."""
        self._id = np.zeros(len(self._blocks), np.uint64)
        self._id[rows] = self._blocks.id[rows]
        self._left = len(rows)

    def clear(self, rows: I64) -> None:
        """The device copies of these rows were checked, or written, just now. Mutates."""
        if self._left:
            known = rows[rows < len(self._id)]
            self._left -= int(np.count_nonzero(self._id[known]))
            self._id[known] = 0

    def among(self, rows: I64) -> I64:
        """Those of the rows that are in doubt."""
        if not self._left:
            return rows[:0]
        known = rows[rows < len(self._id)]
        doubted = self._id[known] == self._blocks.id[known]
        return np.asarray(known[doubted & self._blocks.has_copy(known, Tier.DEVICE)])

    def leading_sound(self, rows: I64) -> int:
        """How many leading rows are free of doubt."""
        doubtful = self.among(rows)
        return int(np.argmax(np.isin(rows, doubtful))) if len(doubtful) else len(rows)
