"""Copies that must stay where they are for now: a move or a reader is using them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tierkv.core.arrays import first_of_runs
from tierkv.core.effects import Signal
from tierkv.core.ids import I64, Bool


class Holds:
    """Which rows' copies in one tier have users right now: few of many, so they are listed."""

    def __init__(self) -> None:
        self._rows: I64 = np.zeros(0, np.int64)
        """Ascending; a row as often as it has users."""
        self._released = Signal()

    def __bool__(self) -> bool:
        """Whether any row is held."""
        return bool(len(self._rows))

    def has(self, rows: I64) -> Bool:
        """Which of the rows are held, shape [n]."""
        if not len(self._rows):
            return np.zeros(len(rows), np.bool_)
        at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        return np.asarray(self._rows[at] == rows)

    def rows(self) -> I64:
        """All rows that are held."""
        return np.asarray(self._rows[first_of_runs(self._rows)])

    def released(self) -> Signal:
        """Set when any hold ends next."""
        return self._released

    def take(self, rows: I64) -> None:
        """One more user of each row (no row twice). Mutates."""
        self._rows = np.sort(np.concatenate([self._rows, rows]))

    def release(self, rows: I64) -> None:
        """One user less of each row. Mutates."""
        left = np.ones(len(self._rows), np.bool_)
        left[np.searchsorted(self._rows, rows)] = False
        self._rows = self._rows[left]
        released, self._released = self._released, Signal()
        released.set()

    @contextmanager
    def taken(self, rows: I64) -> Iterator[None]:
        """Hold the rows meanwhile. Mutates."""
        self.take(rows)
        try:
            yield
        finally:
            self.release(rows)
