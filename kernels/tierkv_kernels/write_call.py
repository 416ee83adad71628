"""A write_kv call whose arguments are checked: what every backend takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tierkv_kernels.call import FP8, Q_DTYPES, check_last_dim
from tierkv_kernels.errors import InvalidInput, require


@dataclass(frozen=True, slots=True)
class WriteCall:
    """Shapes and dtypes as in ``write_kv``."""

    k: Tensor
    v: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: float
    v_scale: float


def check_write_call(write: WriteCall) -> None:
    """Raises InvalidInput."""
    k, k_cache = write.k, write.k_cache
    require(
        k.dim() == 3 and min(k.shape[1:]) > 0,
        f"k: got shape {tuple(k.shape)}, want [tokens, num_kv_heads, head_dim]",
    )
    require(k.dtype in Q_DTYPES, f"k: got {k.dtype}, want {', '.join(map(str, Q_DTYPES))}")
    heads, head_dim = k.shape[1:]
    require(
        k_cache.dim() == 4 and k_cache.shape[2:] == (heads, head_dim) and k_cache.shape[1] > 0,
        f"k_cache: got shape {tuple(k_cache.shape)}, "
        f"want [num_blocks, block_size, num_kv_heads={heads}, head_dim={head_dim}]",
    )
    require(
        k_cache.dtype in (k.dtype, FP8), f"k_cache: got {k_cache.dtype}, want {k.dtype} or {FP8}"
    )
    for name, tensor, like in (("v", write.v, k), ("v_cache", write.v_cache, k_cache)):
        require(
            tensor.shape == like.shape and tensor.dtype == like.dtype,
            f"{name}: got {tuple(tensor.shape)} of {tensor.dtype}, "
            f"want {tuple(like.shape)} of {like.dtype}",
        )
    require(
        write.slots.shape == k.shape[:1] and write.slots.dtype == torch.int64,
        f"slots: got {tuple(write.slots.shape)} of {write.slots.dtype}, "
        f"want ({len(k)},) of torch.int64",
    )
    for name in ("v", "slots", "k_cache", "v_cache"):
        device = getattr(write, name).device
        require(device == k.device, f"{name}: got device {device}, want k's, {k.device}")
    for name in ("k", "v", "k_cache", "v_cache"):
        check_last_dim(name, getattr(write, name))
    for name in ("k_scale", "v_scale"):
        scale = getattr(write, name)
        require(math.isfinite(scale) and scale, f"{name}: got {scale}, want a finite one, not 0")
    if k.device.type == "cpu" and len(k):
        room, last = k_cache.shape[0] * k_cache.shape[1], int(write.slots.max())
        if last >= room:
            raise InvalidInput(f"slots: got {last}, want below {room}, the tokens of the caches")
