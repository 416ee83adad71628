"""The launch that stores new keys and values in the caches."""

from __future__ import annotations

import torch

from tierkv_kernels.call import FP8
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.driver import arguments_of
from tierkv_kernels.cuda.geometry import THREADS
from tierkv_kernels.cuda.launches import Loader
from tierkv_kernels.cuda.limits import check_write
from tierkv_kernels.cuda.params import WriteParams
from tierkv_kernels.write_call import WriteCall


def launch_write(write: WriteCall, device: Loader, stream: int) -> None:
    """stream: the handle. The context must be current. Raises InvalidInput, DriverError."""
    check_write(write)
    k, v, k_cache, v_cache = write.k, write.v, write.k_cache, write.v_cache
    function = device.function(
        variants.write_kv(
            bf16=k.dtype == torch.bfloat16,
            kv_fp8=k_cache.dtype == FP8,
            head_dim=k.shape[2],
        )
    )
    slots = write.slots.contiguous()
    params = WriteParams(
        k=k.data_ptr(),
        v=v.data_ptr(),
        slots=slots.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        k_token_stride=k.stride(0),
        k_head_stride=k.stride(1),
        v_token_stride=v.stride(0),
        v_head_stride=v.stride(1),
        k_cache_block_stride=k_cache.stride(0),
        k_cache_token_stride=k_cache.stride(1),
        k_cache_head_stride=k_cache.stride(2),
        v_cache_block_stride=v_cache.stride(0),
        v_cache_token_stride=v_cache.stride(1),
        v_cache_head_stride=v_cache.stride(2),
        num_tokens=len(k),
        num_kv_heads=k.shape[1],
        block_size=k_cache.shape[1],
        k_inverse_scale=1 / write.k_scale,
        v_inverse_scale=1 / write.v_scale,
    )
    function.launch((len(k), 1, 1), THREADS, 0, stream, arguments_of(params))
