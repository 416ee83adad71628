"""Copies that must stay where they are for now: a move or a reader is using them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tierkv.core.effects import Signal
from tierkv.core.ids import I64, Bool


class Holds:
    """How many users each row's copy in one tier has right now."""

    def __init__(self) -> None:
        self._count = np.zeros(1024, np.int16)
        self._total = 0
        self._released = Signal()

    def has(self, rows: I64) -> Bool:
        """Which of the rows are held, shape [n]."""
        self._grow(rows)
        return np.asarray(self._count[rows] > 0)

    def rows(self) -> I64:
        """All rows that are held."""
        return np.flatnonzero(self._count) if self._total else np.zeros(0, np.int64)

    def released(self) -> Signal:
        """Set when any hold ends next."""
        return self._released

    def take(self, rows: I64) -> None:
        """One more user of each row (no row twice). Mutates."""
        self._grow(rows)
        self._count[rows] += 1
        self._total += len(rows)

    def release(self, rows: I64) -> None:
        """One user less of each row. Mutates."""
        self._count[rows] -= 1
        self._total -= len(rows)
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

    def _grow(self, rows: I64) -> None:
        needed = int(rows.max(initial=-1)) + 1
        if needed > len(self._count):
            grown = np.zeros(max(needed, 2 * len(self._count)), np.int16)
            grown[: len(self._count)] = self._count
            self._count = grown
