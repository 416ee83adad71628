"""Paged batches, and the check of an output against the oracle. Needs torch and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_oracle import attention_float64, attention_same_precision
from torch import Tensor

FP8 = torch.float8_e4m3fn
GARBAGE = (-1, -(2**31), 2**31 - 1, 1_000_000)

CASES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": ((1, 1), (64, 1), (65, 1), (300, 1))},
    "window": {"window": 20},
    "window of one key": {"window": 0},
    "soft cap": {"softcap": 2.0},
    "wide soft cap": {"softcap": 500.0},
    "not causal": {"causal": False},
    "window, not causal": {"causal": False, "window": 5},
    "one head": {"kv_heads": 1, "group": 1},
    "group of 5": {"group": 5},
    "group of 17": {"kv_heads": 1, "group": 17},
    "group of 32, extend": {"kv_heads": 1, "group": 32, "lengths": ((40, 7),)},
    "heads first": {"layout": "hnd"},
    "layer of a pool": {"layout": "pool nhd"},
    "layer of a pool, heads first": {"layout": "pool hnd"},
    "blocks of one token": {"block_size": 1},
    "blocks of 21 tokens": {"block_size": 21},
    "blocks of 128 tokens": {"block_size": 128},
    "a long extend": {"lengths": ((150, 70), (200, 200))},
    "a window across row tiles": {"lengths": ((150, 70),), "window": 30},
}
"""Fields of Shape that make the batches which every kernel must get right."""


@dataclass(frozen=True)
class Shape:
    """Everything about a batch except its numbers."""

    lengths: tuple[tuple[int, int], ...]  # (seq_len, q_len) of each sequence
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    layout: str = "nhd"  # or "hnd", "pool nhd", "pool hnd"
    in_order: bool = False  # the blocks of a sequence are consecutive slots
    shared_tokens: int = 0  # common to all sequences, their full blocks in the same slots
    causal: bool = True
    window: int = -1
    softcap: float = 0.0
    seed: int = 0

    @property
    def seq_lens(self) -> list[int]:
        return [seq_len for seq_len, _ in self.lengths]

    @property
    def q_lens(self) -> list[int]:
        return [q_len for _, q_len in self.lengths]

    @property
    def geometry(self) -> dict[str, int]:
        """The arguments of plan() that every plan needs."""
        return {
            "num_q_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
        }

    @property
    def mask(self) -> dict[str, object]:
        return {"causal": self.causal, "window": self.window}


@dataclass
class Batch:
    """Tensors for paged_attention, and the same keys and values in order for the oracle."""

    shape: Shape
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    q_indptr: Tensor
    keys: list[Tensor]  # [N, Hkv, D] of each sequence
    values: list[Tensor]
    scales: dict[str, float] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    @property
    def options(self) -> dict[str, object]:
        return {
            "q_indptr": self.q_indptr,
            "causal": self.shape.causal,
            "window": self.shape.window,
            "softcap": self.shape.softcap,
            **self.scales,
        }


def make_batch(shape: Shape) -> Batch:
    """Slots that hold no token are NaN, table entries past a sequence's end are garbage."""
    generator = torch.Generator().manual_seed(shape.seed)
    kv_dtype = shape.kv_dtype or shape.dtype

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    q = normal(sum(shape.q_lens), shape.kv_heads * shape.group, shape.head_dim)
    size, heads, dim = shape.block_size, shape.kv_heads, shape.head_dim
    shared = [normal(shape.shared_tokens, heads, dim).to(kv_dtype) for _ in range(2)]
    in_order = [
        [
            torch.cat((shared[i], normal(seq_len, heads, dim).to(kv_dtype)))[:seq_len]
            for seq_len in shape.seq_lens
        ]
        for i in range(2)
    ]

    blocks_of = [-(-seq_len // size) for seq_len in shape.seq_lens]
    shared_blocks = shape.shared_tokens // size
    num_blocks = sum(blocks_of) + 3
    order = torch.arange(num_blocks) if shape.in_order else _shuffled(num_blocks, generator)
    garbage = torch.tensor(GARBAGE, dtype=torch.int32)
    max_blocks = max(blocks_of, default=0) + 2
    picks = torch.randint(len(GARBAGE), (len(blocks_of), max_blocks), generator=generator)
    block_table = garbage[picks]
    k_cache, v_cache = _empty_caches(shape, num_blocks, kv_dtype)
    used = 1
    for row, count in enumerate(blocks_of):
        block_table[row, :count] = order[used : used + count]
        block_table[row, : min(count, shared_blocks)] = block_table[0, : min(count, shared_blocks)]
        used += count
        for cache, tokens in ((k_cache, in_order[0][row]), (v_cache, in_order[1][row])):
            for i in range(count):
                piece = tokens[i * size : (i + 1) * size]
                cache[int(block_table[row, i]), : len(piece)] = piece
    q_indptr = torch.tensor([0, *shape.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    scales = {"k_scale": 0.75, "v_scale": 1.5} if kv_dtype == FP8 else {}
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    return Batch(
        shape, q, k_cache, v_cache, block_table, seq_lens, q_indptr, *in_order, scales=scales
    )


def _shuffled(count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator)


def _empty_caches(shape: Shape, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[num_blocks, block_size, Hkv, D] views of NaN in the layout asked for."""
    inner = (shape.block_size, shape.kv_heads, shape.head_dim)
    heads_first = shape.layout.endswith("hnd")
    if heads_first:
        inner = (inner[1], inner[0], inner[2])
    outer = (num_blocks, 3, 2) if shape.layout.startswith("pool") else (2, num_blocks)
    pool = torch.full((*outer, *inner), torch.nan).to(dtype)
    k_cache, v_cache = (pool[:, 1, 0], pool[:, 1, 1]) if len(outer) == 3 else (pool[0], pool[1])
    if heads_first:
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return k_cache, v_cache


def check_output(
    batch: Batch, out: Tensor, lse: Tensor | None, *, lse_within: float = 2e-5
) -> None:
    """The error is at most twice that of dense torch in the same precision (FP8: four times)."""
    shape = batch.shape
    k_scale, v_scale = batch.scales.get("k_scale", 1.0), batch.scales.get("v_scale", 1.0)
    options = {"causal": shape.causal, "window": shape.window, "softcap": shape.softcap}
    scale = 1.0 / math.sqrt(shape.head_dim)
    assert out.dtype == shape.dtype
    error = lse_error = allowed = 0.0
    bounds = batch.q_indptr.tolist()
    for row, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        rows = slice(bounds[row], bounds[row + 1])
        if rows.start == rows.stop:
            continue
        q = batch.q[rows]
        want, want_lse = attention_float64(
            q, k.double() * k_scale, v.double() * v_scale, scale=scale, **options
        )
        k, v = k.to(shape.dtype) * k_scale, v.to(shape.dtype) * v_scale
        dense = attention_same_precision(q, k, v, scale=scale, **options)
        error = max(error, (out[rows].double() - want).abs().max().item())
        allowed = max(allowed, (dense.double() - want).abs().max().item())
        assert torch.equal(out[rows].isfinite(), want.isfinite()), "not finite"
        if lse is not None:
            assert lse.dtype == torch.float32
            unseen = want_lse == -torch.inf
            assert torch.equal(lse[rows] == -torch.inf, unseen), "lse of rows that see no key"
            difference = (lse[rows].double() - want_lse).masked_fill(unseen, 0.0)
            lse_error = max(lse_error, difference.abs().max().item())
    factor = 4 if shape.kv_dtype == FP8 else 2
    assert error <= factor * allowed + 1e-5, f"off by {error:g}, plain torch by {allowed:g}"
    assert lse_error <= lse_within, f"lse off by {lse_error:g}"
