"""Paged attention: the one entry point, over all backends."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tierkv_kernels import reference
from tierkv_kernels.backends import cpu_kernel_if_there, cuda_backend_if_there
from tierkv_kernels.call import Call, check_call
from tierkv_kernels.cpu import Kernel, default_kernel
from tierkv_kernels.cpu import kernel as cpu
from tierkv_kernels.cuda import limits as cuda
from tierkv_kernels.cuda.backend import CudaBackend, cuda_backend
from tierkv_kernels.errors import BackendUnavailable, require
from tierkv_kernels.work import Plan

Backend = Literal["auto", "torch", "cuda", "cpu"]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    q_indptr: Tensor | None = None,
    plan: Plan | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention of a ragged batch of queries over K and V kept in blocks. Inference only.

    T = query tokens of all sequences, B = sequences, Hq and Hkv = heads (Hq a multiple of Hkv),
    D = head_dim. Query ``i`` of a sequence sits at position ``seq_len - q_len + i``.

    q: [T, Hq, D] float16, bfloat16 or float32, last dimension contiguous.
    k_cache, v_cache: [num_blocks, block_size, Hkv, D] in q's dtype or float8_e4m3fn; any strides
        with the last dimension contiguous. A layer of a block-major pool is ``pool[:, l, 0]``,
        heads before tokens (HND) is ``cache.transpose(1, 2)``.
    block_table: [B, max_blocks] int32. Entries past a sequence's length are never read.
    seq_lens: [B] int32, tokens in the cache, the queries' own included.
    q_indptr: [B + 1] int32, where each sequence's queries begin in q; None: one query each.
    plan: from ``plan()``, for the same lengths, heads, ``causal`` and ``window``; None: made here,
        unsplit. One plan serves all layers of a step.
    scale: what q . k is multiplied with; None: 1 / sqrt(D).
    causal: a query sees keys up to its own position. window: ``w`` >= 0: none before ``pos - w``.
    softcap: ``c`` > 0: a score s becomes ``c * tanh(s / c)``.
    k_scale, v_scale: what the stored K and V are multiplied with.
    out: [T, Hq, D] like q, to be overwritten; None: a new tensor.
    backend: "torch", "cuda", "cpu", or "auto" for the fastest that can run here, on CUDA tensors
        "cuda", on CPU tensors "cpu", where it takes their dtypes and shapes; else "torch".

    Returns ``(out, lse)``. lse is None unless ``return_lse``, then [T, Hq] float32: the natural log
    of the sum of exp(score). A query that sees no key gets out 0 and lse -inf.

    Raises InvalidInput, BackendUnavailable; of "cuda" also CompileError, DriverError.
    """
    require(
        backend in ("auto", "torch", "cuda", "cpu"),
        f'backend: got {backend!r}, want "auto", "torch", "cuda" or "cpu"',
    )
    if backend == "cpu" and q.device.type != "cpu":
        raise BackendUnavailable(f'backend: "cpu" takes CPU tensors, got q on {q.device}')
    call = check_call(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        q_indptr=q_indptr,
        plan=plan,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        return_lse=return_lse,
    )
    kernel = _kernel(call, backend)
    with torch.no_grad():
        if kernel is not None:
            kernel.run(call)
        else:
            reference.run(call)
    return call.out, call.lse


def _kernel(call: Call, backend: Backend) -> CudaBackend | Kernel | None:
    """What this call is for; None: torch. Raises BackendUnavailable."""
    if backend == "cuda":
        return cuda_backend()
    if backend == "cpu":
        return default_kernel()
    if backend == "auto" and call.q.is_cuda and cuda.can_run(call):
        return cuda_backend_if_there(call.q.device)
    if backend == "auto" and call.q.device.type == "cpu" and cpu.can_run(call):
        return cpu_kernel_if_there()
    return None
