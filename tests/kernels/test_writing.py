"""write_kv against its definition, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_kernels import InvalidInput, write_kv
from torch import Tensor

FP8 = torch.float8_e4m3fn


def caches(blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Two layers of zeros, keys and values, as views of one pool."""
    pool = torch.zeros(blocks, 2, 2, block_size, heads, dim).to(dtype)
    return [pool[:, 1, 0], pool[:, 1, 1]]


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    narrow=st.booleans(),
    block_size=st.integers(1, 7),
    scales=st.tuples(*[st.sampled_from((1.0, 0.5, 3.0))] * 2),
)
def test_each_token_is_where_it_was_to_go(
    data: st.DataObject,
    dtype: torch.dtype,
    narrow: bool,
    block_size: int,
    scales: tuple[float, float],
) -> None:
    places = st.lists(st.integers(0, 4 * block_size - 1), unique=True, max_size=9)
    slots = [slot if data.draw(st.booleans()) else -1 - slot for slot in data.draw(places)]
    new = [torch.randn(len(slots), 2, 8).to(dtype) * 200 for _ in range(2)]
    stored = caches(4, block_size, 2, 8, FP8 if narrow else dtype)
    write_kv(
        *new, torch.tensor(slots, dtype=torch.int64), *stored, k_scale=scales[0], v_scale=scales[1]
    )
    for cache, values, scale in zip(stored, new, scales, strict=True):
        want = torch.zeros_like(cache)
        for slot, value in zip(slots, values, strict=True):
            if slot >= 0:
                scaled = value.float() / scale
                scaled = scaled.clamp(-448, 448) if narrow else scaled
                want[slot // block_size, slot % block_size] = scaled.to(cache.dtype)
        assert torch.equal(cache.float(), want.float())


def test_caches_take_no_part_in_gradients() -> None:
    new = [torch.ones(1, 2, 8, requires_grad=True) for _ in range(2)]
    stored = caches(1, 4, 2, 8, torch.float32)
    write_kv(*new, torch.tensor([3]), *stored)
    assert not any(cache.requires_grad for cache in stored)
    assert all(torch.equal(cache[0, 3], torch.ones(2, 8)) for cache in stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": torch.zeros(3, 2)},
            r"k: got shape \(3, 2\), want \[tokens, num_kv_heads, head_dim\]",
        ),
        ({"k": torch.zeros(3, 2, 8).double()}, "k: got torch.float64, want torch.float16"),
        ({"v": torch.zeros(2, 2, 8)}, r"v: got \(2, 2, 8\) of torch.float32, want \(3, 2, 8\)"),
        ({"k_cache": torch.zeros(4, 5, 3, 8)}, r"k_cache: got shape .*num_kv_heads=2, head_dim=8"),
        ({"k_cache": torch.zeros(4, 5, 2, 8).half()}, "k_cache: got torch.float16, want"),
        ({"v_cache": torch.zeros(4, 6, 2, 8)}, r"v_cache: got \(4, 6, 2, 8\)"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"slots: got \(3,\) of torch.int32"),
        ({"slots": torch.tensor([0, 20, 1])}, "slots: got 20, want below 20"),
        ({"k_scale": 0.0}, "k_scale: got 0.0, want a finite one, not 0"),
        ({"v_scale": float("nan")}, "v_scale: got nan"),
        ({"backend": "cpu"}, "backend: got 'cpu'"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_stored(
    change: dict[str, object], message: str
) -> None:
    pool = torch.zeros(4, 5, 2, 8)
    call: dict[str, object] = {
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "slots": torch.arange(3),
        "k_cache": pool,
        "v_cache": torch.zeros(4, 5, 2, 8),
    }
    with pytest.raises(InvalidInput, match=message):
        write_kv(**call | change)  # type: ignore[arg-type]  # wrong on purpose
    assert not pool.any()
