"""Which models tierkv can serve, and what a block of theirs is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from tierkv.core.spec import KVSpec
from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers.attention import NAMES

LAYER_TYPES = {"full_attention", "sliding_attention"}
MOVING_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that change with the length of the whole: a prefix has no KV of its own."""

REFUSED = {
    "kv_lora_rank": "latent attention (MLA), whose cache has no keys and values of heads",
    "num_kv_shared_layers": "layers that use other layers' keys and values",
    "attention_chunk_size": "attention in chunks",
    "use_bidirectional_attention": "attention that looks ahead",
    "alibi": "ALiBi",
}
"""Configuration items that, where they are set, mean something the pool or the kernels lack."""


def check_model(model: Any) -> None:
    """Raise InvalidArgument, with the reason, if tierkv cannot serve this model."""
    reason = next(_reasons(model), None)
    if reason is not None:
        raise InvalidArgument(f"{type(model).__name__} cannot be attached: {reason}")


def spec_of(
    model: Any, fingerprint: str, *, block_tokens: int, salt: str = "", tenant: str = ""
) -> KVSpec:
    """The namespace of a model's blocks: its shape, its dtype and its very weights."""
    config = model.config
    return KVSpec(
        model=f"transformers/{type(model).__name__}",
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        fingerprint=fingerprint,
        vocab_size=config.vocab_size,
        salt=salt,
        tenant=tenant,
    )


def cache_argument(parameters: Any) -> str:
    """What a model's ``forward`` calls its cache: transformers renamed it in 5.20 to 5.24."""
    return "cache" if "cache" in parameters else "past_key_values"


def _reasons(model: Any) -> Iterator[str]:
    config = model.config
    if not getattr(model, "can_generate", lambda: False)() or config.is_encoder_decoder:
        yield "tierkv serves decoder-only models with a language head"
    if config.get_text_config() is not config:
        yield "it takes more than text: what the tokens stand for does not follow from their ids"
    if config._attn_implementation not in (*NAMES, *NAMES.values()):
        yield (
            f'its attention is "{config._attn_implementation}"; load it with '
            'attn_implementation="sdpa" or "eager"'
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "it takes no position_ids"
    for item, meaning in REFUSED.items():
        if getattr(config, item, None):
            yield f"it has {meaning} ({item})"
    for kind in set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        yield f"it has layers of {kind}; tierkv knows {' and '.join(sorted(LAYER_TYPES))}"
    for rope in set(_rope_types(getattr(config, "rope_parameters", None))) & MOVING_ROPE:
        yield f"its {rope} rotary embedding makes a prefix depend on what follows it"
    devices = {tensor.device for tensor in model.parameters()}
    if len(devices) != 1:
        yield f"it lies on several devices: {', '.join(map(str, devices))}"
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        yield f"its dtype is {model.dtype}; tierkv holds float32, float16 and bfloat16"


def _rope_types(parameters: Any) -> Iterator[str]:
    """All rope types of a configuration, which may have one for each type of layer."""
    if isinstance(parameters, dict):
        yield from (str(parameters[key]) for key in ("rope_type", "type") if key in parameters)
        for value in parameters.values():
            yield from _rope_types(value)
