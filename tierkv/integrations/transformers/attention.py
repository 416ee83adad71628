"""The attention function that transformers calls by name: on the pool, or as ever."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers.step import current, eagerly

NAMES = {"sdpa": "tierkv", "eager": "tierkv_eager"}
"""By the attention that a model had before: what it still computes without a tierkv cache."""

UNKNOWN = ("s_aux", "position_bias")
"""What changes scores in a way that the kernels do not know: attention sinks, learned biases."""


def register() -> None:
    """Make the names known to transformers. Calling it again changes nothing."""
    for plain, name in NAMES.items():
        attend, mask = (_attend, _mask) if plain == "sdpa" else (_attend_eager, _mask_eager)
        AttentionInterface.register(name, eagerly(attend))
        AttentionMaskInterface.register(name, eagerly(mask))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if current.get() is None:
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return found
    return _attend_paged(module, query, options)


def _attend_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if current.get() is None:
        # Each model's file has its own, which it calls when the name is "eager".
        eager = sys.modules[type(module).__module__].eager_attention_forward
        found: tuple[Tensor, Tensor | None] = eager(
            module, query, key, value, attention_mask, **options
        )
        return found
    return _attend_paged(module, query, options)


def _attend_paged(module: Any, query: Tensor, options: dict[str, Any]) -> tuple[Tensor, None]:
    """``cache.update`` has just written this layer's keys and values into the pool."""
    step = current.get()
    window = options.get("sliding_window")
    unknown = [name for name in UNKNOWN if options.get(name) is not None]
    if step is None or unknown or not getattr(module, "is_causal", True) or options.get("dropout"):
        reason = ", ".join(unknown) or "dropout or attention that is not causal"
        raise InvalidArgument(f"{type(module).__name__} asks for {reason}: tierkv computes none")
    if "sliding_window" not in options and _has_window(module):
        raise InvalidArgument(
            f"{type(module).__name__} tells of its sliding window by a mask only, at which tierkv "
            "does not look"
        )
    out = step.attend(query, options.get("scaling"), window, options.get("softcap"))
    return out, None


def _has_window(module: Any) -> bool:
    """Whether a layer's configuration gives it a sliding window."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    slides = not kinds or kinds[module.layer_idx] == "sliding_attention"
    return slides and bool(getattr(config, "sliding_window", None))


def _mask(*shape: Any, **options: Any) -> Tensor | None:
    """No mask for what the kernels compute from lengths alone."""
    return None if current.get() is not None else sdpa_mask(*shape, **options)


def _mask_eager(*shape: Any, **options: Any) -> Tensor | None:
    return None if current.get() is not None else eager_mask(*shape, **options)
