"""A paged_attention call whose arguments are checked: what every backend takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierkv_kernels import planner
from tierkv_kernels.errors import InvalidInput
from tierkv_kernels.work import Plan

Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Shapes and dtypes as in ``paged_attention``.

    score_scale: what q . k is multiplied with before the soft cap: ``scale * k_scale``.
    out, lse: to be filled; lse is None if nobody wants it.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    plan: Plan
    score_scale: float
    softcap: float
    v_scale: float
    out: Tensor
    lse: Tensor | None


def check_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    q_indptr: Tensor | None,
    plan: Plan | None,
    scale: float | None,
    causal: bool,
    window: int,
    softcap: float,
    k_scale: float,
    v_scale: float,
    out: Tensor | None,
    return_lse: bool,
) -> Call:
    """Check a call, make the plan if there is none, and the outputs. Raises InvalidInput."""
    _check_tensors(q, k_cache, v_cache, block_table, seq_lens, q_indptr)
    head_dim = q.shape[2]
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    for name, value in (("scale", scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if not math.isfinite(value):
            raise InvalidInput(f"{name}: got {value}, want a finite number")
    if not 0.0 <= softcap < math.inf:
        raise InvalidInput(f"softcap: got {softcap}, want 0 (none) or more")
    if plan is None:
        plan = _default_plan(q, k_cache, seq_lens, q_indptr, causal, window)
    else:
        _check_plan(plan, q, k_cache, seq_lens, q_indptr, causal, window)
    block_size, max_blocks = k_cache.shape[1], block_table.shape[1]
    longest = int(plan.seq_lens.max(initial=0))
    if longest > max_blocks * block_size:
        raise InvalidInput(
            f"block_table: got {max_blocks} blocks of {block_size} tokens per sequence, "
            f"want at least {-(-longest // block_size)} for seq_lens up to {longest}"
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        _check_tensor("out", out, q.shape, q.dtype, q.device)
        check_last_dim("out", out)
    lse = None
    if return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return Call(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        plan=plan,
        score_scale=scale * k_scale,
        softcap=softcap,
        v_scale=v_scale,
        out=out,
        lse=lse,
    )


def check_table(table: npt.NDArray[np.int32], plan: Plan, num_blocks: int) -> None:
    """Check that the entries that the plan needs are blocks of the cache. Raises InvalidInput."""
    used_blocks = -(-plan.seq_lens // plan.block_size)
    used = np.arange(table.shape[1]) < used_blocks[:, None]
    bad = np.argwhere(used & ((table < 0) | (table >= num_blocks)))
    if len(bad):
        row, column = bad[0]
        raise InvalidInput(
            f"block_table: got {table[row, column]} at [{row}, {column}], "
            f"want a block of the cache, 0 to {num_blocks - 1}"
        )


def check_shared_prefixes(table: npt.NDArray[np.int32], plan: Plan) -> None:
    """Check that what the plan reads as a shared prefix is one. Raises InvalidInput."""
    for first, count, tokens in plan.shared_prefix:
        shared = table[first : first + count, : -(-tokens // plan.block_size)]
        if (shared != shared[0]).any():
            raise InvalidInput(
                f"block_table: got different blocks in the first {shared.shape[1]} of rows {first} "
                f"to {first + count - 1}, want the same, as the plan reads them as a shared prefix"
            )


def _check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor | None,
) -> None:
    if q.dim() != 3 or min(q.shape[1:]) == 0:
        raise InvalidInput(f"q: got shape {tuple(q.shape)}, want [tokens, num_q_heads, head_dim]")
    if q.dtype not in Q_DTYPES:
        raise InvalidInput(f"q: got {q.dtype}, want one of {_names(Q_DTYPES)}")
    num_q_heads, head_dim = q.shape[1:]
    if k_cache.dim() != 4 or k_cache.shape[3] != head_dim or min(k_cache.shape[1:]) == 0:
        raise InvalidInput(
            f"k_cache: got shape {tuple(k_cache.shape)}, "
            f"want [num_blocks, block_size, num_kv_heads, head_dim={head_dim}]"
        )
    if k_cache.dtype not in (q.dtype, FP8):
        raise InvalidInput(f"k_cache: got {k_cache.dtype}, want {_names((q.dtype, FP8))}")
    if num_q_heads % k_cache.shape[2]:
        raise InvalidInput(
            f"k_cache: got {k_cache.shape[2]} KV heads, want a divisor of q's {num_q_heads} heads"
        )
    _check_tensor("k_cache", k_cache, k_cache.shape, k_cache.dtype, q.device)
    _check_tensor("v_cache", v_cache, k_cache.shape, k_cache.dtype, q.device)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_last_dim(name, tensor)
    if seq_lens.dim() != 1:
        raise InvalidInput(f"seq_lens: got shape {tuple(seq_lens.shape)}, want [batch]")
    batch = seq_lens.shape[0]
    _check_tensor("seq_lens", seq_lens, (batch,), torch.int32, q.device)
    if block_table.dim() != 2:
        raise InvalidInput(
            f"block_table: got shape {tuple(block_table.shape)}, want [batch={batch}, max_blocks]"
        )
    table_shape = (batch, block_table.shape[1])
    _check_tensor("block_table", block_table, table_shape, torch.int32, q.device)
    if q_indptr is not None:
        _check_tensor("q_indptr", q_indptr, (batch + 1,), torch.int32, q.device)
    elif q.shape[0] != batch:
        raise InvalidInput(
            f"q: got {q.shape[0]} tokens, want {batch}, one per sequence (or pass q_indptr)"
        )


def _check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.shape != shape:
        raise InvalidInput(f"{name}: got shape {tuple(tensor.shape)}, want {tuple(shape)}")
    if tensor.dtype != dtype:
        raise InvalidInput(f"{name}: got {tensor.dtype}, want {dtype}")
    if tensor.device != device:
        raise InvalidInput(f"{name}: got device {tensor.device}, want q's, {device}")


def check_last_dim(name: str, tensor: Tensor) -> None:
    """Raises InvalidInput unless the last dimension is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidInput(
            f"{name}: got strides {tensor.stride()}, want a contiguous last dimension"
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def _default_plan(
    q: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor | None,
    causal: bool,
    window: int,
) -> Plan:
    q_lens = None
    if q_indptr is not None:
        bounds = q_indptr.cpu().numpy()
        q_lens = np.diff(bounds)
        if bounds[0] != 0 or bounds[-1] != q.shape[0] or (q_lens < 0).any():
            raise InvalidInput(
                f"q_indptr: got {bounds.tolist()}, want ascending from 0 to q's {q.shape[0]} tokens"
            )
    return planner.plan(
        seq_lens.cpu().numpy(),
        q_lens,
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        block_size=k_cache.shape[1],
        split=0,
        causal=causal,
        window=window,
    )


def _check_plan(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor | None,
    causal: bool,
    window: int,
) -> None:
    for name, planned, got in (
        ("q tokens", int(plan.q_indptr[-1]), q.shape[0]),
        ("num_q_heads", plan.num_q_heads, q.shape[1]),
        ("num_kv_heads", plan.num_kv_heads, k_cache.shape[2]),
        ("head_dim", plan.head_dim, q.shape[2]),
        ("block_size", plan.block_size, k_cache.shape[1]),
        ("sequences", len(plan.seq_lens), seq_lens.shape[0]),
        ("causal", plan.causal, causal),
        ("window", plan.window, window),
    ):
        if planned != got:
            raise InvalidInput(f"plan: made for {name}={planned}, the call has {got}")
    if seq_lens.device.type != "cpu":
        return  # comparing values would wait for the device
    if not np.array_equal(seq_lens.numpy(), plan.seq_lens):
        raise InvalidInput(
            f"plan: made for seq_lens={plan.seq_lens.tolist()}, the call has {seq_lens.tolist()}"
        )
    wanted = np.arange(len(plan.seq_lens) + 1) if q_indptr is None else q_indptr.numpy()
    if not np.array_equal(wanted, plan.q_indptr):
        raise InvalidInput(
            f"plan: made for q_indptr={plan.q_indptr.tolist()}, the call has {wanted.tolist()}"
        )
