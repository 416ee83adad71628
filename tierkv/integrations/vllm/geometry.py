"""How the engine's blocks make up tierkv's: which block ids of which layers, for which tokens.

A block of tierkv has ``block_tokens`` tokens: the least common multiple of the block sizes of the
engine's KV cache groups. So of a group with smaller blocks it has several, its *parts*. Each part
of each group is a column: a table of the engine's block ids has a row for each block of tierkv and
a column for each part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.core.ids import I32
from tierkv.errors import InvalidArgument

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

GONE = -1
"""In place of a block id: the engine does not hold this block (any more)."""

NULL_BLOCK = 0
"""vLLM's own id for that, in the groups that forget what has left their window."""


@dataclass(frozen=True)
class Column:
    """Part ``part`` of ``parts`` of group ``group``, an index into the engine's block tables."""

    group: int
    part: int
    parts: int


@dataclass(frozen=True)
class Geometry:
    """See the module. ``layers``: of each column, the layers whose pages it has."""

    block_tokens: int
    block_sizes: tuple[int, ...]
    columns: tuple[Column, ...]
    layers: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, config: KVCacheConfig) -> Geometry:
        """Raises InvalidArgument if there are layers whose state is not KV of tokens."""
        groups = [config.kv_cache_groups[number] for number in config.transfer_group_ids]
        for group in groups:
            _require_attention(group)
        if len(groups) < len(config.kv_cache_groups) or config.host_group_ids:
            raise InvalidArgument(
                "parts of this KV cache are copies that the engine keeps of others (HiSparse), in "
                "blocks that tierkv is not told of; run this model without the connector"
            )
        if not groups:
            raise InvalidArgument("this model has no KV cache that could be stored")
        sizes = tuple(int(group.kv_cache_spec.block_size) for group in groups)
        block_tokens = math.lcm(*sizes)
        columns, layers = [], []
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            parts = block_tokens // size
            columns += [Column(number, part, parts) for part in range(parts)]
            layers += [tuple(group.layer_names)] * parts
        return cls(block_tokens, sizes, tuple(columns), tuple(layers))

    @property
    def groups(self) -> int:
        """How many of the engine's KV cache groups there are."""
        return len(self.block_sizes)

    def rows(self, tables: Sequence[Sequence[int]], start: int, stop: int) -> I32:
        """The engine's ids for blocks ``start`` to ``stop`` - 1 (i32 [blocks, columns]).

        ``tables``: of each group, the ids of a request's blocks, in order.
        """
        arrays = [np.asarray(table, np.int32) for table in tables]
        rows = np.full((stop - start, len(self.columns)), GONE, np.int32)
        for number, column in enumerate(self.columns):
            first = start * column.parts + column.part
            ids = arrays[column.group][first : stop * column.parts : column.parts]
            rows[: len(ids), number] = ids
        rows[rows == NULL_BLOCK] = GONE
        return rows

    def written(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> list[int]:
        """Ids of the blocks that a step writes into that goes on behind ``computed_tokens``."""
        return [
            block
            for table, size in zip(tables, self.block_sizes, strict=True)
            for block in table[computed_tokens // size :]
        ]


def _require_attention(group: Any) -> None:
    from vllm.v1.kv_cache_interface import (  # only an engine has it
        AttentionSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        RSWASpec,
        iter_layer_specs,
    )

    for spec in iter_layer_specs(group.kv_cache_spec):
        attention = isinstance(spec, AttentionSpec)
        if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec | RSWASpec):
            attention = False  # of the last: what a token sees depends on where the prompt ends
        if not attention or not spec.prefix_cacheable:
            raise InvalidArgument(
                f"layer {group.layer_names[0]} keeps {type(spec).__name__}: tierkv stores the KV "
                "of attention to tokens (full, sliding window, chunked local, MLA), not this; run "
                "this model without the connector"
            )
