"""A small Llama whose attention asks somebody else for keys and values.

The model owns weights and arithmetic; the KV cache is the ``kv`` object that ``forward`` is given.
That is all an engine needs to keep its KV in tierkv: hand over K and V of every layer as they are
computed, and get attention over everything written so far.

Source of the architecture: RMSNorm (arXiv 1910.07467), rotary positions (arXiv 2104.09864),
grouped queries (arXiv 2305.13245) and SwiGLU (arXiv 2002.05202), put together as in Llama.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from tierkv.core.spec import KVSpec


class KVCache(Protocol):
    """Where the model's keys and values live. All tensors are float32, keys after rotation."""

    def write(self, layer: int, first_token: int, k: Tensor, v: Tensor) -> None:
        """Store ``k`` and ``v`` ([n, kv_heads, head_dim]) of tokens ``first_token`` and on."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of the last n tokens written; q and result: [n, q_heads, head_dim]."""


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that describe a Llama; ``feed_forward`` is the width between gate and down."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocab_size: int
    context_tokens: int = 8192
    end_token: int = 2
    rope_theta: float = 100_000.0
    norm_epsilon: float = 1e-5


class LayerWeights(NamedTuple):
    """One layer, float32. Matrices are [out, in]; those that share an input are stacked."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(q_heads + 2 * kv_heads) * head_dim, hidden]
    attention_out: Tensor  # [hidden, q_heads * head_dim]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * feed_forward, hidden]
    down: Tensor  # [hidden, feed_forward]


class Llama:
    """Weights plus one forward pass. The embedding ([vocab_size, hidden]) is also the output."""

    def __init__(
        self,
        config: LlamaConfig,
        token_embedding: Tensor,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        fingerprint: str,
    ) -> None:
        self.config = config
        self.token_embedding = token_embedding
        self.layers = layers
        self.final_norm = final_norm
        self.fingerprint = fingerprint
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = config.rope_theta**-exponents

    def spec(self, block_tokens: int = 16, fingerprint: str | None = None) -> KVSpec:
        """What one block of this model's KV is. The fingerprint names the weights themselves."""
        return KVSpec(
            model=self.config.name,
            layers=self.config.layers,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype="float32",
            block_tokens=block_tokens,
            vocab_size=self.config.vocab_size,
            fingerprint=self.fingerprint if fingerprint is None else fingerprint,
        )

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], start: int, kv: KVCache) -> Tensor:
        """Run tokens ``start`` .. ``start + len(token_ids) - 1`` of a sequence.

        Returns the logits of the last token only, [vocab_size]: those of a whole prompt would
        take more time and memory than the rest of the pass.
        """
        config = self.config
        heads = config.q_heads + 2 * config.kv_heads
        cos, sin = self._rotation(start, len(token_ids))
        x = embedding(torch.tensor(token_ids), self.token_embedding)
        for index, layer in enumerate(self.layers):
            qkv = linear(self._norm(x, layer.attention_norm), layer.qkv)
            qk, v = qkv.view(-1, heads, config.head_dim).tensor_split([-config.kv_heads], dim=1)
            q, k = rotate(qk, cos, sin).tensor_split([config.q_heads], dim=1)
            kv.write(index, start, k, v)
            x = x + linear(kv.attend(index, q).flatten(1), layer.attention_out)
            gate_up = linear(self._norm(x, layer.mlp_norm), layer.gate_up)
            gate, up = gate_up.chunk(2, dim=1)
            x = x + linear(silu(gate).mul_(up), layer.down)
        return linear(self._norm(x[-1], self.final_norm), self.token_embedding)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.norm_epsilon)

    def _rotation(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles, each [count, 1, head_dim / 2]."""
        positions = torch.arange(start, start + count, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies).unsqueeze(1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of ``x`` [n, heads, head_dim] by their angles."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def random_llama(config: LlamaConfig, seed: int) -> Llama:
    """A model of the given shape with random weights: its text is noise, but always the same.

    The layers' scale (one over the square root of the input width) lets them outweigh the
    embedding, so that the next token depends on the whole context and not only on the last token.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    def layer_matrix(rows: int, columns: int) -> Tensor:
        return matrix(rows, columns, columns**-0.5)

    ones = torch.ones(config.hidden)
    heads = config.q_heads + 2 * config.kv_heads
    layers = [
        LayerWeights(
            attention_norm=ones,
            qkv=layer_matrix(heads * config.head_dim, config.hidden),
            attention_out=layer_matrix(config.hidden, config.q_heads * config.head_dim),
            mlp_norm=ones,
            gate_up=layer_matrix(2 * config.feed_forward, config.hidden),
            down=layer_matrix(config.hidden, config.feed_forward),
        )
        for _ in range(config.layers)
    ]
    token_embedding = matrix(config.vocab_size, config.hidden, 0.02)
    fingerprint = hashlib.sha256(f"random {seed} {config}".encode()).hexdigest()
    return Llama(config, token_embedding, layers, ones, fingerprint)
