"""Whether a model computes on the pool what it computes by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers.cache import TierKVCache

COLUMNS = 40
PADDING = 5
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_16_BIT = 6e-2
"""Largest difference of logits, as a share of the largest logit."""


@torch.no_grad()
def check_attention(model: Any, cache: TierKVCache, cache_name: str) -> None:
    """Compare logits of two rows, one of them padded, in a prefill and two steps after it.

    ``cache`` is empty, and is ended. Raises InvalidArgument when they differ: then the model does
    something with its cache or its attention that tierkv does not know of.
    """
    training = model.training
    model.eval()
    try:
        apart, largest = _compare(model, cache, cache_name)
    finally:
        model.train(training)
        cache.end()
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE_16_BIT)
    if not apart <= tolerance * largest:
        raise InvalidArgument(
            f"{type(model).__name__} cannot be attached: on tierkv its logits are {apart:.3g} off, "
            f"of {largest:.3g}; it does something that tierkv does not know of"
        )


def _compare(model: Any, cache: TierKVCache, cache_name: str) -> tuple[float, float]:
    """The largest difference, and the largest logit."""
    ids = torch.arange(2 * COLUMNS).view(2, COLUMNS) * 7919 % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    pieces: list[Tensor] = []
    for begin, end in ((0, COLUMNS - 3), (COLUMNS - 3, COLUMNS - 2), (COLUMNS - 2, COLUMNS)):
        output = model(
            input_ids=ids[:, begin:end], attention_mask=mask[:, :end], **{cache_name: cache}
        )
        pieces.append(output.logits)
    right = plain[mask.bool()]
    return (
        float((torch.cat(pieces, 1)[mask.bool()] - right).abs().max()),
        float(right.abs().max()),
    )
