"""What the CUDA kernel asks of a call beyond what every backend does."""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv_kernels.call import Call
from tierkv_kernels.cuda.variants import HEAD_DIMS_TAKEN
from tierkv_kernels.errors import InvalidInput
from tierkv_kernels.write_call import WriteCall

DTYPES = (torch.float16, torch.bfloat16)
ROW_BYTES = 16
"""Rows of head_dim elements begin at multiples of it: that much is copied at once."""


def can_run(call: Call) -> bool:
    """Whether ``check_limits`` finds nothing."""
    try:
        check_limits(call)
    except InvalidInput:
        return False
    return True


def check_limits(call: Call) -> None:
    """Raises InvalidInput, which names the argument."""
    _check_kind("q", call.q)
    _check_rows("q", call.q)
    _check_rows("k_cache", call.k_cache)
    _check_rows("v_cache", call.v_cache)
    _check_rows("out", call.out)
    if call.block_table.stride(-1) != 1 and call.block_table.shape[-1] > 1:
        raise InvalidInput(
            f"block_table: got strides {call.block_table.stride()}, "
            "the CUDA kernel wants a contiguous last dimension"
        )


def can_write(write: WriteCall) -> bool:
    """Whether ``check_write`` finds nothing."""
    try:
        check_write(write)
    except InvalidInput:
        return False
    return True


def check_write(write: WriteCall) -> None:
    """Raises InvalidInput, which names the argument."""
    _check_kind("k", write.k)
    for name in ("k", "v", "k_cache", "v_cache"):
        _check_rows(name, getattr(write, name))


def _check_kind(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise InvalidInput(f"{name}: got {tensor.dtype}, the CUDA kernel wants float16 or bfloat16")
    head_dim = tensor.shape[2]
    if head_dim not in HEAD_DIMS_TAKEN:
        raise InvalidInput(
            f"{name}: got head_dim {head_dim}, "
            f"the CUDA kernel wants one of {', '.join(map(str, HEAD_DIMS_TAKEN))}"
        )


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.data_ptr() % ROW_BYTES:
        raise InvalidInput(
            f"{name}: got address {tensor.data_ptr():#x}, "
            f"the CUDA kernel wants a multiple of {ROW_BYTES}"
        )
    size = tensor.element_size()
    for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if length > 1 and stride * size % ROW_BYTES:
            raise InvalidInput(
                f"{name}: got strides {tensor.stride()} of {size} bytes, "
                f"the CUDA kernel wants rows at multiples of {ROW_BYTES} bytes"
            )
