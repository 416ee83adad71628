"""A batch whose KV lies in the daemon's pool: one sequence for each row."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tierkv.core.ids import I32, U32
from tierkv.errors import LeaseLost

ROUNDS_MAX = 5
"""How often rows are begun again because the daemon lost them while others were being begun."""


@dataclass
class _Row:
    """``sequence`` holds the first ``kept`` tokens of the row; it may hold others after them."""

    sequence: Any = None
    kept: int = 0


class PooledRows:
    """``namespace``: a ``tierkv`` namespace. Rows begin without tokens; ``make_room`` finds those
    that are cached.
    """

    pooled = True

    def __init__(self, namespace: Any, rows: int) -> None:
        self._namespace = namespace
        self._rows = [_Row() for _ in range(rows)]

    @property
    def blocks(self) -> Tensor:
        """The pool: [slots, layers, 2, block_tokens, kv_heads, head_dim]."""
        blocks: Tensor = self._namespace.blocks
        return blocks

    @property
    def kept(self) -> list[int]:
        """How many leading tokens of each row are there."""
        return [row.kept for row in self._rows]

    def make_room(self, tokens: Items[U32], keep: int) -> list[I32]:
        """Let each row hold as much of its ``tokens`` as is cached, with room for all of them.

        A row that has begun is only asked for room, unless the daemon lost it. ``keep`` last tokens
        of a row are not looked up. Returns the rows' block tables.

        Raises LeaseLost if the daemon loses rows all the time, PoolExhausted, Unavailable.
        """
        for _ in range(ROUNDS_MAX):
            for row, ids in zip(self._rows, tokens, strict=True):
                self._make_room(row, ids, keep)
            # Only now: the daemon may have come back in between, with other tables, or without.
            if not any(row.sequence.lost for row in self._rows):
                return [row.sequence.block_table for row in self._rows]
        raise LeaseLost(f"the daemon lost sequences {ROUNDS_MAX} times in a row")

    def _make_room(self, row: _Row, tokens: U32, keep: int) -> None:
        if row.sequence is not None:
            try:
                if row.kept < row.sequence.num_tokens:
                    row.sequence.truncate(row.kept)
                row.sequence.reserve(len(tokens) - row.kept)
            except LeaseLost:
                self._end([row])
            else:
                return
        row.sequence = self._namespace.begin(tokens, keep=keep, reserve=0)
        row.kept = row.sequence.num_tokens

    def record(self, tokens: Items[U32]) -> None:
        """All of these tokens' KV is written: name the blocks they fill.

        Returns only if the rows were this batch's alone until now; so what was computed on them
        holds. Raises LeaseLost if they were not, and Unavailable if nobody can tell.
        """
        for row, ids in zip(self._rows, tokens, strict=True):
            row.sequence.append(ids[row.sequence.num_tokens :])
            row.kept = len(ids)
        for row in self._rows:
            row.sequence.reserve(0)

    def cut(self, counts: Items[int]) -> None:
        """Keep at most ``counts[row]`` tokens of each row."""
        for row, count in zip(self._rows, counts, strict=True):
            row.kept = min(row.kept, count)

    def select(self, rows: Items[int]) -> None:
        """Let row ``i`` be what row ``rows[i]`` was: the same blocks, until one is written to.

        Raises LeaseLost, Unavailable; then some rows have no tokens.
        """
        old = self._rows
        self._rows = [_Row() for _ in rows]
        used: set[int] = set()
        try:
            for new, at in zip(self._rows, rows, strict=True):
                parent = old[at]
                if at in used and parent.sequence is not None:
                    new.sequence = parent.sequence.fork()
                elif at not in used:
                    new.sequence = parent.sequence
                    used.add(at)
                new.kept = parent.kept if new.sequence is not None else 0
        finally:
            self._end([row for at, row in enumerate(old) if at not in used])

    def end(self) -> None:
        """Let go of all blocks; full ones stay cached. Never raises for a daemon that is away."""
        self._end(self._rows)

    def _end(self, rows: Items[_Row]) -> None:
        for row in rows:
            if row.sequence is not None:
                row.sequence.end()
                row.sequence, row.kept = None, 0


def padded(tables: Items[I32]) -> I32:
    """Block tables as one array (i32 [rows, longest], padded with 0)."""
    found = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
    for row, table in enumerate(tables):
        found[row, : len(table)] = table
    return found
