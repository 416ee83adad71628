"""A batch whose KV lies in this process, because there is no daemon to hold it."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from tierkv.core.ids import I32, U32
from tierkv.core.spec import KVSpec

BLOCKS_MIN = 16


class PrivateRows:
    """The same as ``PooledRows`` with memory of its own: nothing is found in it or kept."""

    pooled = False

    def __init__(self, spec: KVSpec, device: torch.device, rows: int) -> None:
        self._spec = spec
        self.blocks = self._new_blocks(0, device)
        self.kept = [0] * rows
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self._free: list[int] = []

    def _new_blocks(self, count: int, device: torch.device) -> Tensor:
        spec = self._spec
        shape = (count, spec.layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
        return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)

    def make_room(self, tokens: Items[U32], keep: int) -> list[I32]:
        """Room for all tokens of each row; returns the rows' block tables."""
        for table, ids in zip(self._tables, tokens, strict=True):
            self._lengthen(table, -(-len(ids) // self._spec.block_tokens))
        return [np.array(table, np.int32) for table in self._tables]

    def record(self, tokens: Items[U32]) -> None:
        """All of these tokens' KV is written."""
        self.kept = [len(ids) for ids in tokens]

    def cut(self, counts: Items[int]) -> None:
        """Keep at most ``counts[row]`` tokens of each row."""
        self.kept = [min(pair) for pair in zip(self.kept, counts, strict=True)]

    def select(self, rows: Items[int]) -> None:
        """Let row ``i`` be a copy of what row ``rows[i]`` was."""
        old, self._tables = self._tables, []
        for at in rows:
            table: list[int] = []
            self._lengthen(table, len(old[at]))
            self.blocks[table] = self.blocks[old[at]]
            self._tables.append(table)
        self.kept = [self.kept[at] for at in rows]
        for table in old:
            self._free += table

    def end(self) -> None:
        """Free the memory."""
        self.blocks = self.blocks[:0].clone()
        self._tables, self._free = [[] for _ in self._tables], []
        self.kept = [0] * len(self.kept)

    def _lengthen(self, table: list[int], blocks: int) -> None:
        missing = blocks - len(table)
        if missing > len(self._free):
            have = len(self.blocks)
            more = self._new_blocks(max(missing, have, BLOCKS_MIN), self.blocks.device)
            self.blocks = torch.cat((self.blocks, more))
            self._free += range(have, len(self.blocks))
        table.extend(self._free.pop() for _ in range(missing))
