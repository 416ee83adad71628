"""New tokens' keys and values into the caches that paged_attention reads."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tierkv_kernels.backends import cuda_backend_if_there
from tierkv_kernels.call import FP8
from tierkv_kernels.cuda import limits as cuda
from tierkv_kernels.cuda.backend import cuda_backend
from tierkv_kernels.errors import require
from tierkv_kernels.write_call import WriteCall, check_write_call

FP8_MAX = 448.0


def write_kv(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Literal["auto", "torch", "cuda"] = "auto",
) -> None:
    """Store the keys and values of T tokens, rounded to the caches' dtype.

    k, v: [T, Hkv, D] float16, bfloat16 or float32, last dimension contiguous.
    slots: [T] int64, where each goes: block * block_size + token in the block; negative: nowhere.
        No two tokens go to the same place.
    k_cache, v_cache: as in ``paged_attention``, in k's dtype or float8_e4m3fn.
    k_scale, v_scale: what is stored is the value divided by it; float8 saturates at 448.
    backend: "torch", "cuda", or "auto": "cuda" on CUDA tensors that it takes, else "torch".

    Raises InvalidInput, before anything is stored, BackendUnavailable, CompileError, DriverError.
    """
    require(
        backend in ("auto", "torch", "cuda"),
        f'backend: got {backend!r}, want "auto", "torch" or "cuda"',
    )
    write = WriteCall(k, v, slots, k_cache, v_cache, k_scale, v_scale)
    check_write_call(write)
    if not len(k):
        return
    kernel = None
    if backend == "cuda":
        kernel = cuda_backend()
    elif backend == "auto" and k.is_cuda and cuda.can_write(write):
        kernel = cuda_backend_if_there(k.device)
    if kernel is not None:
        kernel.write(write)
    else:
        with torch.no_grad():
            _store(k, slots, k_cache, k_scale)
            _store(v, slots, v_cache, v_scale)


def _store(values: Tensor, slots: Tensor, cache: Tensor, scale: float) -> None:
    wanted = slots >= 0
    if not bool(wanted.all()):
        values, slots = values[wanted], slots[wanted]
    if scale != 1.0:
        values = values.float() / scale
    if cache.dtype == FP8:
        # torch makes NaN of what is too large, and scatters bytes, but no float8, on the CPU.
        values = values.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        cache = cache.view(torch.uint8)
    block_size = cache.shape[1]
    at = (torch.div(slots, block_size, rounding_mode="floor"), slots % block_size)
    cache.index_put_(at, values.to(cache.dtype))
