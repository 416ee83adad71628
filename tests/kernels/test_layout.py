"""The view of a pool of raw slots as blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tierkv_kernels import InvalidInput, block_view

SLOTS, LAYERS, BLOCK, HEADS, DIM = 3, 2, 4, 2, 8
GEOMETRY = {"layers": LAYERS, "block_size": BLOCK, "num_kv_heads": HEADS, "head_dim": DIM}
VALUES = LAYERS * 2 * BLOCK * HEADS * DIM


def raw_pool(dtype: torch.dtype, padding_bytes: int = 64) -> torch.Tensor:
    return torch.zeros(SLOTS, VALUES * dtype.itemsize + padding_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_a_block_lies_in_its_slot_as_the_layout_says(dtype: torch.dtype, layout: str) -> None:
    pool = raw_pool(dtype)
    blocks = block_view(pool, **GEOMETRY, dtype=dtype, layout=layout)
    assert blocks.shape == (SLOTS, LAYERS, 2, BLOCK, HEADS, DIM)
    assert blocks.dtype == dtype
    dense = torch.arange(VALUES).remainder(100).to(dtype).view(LAYERS, 2, BLOCK, HEADS, DIM)
    blocks[1].copy_(dense)
    stored = dense if layout == "NHD" else dense.transpose(2, 3).contiguous()
    block_bytes = VALUES * dtype.itemsize
    assert torch.equal(pool[1, :block_bytes], stored.view(-1).view(torch.uint8))
    assert not pool[1, block_bytes:].any()
    assert not pool[[0, 2]].any()


def test_a_pool_without_slots_or_padding() -> None:
    blocks = block_view(raw_pool(torch.float32, 0)[:0], **GEOMETRY, dtype=torch.float32)
    assert blocks.shape == (0, LAYERS, 2, BLOCK, HEADS, DIM)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("layout: got 'DHN', want", {"layout": "DHN"}),
        ("pool: got (3, 1088) of torch.uint8, want [slots, at least 2048 bytes]", {"layers": 4}),
        ("pool: got (1088,) of torch.uint8", {"pool": torch.zeros(1088, dtype=torch.uint8)}),
        ("pool: got (3, 1088) of torch.int8", {"pool": torch.zeros(3, 1088, dtype=torch.int8)}),
        ("pool: got strides (1, 3)", {"pool": torch.zeros(1088, 3, dtype=torch.uint8).T}),
        ("pool: got strides (1025, 1)", {"pool": torch.zeros(3, 1025, dtype=torch.uint8)}),
    ],
)
def test_a_pool_that_does_not_fit_is_named(message: str, change: dict[str, Any]) -> None:
    arguments = {"pool": raw_pool(torch.float32), **GEOMETRY, "dtype": torch.float32, **change}
    with pytest.raises(InvalidInput) as caught:
        block_view(arguments.pop("pool"), **arguments)
    assert message in str(caught.value)
