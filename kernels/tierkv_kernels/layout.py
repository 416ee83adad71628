"""How a pool of block slots lies in memory, and the view of it that attention takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tierkv_kernels.errors import require


def block_view(
    pool: Tensor,
    *,
    layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: str = "NHD",
) -> Tensor:
    """The blocks in a pool of raw slots, without a copy: K before V, layer by layer.

    pool: [slots, slot_bytes] uint8, the last dimension contiguous. A slot begins with its block;
        what is behind the block is padding.
    layout: the order inside a slot, "NHD" (tokens before heads) or "HND".
    Returns [slots, layers, 2, block_size, num_kv_heads, head_dim] of ``dtype`` in both layouts; of
    HND it is a transposed view. Raises InvalidInput.
    """
    require(layout in ("NHD", "HND"), f'layout: got {layout!r}, want "NHD" or "HND"')
    inner = (block_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, block_size)
    shape = (layers, 2, *inner, head_dim)
    block_bytes = math.prod(shape) * dtype.itemsize
    require(
        pool.dim() == 2 and pool.dtype == torch.uint8 and pool.shape[1] >= block_bytes,
        f"pool: got {tuple(pool.shape)} of {pool.dtype}, "
        f"want [slots, at least {block_bytes} bytes] of torch.uint8",
    )
    require(
        pool.stride(1) == 1 and pool.stride(0) % dtype.itemsize == 0,
        f"pool: got strides {pool.stride()}, "
        f"want slots of contiguous bytes, {dtype.itemsize} or a multiple of it apart",
    )
    blocks = pool[:, :block_bytes].view(dtype).view(len(pool), *shape)
    return blocks if layout == "NHD" else blocks.transpose(3, 4)
