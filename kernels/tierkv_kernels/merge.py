"""Merge attention over disjoint sets of keys: each state is an output and its log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierkv_kernels.errors import require


def merge_states(states: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of the states' keys.

    states: ``(out, lse)`` each, as from ``paged_attention(..., return_lse=True)``: out [T, Hq, D],
        lse [T, Hq] float32, natural log, -inf where the state saw no key.
    Returns the merged ``(out, lse)``, out in the states' dtype. Raises InvalidInput.
    """
    require(len(states) > 0, "states: got none, want at least one (out, lse)")
    first = states[0][0]
    for i, (out, lse) in enumerate(states):
        require(
            out.dim() == 3 and out.shape == first.shape and out.dtype == first.dtype,
            f"states[{i}]: got out {tuple(out.shape)} of {out.dtype}, "
            f"want [T, Hq, D] as in states[0], {tuple(first.shape)} of {first.dtype}",
        )
        require(
            lse.shape == out.shape[:2] and lse.dtype == torch.float32,
            f"states[{i}]: got lse {tuple(lse.shape)} of {lse.dtype}, "
            f"want {tuple(out.shape[:2])} of torch.float32",
        )
    num_tokens = first.shape[0]
    merged, merged_lse = merge_rows(
        torch.cat([out for out, _ in states]),
        torch.cat([lse for _, lse in states]),
        torch.arange(num_tokens, device=first.device).repeat(len(states)),
        num_tokens,
    )
    return merged.to(first.dtype), merged_lse


def merge_rows(out: Tensor, lse: Tensor, token: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Merge states row by row: row r belongs to ``token[r]``. Rows without any key count nothing.

    out: [R, Hq, D]. lse: [R, Hq] float32. token: [R] int64.
    Returns [num_tokens, Hq, D] and [num_tokens, Hq], both float32.
    """
    heads = lse.shape[1]
    largest = lse.new_full((num_tokens, heads), -torch.inf)
    largest.scatter_reduce_(0, token[:, None].expand(-1, heads), lse, "amax")
    largest.masked_fill_(largest == -torch.inf, 0.0)
    weight = (lse - largest[token]).exp_()
    total = lse.new_zeros(num_tokens, heads).index_add_(0, token, weight)
    merged = lse.new_zeros(num_tokens, *out.shape[1:])
    merged.index_add_(0, token, out.float().mul_(weight[:, :, None]))
    merged /= total.clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
    return merged, total.log_().add_(largest)
