"""A name for a model's weights: other weights, other name, whatever path they came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

SWITCHES = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
"""What a layer with adapters (of the package peft) has that changes its output."""

SAMPLES = 64
"""Elements of each tensor that ``probe`` looks at."""

IRRELEVANT = {"transformers_version", "dtype", "torch_dtype", "architectures"}
"""Of a configuration: what changes no key or value, or stands in the spec by itself."""


def fingerprint(model: Any) -> str:
    """32 hex digits of every byte of the weights and buffers, and of the configuration.

    Takes as long as reading them once (0.1 s for 0.5 GB in RAM).
    """
    facts = [_config_of(model), _switches(model)]
    digest = xxhash.xxh3_128(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def mark(model: Any) -> int:
    """A number that changes when weights are replaced, or changed in place by torch, or adapters
    are switched; quick.

    It does not see writes that go around torch's version counters (through ``.data``).
    """
    states = tuple((id(tensor), *_state(tensor)) for _, tensor in _tensors(model))
    return hash((states, str(_switches(model))))


def probe(model: Any) -> bytes:
    """16 bytes of a sample of every tensor: sees changes that ``mark`` does not."""
    digest = xxhash.xxh3_128()
    for _, tensor in _tensors(model):
        flat = tensor.detach().reshape(-1)
        digest.update(_bytes_of(flat[:: max(len(flat) // SAMPLES, 1)]))
    return digest.digest()


def _config_of(model: Any) -> dict[str, Any]:
    items = model.config.to_dict()
    kept = {name: value for name, value in items.items() if name not in IRRELEVANT}
    kept = {name: value for name, value in kept.items() if not name.startswith("_")}
    return {"class": type(model).__name__, **kept}


def _switches(model: nn.Module) -> list[list[str]]:
    return [[str(getattr(layer, name, None)) for name in SWITCHES] for layer in _adapted(model)]


def _adapted(model: nn.Module) -> Iterator[nn.Module]:
    """The layers with adapters. A whole model of transformers has a method of the same name."""
    for module in model.modules():
        if isinstance(getattr(module, SWITCHES[0], None), bool):
            yield module


def differ_by_row(model: nn.Module) -> bool:
    """Whether each row of a batch may have an adapter of its own (peft's ``adapter_names``, which
    hooks on the adapted layers hand over).
    """
    return any(module._forward_pre_hooks for module in _adapted(model))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
