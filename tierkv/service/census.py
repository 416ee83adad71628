"""How many blocks each namespace has, and where: counted when somebody asks.

All rows of the block table are looked at for that: at once if they are few, else a part with each
turn of the event loop, and those who ask meanwhile get what was counted before.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from tierkv.core.ids import I64, Tier
from tierkv.core.state import State

PART_ROWS = 1 << 17
"""Counted in 0.3 ms or so."""

AT_ONCE_PARTS = 8

FRESH_S = 2.0
"""So long after it ended a count of many rows is as good as a new one."""


class Census:
    """Counts over one state. Asked on the event loop's thread."""

    def __init__(self, state: State) -> None:
        """Counts all rows: make it before there is anybody who would have to wait."""
        self._state = state
        self._counts = self._count_all()
        self._counted_s = time.monotonic()
        self._counting = False

    def counts(self) -> I64:
        """Blocks of each namespace, and their copies by tier: shape [namespaces, 1 + tiers]."""
        if len(self._state.blocks) <= AT_ONCE_PARTS * PART_ROWS:
            self._counts = self._count_all()
        elif not self._counting and time.monotonic() - self._counted_s > FRESH_S:
            self._counting = True
            self._go_on(self._none(), 0)
        return _sum(self._counts, self._none())

    def _count_all(self) -> I64:
        counts = self._none()
        for start in range(0, len(self._state.blocks), PART_ROWS):
            counts = _sum(counts, self._count(start))
        return counts

    def _go_on(self, counts: I64, start: int) -> None:
        """Count the rows from ``start`` on, in this turn of the loop and those that follow."""
        if start < len(self._state.blocks):
            counts = _sum(counts, self._count(start))
            asyncio.get_running_loop().call_soon(self._go_on, counts, start + PART_ROWS)
            return
        self._counts, self._counted_s, self._counting = counts, time.monotonic(), False

    def _count(self, start: int) -> I64:
        return self._state.blocks.census(start, start + PART_ROWS)

    def _none(self) -> I64:
        namespaces = max(self._state.namespaces, default=-1) + 1
        return np.zeros((namespaces, 1 + len(Tier)), np.int64)


def _sum(some: I64, more: I64) -> I64:
    """Both together, for as many namespaces as either has."""
    wide, narrow = (some, more) if len(some) >= len(more) else (more, some)
    total = wide.copy()
    total[: len(narrow)] += narrow
    return total
