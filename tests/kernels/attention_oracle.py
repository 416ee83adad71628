"""What attention is, from its definition, over the keys and values of one sequence in order."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_pairs(num_queries: int, num_keys: int, causal: bool, window: int) -> Tensor:
    """[num_queries, num_keys] bool: which key each query sees."""
    position = (num_keys - num_queries + torch.arange(num_queries))[:, None]
    key = torch.arange(num_keys)[None, :]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if causal:
        visible &= key <= position
    if window >= 0:
        visible &= key >= position - window
    return visible


def attention_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D]; k, v [N, Hkv, D]. Returns out [T, Hq, D] and lse [T, Hq], float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,nhd->thn", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_pairs(q.shape[0], k.shape[0], causal, window)[:, None, :]
    weights = torch.where(visible, scores.exp(), 0.0)
    total = weights.sum(dim=-1)
    out = torch.einsum("thn,nhd->thd", weights, v) / torch.where(total > 0, total, 1.0)[..., None]
    return out, total.log()


def attention_same_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """The same in q's dtype, each step rounded: how wrong plain dense torch is."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_pairs(q.shape[0], k.shape[1], causal, window)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    weights = weights.masked_fill(~visible.any(dim=-1)[:, None], 0.0)
    return (weights @ v).transpose(0, 1)
