"""Paged decode in Triton, split over the keys: the peer that anybody could write.

The usual flash-decoding: a program takes one sequence, one KV head and one chunk of keys, with the
heads of a group padded to the 16 rows that a matrix product needs; torch merges the chunks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, TILE = 16, 64


@triton.jit
def _chunk(
    q, k, v, table, lens, out, lse,
    scale, chunk_tokens, group, num_chunks,
    q_batch, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row,
    BLOCK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + batch)
    begin = chunk * chunk_tokens
    end = tl.minimum(begin + chunk_tokens, length)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
    heads = head * group + rows
    queries = tl.load(
        q + batch * q_batch + heads[:, None] * q_head + dims[None, :],
        mask=(rows < group)[:, None],
        other=0.0,
    )
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, D), tl.float32)
    for first in range(begin, end, TILE):
        at = first + keys
        seen = at < end
        block = tl.load(table + batch * table_row + at // BLOCK, mask=seen, other=0).to(tl.int64)
        place = block * k_block + (at % BLOCK) * k_token + head * k_head
        key = tl.load(k + place[None, :] + dims[:, None], mask=seen[None, :], other=0.0)
        scores = tl.dot(queries, key) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weights, 1)
        place = block * v_block + (at % BLOCK) * v_token + head * v_head
        value = tl.load(v + place[:, None] + dims[None, :], mask=seen[:, None], other=0.0)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = new
    part = (batch * num_chunks + chunk) * tl.num_programs(1) * group + heads
    mine = rows < group
    some = total > 0
    tl.store(lse + part, tl.where(some, largest + tl.log(total), -float("inf")), mask=mine)
    whole = gathered / tl.where(some, total, 1.0)[:, None]
    tl.store(out + part[:, None] * D + dims[None, :], whole, mask=mine[:, None])


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lens: Tensor
) -> Tensor:
    """As ``tierkv_kernels.paged_attention`` for one query each: q [B, Hq, D], same caches."""
    batch, q_heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    tokens = block_table.shape[1] * block_size
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count * 4
    wanted = max(1, programs // (batch * kv_heads))
    chunk = max(256, TILE * math.ceil(tokens / wanted / TILE))
    chunks = math.ceil(tokens / chunk)
    out = torch.empty((batch, chunks, q_heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, chunks, q_heads), dtype=torch.float32, device=q.device)
    _chunk[(batch, kv_heads, chunks)](
        q, k_cache, v_cache, block_table, lens, out, lse,
        head_dim**-0.5, chunk, q_heads // kv_heads, chunks,
        *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
        BLOCK=block_size, D=head_dim, ROWS=ROWS, TILE=TILE,
    )  # fmt: skip
    if chunks == 1:
        return out[:, 0].to(q.dtype)
    weights = torch.softmax(lse, 1)[..., None]
    return (out * weights).sum(1).to(q.dtype)
