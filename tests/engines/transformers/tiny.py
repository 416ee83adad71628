"""Small models with random weights, of every kind that is served and of some that are not."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = 24
HYBRID = ["sliding_attention", "full_attention"] * 2
GPT2 = {"vocab_size": 300, "n_embd": 64, "n_layer": 3, "n_head": 4}
NEOX = {name: SHAPE[name] for name in SHAPE if name not in ("num_key_value_heads", "head_dim")}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SHAPE),
    "Qwen3": ("Qwen3Config", SHAPE),
    "Mistral, sliding window": ("MistralConfig", {**SHAPE, "sliding_window": WINDOW}),
    "Gemma 2, soft cap": ("Gemma2Config", {**SHAPE, "sliding_window": WINDOW}),
    "Gemma 3, hybrid": (
        "Gemma3TextConfig",
        {**SHAPE, "sliding_window": WINDOW, "layer_types": HYBRID},
    ),
    "Mixtral": ("MixtralConfig", SHAPE),
    "GPT-2, learned positions": ("GPT2Config", {**GPT2, "eos_token_id": None, "bos_token_id": 1}),
    "Phi-3": ("Phi3Config", SHAPE),
    "Qwen2": ("Qwen2Config", SHAPE),
    "Granite": ("GraniteConfig", SHAPE),
    "OLMo 2": ("Olmo2Config", SHAPE),
    "SmolLM3": ("SmolLM3Config", SHAPE),
    "Cohere": ("CohereConfig", SHAPE),
    "GPT-NeoX": ("GPTNeoXConfig", NEOX),
    "OPT": ("OPTConfig", {**NEOX, "ffn_dim": 96, "word_embed_proj_dim": 64}),
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "latent attention": (
        "DeepseekV3Config",
        {
            "vocab_size": 300,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
        },
        "latent attention",
    ),
    "linear attention": ("Qwen3NextConfig", SHAPE, "layers of linear_attention"),
    "chunks": ("Llama4TextConfig", {**SHAPE, "intermediate_size_mlp": 64}, "chunks"),
    "sinks": ("GptOssConfig", {**SHAPE, "num_local_experts": 4}, "s_aux"),
    "heads that are merged": (
        "FalconConfig",
        {**GPT2, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        "not one that",
    ),
    "ALiBi": ("BloomConfig", {"vocab_size": 300, "hidden_size": 64, "n_head": 4}, "position"),
    "window in a mask only": (
        "PhimoeConfig",
        {**SHAPE, "num_local_experts": 4, "sliding_window": 60},
        "sliding window by a mask",
    ),
    "windows of layers in a mask only": (
        "Qwen2MoeConfig",
        {
            **SHAPE,
            "sliding_window": 60,
            "use_sliding_window": True,
            "layer_types": HYBRID,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "sliding window by a mask",
    ),
    "moving rope": (
        "LlamaConfig",
        {
            **SHAPE,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        "depend on what follows",
    ),
}


def build(config: str, items: dict[str, Any], seed: int = 0, attention: str | None = None) -> Any:
    """A model of this configuration, the same for the same ``seed``."""
    torch.manual_seed(seed)
    kind = getattr(transformers, config)(**items)
    options = {} if attention is None else {"attn_implementation": attention}
    return transformers.AutoModelForCausalLM.from_config(kind, **options).eval()


def llama(seed: int = 0, **changes: Any) -> Any:
    """A small Llama."""
    return build("LlamaConfig", {**SHAPE, **changes}, seed)


def prompt(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Random ids [rows, length], the same for the same ``seed``; none is padding."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (rows, length), generator=chance)


def ragged(length: int, padding: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Rows of ``length`` columns, each with so many of them padding on the left."""
    ids = prompt(length, len(padding), seed)
    mask = torch.ones_like(ids)
    for row, columns in enumerate(padding):
        mask[row, :columns] = ids[row, :columns] = 0
    return {"input_ids": ids, "attention_mask": mask}
