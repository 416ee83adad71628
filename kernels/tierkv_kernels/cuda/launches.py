"""The launches of a plan: its records on the device, room for partial states, and parameters.

They are made once per plan and used for each layer, so that a call fills in addresses and
strides and no more.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierkv_kernels.call import FP8, Call
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.driver import Arguments, arguments_of
from tierkv_kernels.cuda.geometry import THREADS, Geometry, row_warps
from tierkv_kernels.cuda.limits import ROW_BYTES, check_limits
from tierkv_kernels.cuda.params import AttentionParams, MergeParams
from tierkv_kernels.cuda.variants import Variant
from tierkv_kernels.errors import require
from tierkv_kernels.work import Plan

GRID_MAX = 2**31 - 1

_Addresses = tuple[int, int, int, int, int, int]
"""Of q, k_cache, v_cache, block_table, out and lse, which is 0 if nobody wants it."""


class Kernel(Protocol):
    """A loaded kernel, such as ``driver.Function``."""

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Arguments,
    ) -> None:
        """As ``driver.Function.launch``."""


class Loader(Protocol):
    """What loads kernels, such as ``device.KernelDevice``."""

    def function(self, variant: Variant, shared_bytes: int = 0) -> Kernel:
        """As ``device.KernelDevice.function``."""


class PlanLaunches:
    """All launches of a plan for tensors of the call's dtypes, device and stream.

    What it keeps may be used on that stream alone.
    """

    def __init__(self, call: Call, device: Loader) -> None:
        """Compiles and loads what is missing. Raises InvalidInput, CompileError, DriverError."""
        check_limits(call)
        self._form: tuple[object, ...] | None = None
        plan, q = call.plan, call.q
        partial_shape = (plan.num_partials, *q.shape[1:])
        self._partial_out = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
        self._partial_lse = self._partial_out.new_empty(partial_shape[:2])
        self._attention = [
            _AttentionLaunch(call, device, warps, records, self._partial_out, self._partial_lse)
            for warps, records in _by_row_warps(plan)
        ]
        self._merge = None
        if plan.num_partials:
            self._merge = _MergeLaunch(call, device, self._partial_out, self._partial_lse)

    def run(self, call: Call, stream: int) -> None:
        """stream: the handle. The context must be current.

        Raises InvalidInput before any launch, DriverError.
        """
        form = _form(call)
        q, k_cache, v_cache = call.q.data_ptr(), call.k_cache.data_ptr(), call.v_cache.data_ptr()
        out = call.out.data_ptr()
        lse = 0 if call.lse is None else call.lse.data_ptr()
        addresses = (q, k_cache, v_cache, call.block_table.data_ptr(), out, lse)
        if form != self._form or (q | k_cache | v_cache | out) % ROW_BYTES:
            check_limits(call)
            self._set_form(call)
            self._form = form
        for launch in self._attention:
            launch.run(addresses, stream)
        if self._merge:
            self._merge.run(out, lse, stream)

    def _set_form(self, call: Call) -> None:
        for launch in self._attention:
            launch.set_form(call)
        if self._merge:
            self._merge.set_form(call)


def _form(call: Call) -> tuple[object, ...]:
    """What is most often the same from layer to layer, and is checked and set when it is not."""
    return (
        call.q.stride(),
        len(call.k_cache),
        call.k_cache.stride(),
        call.v_cache.stride(),
        call.block_table.stride(),
        call.out.stride(),
        call.score_scale,
        call.softcap,
        call.v_scale,
    )


def _by_row_warps(plan: Plan) -> list[tuple[int, npt.NDArray[np.void]]]:
    """The records for each kind of kernel; padding is left out."""
    records = plan.records[plan.records["n_tok"] > 0]
    rows = records["n_tok"].astype(np.int64) * (plan.num_q_heads // plan.num_kv_heads)
    warps = np.array([row_warps(count, plan.head_dim) for count in rows.tolist()], np.int64)
    return [(int(kind), records[warps == kind]) for kind in np.unique(warps)]


def _on_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array.view(np.int32).copy()).to(device)


class _AttentionLaunch:
    def __init__(
        self,
        call: Call,
        device: Loader,
        warps: int,
        records: npt.NDArray[np.void],
        partial_out: Tensor,
        partial_lse: Tensor,
    ) -> None:
        plan = call.plan
        geometry = Geometry(plan.head_dim, call.k_cache.element_size(), warps)
        group = plan.num_q_heads // plan.num_kv_heads
        row_tiles = -(-int(records["n_tok"].max()) * group // geometry.rows)
        blocks = len(records) * plan.num_kv_heads * row_tiles
        require(blocks <= GRID_MAX, f"plan: got {blocks} pieces of work, want at most {GRID_MAX}")
        self._records = _on_device(records, call.q.device)
        self._grid = (blocks, 1, 1)
        self._shared_bytes = geometry.shared_bytes
        self._function = device.function(
            variants.attention(
                bf16=call.q.dtype == torch.bfloat16,
                kv_fp8=call.k_cache.dtype == FP8,
                head_dim=plan.head_dim,
                row_warps=warps,
            ),
            geometry.shared_bytes,
        )
        self._params = AttentionParams(
            records=self._records.data_ptr(),
            partial_out=partial_out.data_ptr(),
            partial_lse=partial_lse.data_ptr(),
            num_records=len(records),
            num_q_heads=plan.num_q_heads,
            num_kv_heads=plan.num_kv_heads,
            block_size=plan.block_size,
            row_tiles=row_tiles,
            causal=plan.causal,
            window=plan.window,
        )
        self._arguments = arguments_of(self._params)

    def set_form(self, call: Call) -> None:
        params = self._params
        params.q_token_stride, params.q_head_stride, _ = call.q.stride()
        params.k_block_stride, params.k_token_stride, params.k_head_stride, _ = (
            call.k_cache.stride()
        )
        params.v_block_stride, params.v_token_stride, params.v_head_stride, _ = (
            call.v_cache.stride()
        )
        params.table_row_stride = call.block_table.stride(0)
        params.out_token_stride, params.out_head_stride, _ = call.out.stride()
        params.score_scale = call.score_scale
        params.softcap = call.softcap
        params.v_scale = call.v_scale

    def run(self, addresses: _Addresses, stream: int) -> None:
        params = self._params
        params.q, params.k_cache, params.v_cache, params.block_table, params.out, params.lse = (
            addresses
        )
        self._function.launch(self._grid, THREADS, self._shared_bytes, stream, self._arguments)


class _MergeLaunch:
    def __init__(
        self, call: Call, device: Loader, partial_out: Tensor, partial_lse: Tensor
    ) -> None:
        plan = call.plan
        arrays = (plan.merge_tokens, plan.merge_indptr, plan.merge_rows)
        self._lists = [_on_device(array, call.q.device) for array in arrays]
        tokens, indptr, rows = (tensor.data_ptr() for tensor in self._lists)
        self._grid = (len(plan.merge_tokens) * plan.num_q_heads, 1, 1)
        self._function = device.function(
            variants.merge(bf16=call.q.dtype == torch.bfloat16, head_dim=plan.head_dim)
        )
        self._params = MergeParams(
            partial_out=partial_out.data_ptr(),
            partial_lse=partial_lse.data_ptr(),
            merge_tokens=tokens,
            merge_indptr=indptr,
            merge_rows=rows,
            num_tokens=len(plan.merge_tokens),
            num_q_heads=plan.num_q_heads,
        )
        self._arguments = arguments_of(self._params)

    def set_form(self, call: Call) -> None:
        self._params.out_token_stride, self._params.out_head_stride, _ = call.out.stride()

    def run(self, out: int, lse: int, stream: int) -> None:
        self._params.out, self._params.lse = out, lse
        self._function.launch(self._grid, THREADS, 0, stream, self._arguments)
