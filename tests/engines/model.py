"""The models that the engines' tests run: a real one, and small ones with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.smollm2_folder import smollm2_folder

__all__ = ["smollm2_folder", "tiny_llama"]


def tiny_llama(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 512,
    context_tokens: int = 1024,
    dtype: str = "float32",
    **changes: Any,
) -> Path:
    """Write the ``config.json`` of a small Llama, without weights or tokenizer; returns the folder.

    vLLM runs it with ``load_format="dummy", skip_tokenizer_init=True`` and blocks of 32 tokens;
    transformers with ``AutoModelForCausalLM.from_config``. ``changes`` overwrite keys of the file.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * heads * head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
