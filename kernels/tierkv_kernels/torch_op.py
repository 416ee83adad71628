"""Attention as an operator of torch, for models that go through torch.compile.

Importing this module registers it: afterwards it is ``torch.ops.tierkv.paged_attention``, too. It
costs some microseconds more per call than ``paged_attention``, and cannot take a plan, which is no
tensor: it makes one in each call, for which CUDA tensors wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tierkv_kernels.attention import paged_attention as run_attention


@torch.library.custom_op("tierkv::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """``tierkv_kernels.paged_attention`` with the fastest backend; arguments as there.

    Returns ``(out, lse)``: out [T, Hq, D] as q, contiguous; lse [T, Hq] float32, or [0] unless
    ``return_lse``. Writes to none of its arguments. Raises InvalidInput.
    """
    out, lse = run_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        q_indptr=q_indptr,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
    )
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


@paged_attention.register_fake
def _shapes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_indptr: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """What tracing needs: shapes and dtypes of the results."""
    lse_shape = q.shape[:2] if return_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)
