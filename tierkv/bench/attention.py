"""Paged attention on a block-major pool, torch backend, against torch's own on plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tierkv_kernels
import torch
from torch.nn.functional import scaled_dot_product_attention

from tierkv.bench.harness import MICROSECONDS, Bench, Line, Placement, each_call

LAYERS, BLOCK_TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM = 4, 16, 9, 3, 64
"""SmolLM2-135M, but fewer layers."""
CACHED_TOKENS = 2048


def run(bench: Bench) -> Iterator[Line]:
    """A prompt's last 19 tokens over a cached prefix, and one token each of eight sequences."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    place = Placement("one thread", bench.same_core.client, bench.same_core.client)
    yield _case(bench, place, "attention.extend.19", batch=1, queries=19)
    yield _case(bench, place, "attention.decode.8", batch=8, queries=1)


def _case(bench: Bench, place: Placement, name: str, *, batch: int, queries: int) -> Line:
    tokens = CACHED_TOKENS + queries
    width = -(-tokens // BLOCK_TOKENS)
    pool = torch.randn(batch * width, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    layer = pool[:, 1]
    # Slots in no order, as after some hours of service.
    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    table = torch.from_numpy(order).reshape(batch, width)
    lens = torch.full((batch,), tokens, dtype=torch.int32)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * queries
    query = torch.randn(batch * queries, Q_HEADS, HEAD_DIM)
    plan = tierkv_kernels.plan(
        lens.numpy(),
        np.full(batch, queries),
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_TOKENS,
        split=0,
    )
    key, value = (_gathered(layer[:, half], table, tokens) for half in (0, 1))
    dense_query = query.view(batch, queries, Q_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)

    def paged() -> Any:
        out, _ = tierkv_kernels.paged_attention(
            query,
            layer[:, 0],
            layer[:, 1],
            table,
            lens,
            q_indptr=indptr,
            plan=plan,
            backend="torch",
        )
        return out

    def dense() -> torch.Tensor:
        return scaled_dot_product_attention(
            dense_query, key, value, None if queries == 1 else mask, enable_gqa=True
        )

    def gather() -> None:
        for half in (0, 1):
            _gathered(layer[:, half], table, tokens)

    expected = dense().transpose(1, 2).reshape(query.shape)
    torch.testing.assert_close(paged(), expected, rtol=1e-4, atol=1e-4)
    calls = bench.pick(60, 5)
    with torch.no_grad():
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: each_call(paged, calls),
                "dense SDPA": lambda: each_call(dense, calls),
                "gather alone": lambda: each_call(gather, calls),
            },
        )
    return measured.line(name, MICROSECONDS, "tierkv", ["dense SDPA", "gather alone"], place)


def _gathered(cache: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    """Contiguous [batch, kv_heads, tokens, head_dim] from the blocks in ``table``."""
    rows = cache[table.long()].flatten(1, 2)[:, :tokens]
    return rows.transpose(1, 2).contiguous()
