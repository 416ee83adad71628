"""One task of paged attention: its memory, and the ways to do it that torch has.

Imports torch, numpy and the kernels only, so that a peer's process can make the same task.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tierkv_kernels
import torch
from tierkv_kernels.cpu import read_blocks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LAYERS, LAYER = 2, 1
"""The pool's blocks hold the layers side by side, and one of them is attended to."""

HUGE_BYTES = 2 << 20
SEED = 0


@dataclass(frozen=True)
class Shape:
    """How large a task is. Each of ``batch`` sequences has ``queries`` in its last tokens."""

    batch: int
    context: int
    queries: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    layout: str = "NHD"

    @property
    def width(self) -> int:
        """Blocks of a sequence."""
        return -(-self.context // self.block)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the task has to read."""
        dtype: torch.dtype = getattr(torch, self.kv_dtype)
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * dtype.itemsize


def memory(size_bytes: int) -> Tensor:
    """Zeros, u8 [size_bytes], in huge pages where the kernel offers them."""
    pages = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
    mapped = mmap.mmap(-1, pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes]


def content(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """The same random query [T, q_heads, D], K and V [batch, context, kv_heads, D] always."""
    chance = torch.Generator().manual_seed(SEED)
    rows = shape.batch * shape.queries
    q = torch.randn(rows, shape.q_heads, shape.head_dim, generator=chance)
    kv = torch.randn(
        *(2, shape.batch, shape.context, shape.kv_heads, shape.head_dim), generator=chance
    )
    k, v = kv.to(getattr(torch, shape.kv_dtype))
    return q.to(getattr(torch, shape.dtype)), k, v


def table(shape: Shape) -> Tensor:
    """Slots in no order, as after some hours of service: i32 [batch, width]."""
    order = np.random.default_rng(SEED).permutation(shape.batch * shape.width)
    return torch.from_numpy(order.astype(np.int32)).view(shape.batch, shape.width)


class Task:
    """K and V in the blocks of a pool [slots, LAYERS, 2, block, kv_heads, D], and a query."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.q, k, v = content(shape)
        self.table = table(shape)
        self.lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
        self.indptr = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries
        self.out = torch.empty_like(self.q)
        self.layer = self._pool()[:, LAYER]
        self._fill(k, v)
        self.plan = self.made_plan()

    def made_plan(self) -> tierkv_kernels.Plan:
        """What is done once a step, for all of its layers."""
        shape = self.shape
        return tierkv_kernels.plan(
            self.lens.numpy(),
            np.full(shape.batch, shape.queries),
            num_q_heads=shape.q_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block,
            split=0,
        )

    def paged(self, backend: str = "auto") -> Tensor:
        """What is measured: attention where the blocks lie."""
        found, _ = tierkv_kernels.paged_attention(
            self.q,
            self.layer[:, 0],
            self.layer[:, 1],
            self.table,
            self.lens,
            q_indptr=self.indptr,
            plan=self.plan,
            out=self.out,
            backend=backend,  # type: ignore[arg-type]  # one of its names
        )
        return found

    def read(self) -> None:
        """The ceiling: read the same blocks in the same order, and do nothing with them."""
        read_blocks(self.layer, self.table.numpy().ravel())

    def gathered(self) -> tuple[Tensor, Tensor]:
        """K and V as they are for attention that knows no blocks: [batch, kv_heads, context, D]."""
        k, v = (self._gathered(self.layer[:, half]) for half in (0, 1))
        return k, v

    def gather_and_attend(self, *, rows: bool) -> Tensor:
        """Without paged attention: gather, then torch's own. Returns [T, q_heads, D]."""
        return self.attend(*self.gathered(), rows=rows)

    def attend(self, k: Tensor, v: Tensor, *, rows: bool) -> Tensor:
        """torch's attention on contiguous K and V. Returns [T, q_heads, D].

        rows: the query heads of a KV head as rows of one head, else ``enable_gqa``.
        """
        shape = self.shape
        q = self.q.view(shape.batch, shape.queries, shape.q_heads, shape.head_dim).transpose(1, 2)
        if rows:
            q = q.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)
        mask = self._mask(rows)
        out = scaled_dot_product_attention(q, k, v, mask, enable_gqa=not rows)
        out = out.reshape(shape.batch, shape.q_heads, shape.queries, shape.head_dim)
        return out.transpose(1, 2).reshape(self.q.shape)

    def _mask(self, rows: bool) -> Tensor | None:
        """What queries may see, None for one query: it sees all."""
        shape = self.shape
        if shape.queries == 1:
            return None
        seen = torch.ones(shape.queries, shape.context, dtype=torch.bool)
        seen = seen.tril(shape.context - shape.queries)
        return seen.repeat(shape.q_heads // shape.kv_heads, 1) if rows else seen

    def _pool(self) -> Tensor:
        shape, dtype = self.shape, getattr(torch, self.shape.kv_dtype)
        values = (LAYERS, 2, shape.block, shape.kv_heads, shape.head_dim)
        slots = shape.batch * shape.width
        raw = memory(slots * math.prod(values) * dtype.itemsize).view(slots, -1)
        return tierkv_kernels.block_view(
            raw,
            layers=LAYERS,
            block_size=shape.block,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            layout=shape.layout,
        )

    def _fill(self, k: Tensor, v: Tensor) -> None:
        shape = self.shape
        room = shape.width * shape.block - shape.context
        slots = self.table.flatten().long()
        for half, dense in enumerate((k, v)):
            padded = torch.nn.functional.pad(_raw(dense), (0, 0, 0, 0, 0, room))
            blocks = padded.view(-1, shape.block, shape.kv_heads, shape.head_dim)
            _raw(self.layer[:, half])[slots] = blocks

    def _gathered(self, cache: Tensor) -> Tensor:
        found = _raw(cache)[self.table.long()].flatten(1, 2)[:, : self.shape.context]
        found = found.view(cache.dtype).to(self.q.dtype)
        return found.transpose(1, 2).contiguous()


def _raw(cache: Tensor) -> Tensor:
    """Bytes in place of float8, with which torch does little."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def compiled_flex(task: Task) -> Callable[[], Tensor]:
    """flex_attention under torch.compile, on contiguous K and V: nothing is gathered.

    Decode only. Compiles now. Raises what torch raises where it cannot: it wants a C++ compiler.
    """
    from torch.nn.attention.flex_attention import flex_attention

    shape = task.shape
    k, v = task.gathered()
    q = task.q.view(shape.batch, shape.q_heads, 1, shape.head_dim)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        out: Tensor = compiled(q, k, v, enable_gqa=True)
        return out.view(task.q.shape)

    run()
    return run
