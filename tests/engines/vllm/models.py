"""Test support: tiny models with weights that make every cached value matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.engines.model import tiny_llama

SPREAD = 0.2
"""Standard deviation of the weights: so large that the next token depends on the whole context."""

CONTEXT_TOKENS = 2048
VOCAB = 512


def llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A Llama of two layers, made from a seed; replaces what ``folder`` holds and returns it."""
    tiny_llama(folder, context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB)
    return _fill(folder, seed, changes)


def gemma(folder: Path, *, window: int, seeing_all: int = 1, seed: int = 0) -> Path:
    """A Gemma 3 of four layers; the last ``seeing_all`` see everything, the others a window."""
    tiny_llama(folder, layers=4, context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB)
    sees = ["sliding_attention"] * (4 - seeing_all) + ["full_attention"] * seeing_all
    changes = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": window,
        "layer_types": sees,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            name: {"rope_theta": 10_000.0, "rope_type": "default"} for name in set(sees)
        },
    }
    return _fill(folder, seed, changes)


def lora(folder: Path, *, seed: int, rank: int = 8) -> Path:
    """An adapter for ``llama`` that changes keys and values; returns its folder."""
    shapes = _shapes(json.loads((tiny_llama(folder)).joinpath("config.json").read_text()))
    (folder / "config.json").unlink()
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        if "k_proj" in name or "v_proj" in name:
            at = "base_model.model." + name.removesuffix(".weight")
            weights[f"{at}.lora_A.weight"] = _normal(random, (rank, shape[1]))
            weights[f"{at}.lora_B.weight"] = _normal(random, (shape[0], rank))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _fill(folder: Path, seed: int, changes: dict[str, Any]) -> Path:
    """Change the folder's configuration and give it weights."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    weights = {
        name: _normal(random, shape) if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in _shapes(config).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.normal(0, SPREAD, shape).astype(np.float32)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The model's weights; those with one dimension are norms."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if config["model_type"] == "gemma3_text":
        layer |= {
            "self_attn.q_norm": (config["head_dim"],),
            "self_attn.k_norm": (config["head_dim"],),
            "pre_feedforward_layernorm": (hidden,),
            "post_feedforward_layernorm": (hidden,),
        }
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes
