"""The engine's memory as pieces of blocks: every byte of a block, and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierkv.errors import InvalidArgument
from tierkv.integrations.vllm.geometry import Column, Geometry
from tierkv.integrations.vllm.pages import EnginePages, rows_of_cache

BLOCKS, HEADS, TOKENS, SIZE = 6, 3, 4, 10


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in which every element is another one."""
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.int32).view(torch.float32).to(dtype).reshape(shape)


def block_bytes(cache: torch.Tensor, block: int, parts: int = 1) -> set[int]:
    """Where the bytes of a block lie in its storage."""
    places = torch.arange(cache.untyped_storage().nbytes() // cache.element_size())
    seen = torch.as_strided(places, cache.shape, cache.stride(), cache.storage_offset())
    first = seen[block * parts : (block + 1) * parts].flatten().tolist()
    size = cache.element_size()
    return {place * size + byte for place in first for byte in range(size)}


LAYOUTS: dict[str, Any] = {
    "dense": lambda: torch.zeros(BLOCKS, HEADS, TOKENS, SIZE),
    "tokens before heads": lambda: torch.zeros(BLOCKS, TOKENS, HEADS, SIZE).transpose(1, 2),
    "heads outermost": lambda: torch.zeros(HEADS, BLOCKS, TOKENS, SIZE).transpose(0, 1),
    "all layers of a block together": lambda: torch.zeros(BLOCKS, 5, HEADS, TOKENS, SIZE)[:, 2],
    "padded": lambda: torch.zeros(BLOCKS, HEADS, TOKENS, SIZE + 6)[..., :SIZE],
    "keys and values outermost": lambda: torch.zeros(2, BLOCKS, TOKENS, SIZE).transpose(0, 1),
    "smaller kernel blocks": lambda: torch.zeros(BLOCKS * 2, HEADS, TOKENS // 2, SIZE),
    "behind others": lambda: torch.zeros(BLOCKS + 2, HEADS, TOKENS, SIZE)[2:],
    "bfloat16": lambda: torch.zeros(BLOCKS, HEADS, TOKENS, SIZE, dtype=torch.bfloat16),
    "one block": lambda: torch.zeros(1, HEADS, TOKENS, SIZE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pieces_of_a_block_are_its_bytes(layout: str) -> None:
    """Each once, whatever the order of the axes."""
    cache = LAYOUTS[layout]()
    blocks = 1 if layout == "one block" else BLOCKS
    pieces = rows_of_cache("layer", cache, blocks)
    for block in range(blocks):
        found: list[int] = []
        for piece in pieces:
            start = piece.storage_offset() + block * piece.stride(0)
            found += range(start, start + piece.shape[1])
        assert len(found) == len(set(found))
        assert set(found) == block_bytes(cache, block, cache.shape[0] // blocks)


def test_what_overlaps_is_refused() -> None:
    """A block that is part of another one cannot be stored by itself."""
    memory = torch.zeros(1000)
    cache = torch.as_strided(memory, (BLOCKS, TOKENS, SIZE), (SIZE, SIZE, 1))
    with pytest.raises(InvalidArgument, match="overlap"):
        rows_of_cache("layer", cache, BLOCKS)


def test_a_first_axis_that_does_not_count_blocks_is_refused() -> None:
    """It says what the shape is, and what was expected."""
    with pytest.raises(InvalidArgument, match=r"layer: .*\[7, 3\].* 6 blocks"):
        rows_of_cache("layer", torch.zeros(7, 3), BLOCKS)


def two_groups() -> tuple[EnginePages, dict[str, torch.Tensor]]:
    """Two layers with blocks of 4 tokens and one with blocks of 2."""
    caches = {
        "a": torch.randn(BLOCKS, HEADS, TOKENS, SIZE),
        "b": torch.randn(BLOCKS, TOKENS, HEADS, SIZE).transpose(1, 2),
        "c": torch.randn(BLOCKS, HEADS, TOKENS // 2, SIZE),
    }
    geometry = Geometry(
        TOKENS,
        (4, 2),
        (Column(0, 0, 1), Column(1, 0, 2), Column(1, 1, 2)),
        (("a", "b"), ("c",), ("c",)),
    )
    return EnginePages(geometry, caches, BLOCKS), caches


def test_blocks_come_back_where_they_are_wanted() -> None:
    """Out of one set of the engine's blocks, into another one."""
    pages, caches = two_groups()
    assert pages.block_bytes == 4 * HEADS * SIZE * (4 + 4 + 2 + 2)
    staged = torch.empty(2, pages.block_bytes, dtype=torch.uint8)
    pages.gather(np.array([[1, 2, 3], [4, 5, 0]], np.int32), staged)
    before = {name: cache.clone() for name, cache in caches.items()}
    pages.scatter(np.array([[0, 4, 1], [2, 2, 3]], np.int32), staged)
    for name in ("a", "b"):
        assert torch.equal(caches[name][0], before[name][1])
        assert torch.equal(caches[name][2], before[name][4])
        assert torch.equal(caches[name][[1, 3, 4, 5]], before[name][[1, 3, 4, 5]])
    moved = {4: 2, 1: 3, 2: 5, 3: 0}
    for target, source in moved.items():
        assert torch.equal(caches["c"][target], before["c"][source])
    assert torch.equal(caches["c"][[0, 5]], before["c"][[0, 5]])


def test_parts_that_are_not_wanted_are_left_alone() -> None:
    """As of the groups that forget what has left their window."""
    pages, caches = two_groups()
    staged = torch.empty(1, pages.block_bytes, dtype=torch.uint8)
    pages.gather(np.array([[1, 2, 3]], np.int32), staged)
    before = {name: cache.clone() for name, cache in caches.items()}
    pages.scatter(np.array([[5, -1, 4]], np.int32), staged)
    assert torch.equal(caches["a"][5], before["a"][1])
    assert torch.equal(caches["c"][4], before["c"][3])
    assert torch.equal(caches["c"][[0, 1, 2, 3, 5]], before["c"][[0, 1, 2, 3, 5]])


def test_other_pieces_are_another_identity() -> None:
    """The description tells layouts from each other that differ in their pieces."""
    pages, caches = two_groups()
    geometry = Geometry(TOKENS, (4,), (Column(0, 0, 1),), (("a", "b"),))
    assert EnginePages(geometry, caches, BLOCKS).describe() != pages.describe()
