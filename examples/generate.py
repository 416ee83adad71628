"""Greedy generation over a KV cache: plain tensors, or tierkv's pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tierkv.errors import InvalidArgument, require

from .llama import KVCache, Llama

PREFILL_TOKENS = 512
"""Tokens of a prompt computed in one pass: bounds the memory of activations and masks."""


class SequenceCache(KVCache, Protocol):
    """A KV cache that also knows where a sequence begins and ends."""

    def begin(self, token_ids: Sequence[int]) -> int:
        """Start a sequence; returns how many leading tokens have their KV already."""

    def reserve(self, tokens: int) -> None:
        """Make room for that many more tokens."""

    def append(self, token_ids: Sequence[int]) -> None:
        """The KV of these tokens, the next ones of the sequence, is written in all layers."""

    def end(self) -> None:
        """The sequence is over."""


class PooledKV:
    """KV in tierkv and nowhere else: written into its pool, attended to where it lies.

    ``namespace`` is ``cache.namespace(model.spec())`` of a connected ``tierkv`` client. ``where``
    attention is computed: in this process ("worker") or in the daemon's ("daemon"). One object
    serves one sequence at a time.
    """

    def __init__(self, namespace: Any, where: str = "worker") -> None:
        self._namespace = namespace
        self._where = where
        self._sequence: Any = None
        self._tokens = 0

    def begin(self, token_ids: Sequence[int]) -> int:
        """Take up the longest cached prefix; at least one token is left to compute."""
        self._sequence = self._namespace.begin(token_ids)
        return int(self._sequence.cached_tokens)

    def reserve(self, tokens: int) -> None:
        """Get slots for that many more tokens."""
        self._sequence.reserve(tokens)

    def write(self, layer: int, first_token: int, k: Tensor, v: Tensor) -> None:
        """Copy into the slots of the sequence's block table."""
        self._tokens = first_token + len(k)
        self._namespace.write_kv(layer, self._sequence, first_token, k, v)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Paged attention on the pool: no K or V is gathered or copied."""
        out: Tensor = self._namespace.attention(
            *(layer, q, [self._sequence]),
            seq_lens=[self._tokens],
            q_indptr=[0, len(q)],
            where=self._where,
        )
        return out

    def append(self, token_ids: Sequence[int]) -> None:
        """Name the blocks that are full now: from here on others can find them."""
        self._sequence.append(token_ids)

    def end(self) -> None:
        """Let go of the blocks; full ones stay cached."""
        self._sequence.end()


class DenseKV:
    """KV in this process's own tensors, gone when the process is: a run without tierkv.

    Holds one sequence of up to ``capacity_tokens`` in [layers, kv_heads, tokens, head_dim].
    """

    def __init__(self, model: Llama, capacity_tokens: int) -> None:
        config = model.config
        shape = (config.layers, config.kv_heads, capacity_tokens, config.head_dim)
        self._k = torch.empty(shape)
        self._v = torch.empty(shape)
        self._tokens = 0
        self._mask = torch.empty(0, 0)

    def begin(self, token_ids: Sequence[int]) -> int:
        """Nothing is ever kept from an earlier sequence."""
        return 0

    def reserve(self, tokens: int) -> None:
        """The tensors are there already."""

    def write(self, layer: int, first_token: int, k: Tensor, v: Tensor) -> None:
        """Copy into the layer's rows."""
        self._tokens = first_token + len(k)
        self._k[layer, :, first_token : self._tokens] = k.transpose(0, 1)
        self._v[layer, :, first_token : self._tokens] = v.transpose(0, 1)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """torch's attention over everything written."""
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            self._k[None, layer, :, : self._tokens],
            self._v[None, layer, :, : self._tokens],
            attn_mask=self._causal_mask(len(q)) if len(q) > 1 else None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def append(self, token_ids: Sequence[int]) -> None:
        """Nothing to announce."""

    def end(self) -> None:
        """Nothing to release."""

    def _causal_mask(self, queries: int) -> Tensor:
        """0 where a query may look, minus infinity elsewhere; the same for all layers."""
        if self._mask.shape != (queries, self._tokens):
            blind = torch.full((queries, self._tokens), -torch.inf)
            self._mask = blind.triu(self._tokens - queries + 1)
        return self._mask


@dataclass
class Generation:
    """Tokens generated, the end token included, and when each was known (seconds from the start).

    ``cached_tokens`` leading tokens of the prompt were not computed.
    """

    tokens: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0]


def generate(
    model: Llama,
    kv: SequenceCache,
    prompt_ids: Sequence[int],
    max_tokens: int,
    on_token: Callable[[int], None] | None = None,
    *,
    stop_at_end: bool = True,
) -> Generation:
    """Continue the prompt greedily by up to ``max_tokens`` tokens.

    Only the part of the prompt that is not cached is computed; its last token always is, since the
    first new token follows from it. ``on_token`` is called with each token as it is known.

    Raises InvalidArgument if there is nothing to do or no room for it, and what ``kv`` raises.
    """
    if min(len(prompt_ids), max_tokens) < 1:
        raise InvalidArgument(
            f"the prompt has {len(prompt_ids)} tokens and {max_tokens} more are asked for; "
            "both must be at least one"
        )
    if len(prompt_ids) + max_tokens > model.config.context_tokens:
        raise InvalidArgument(
            f"the prompt has {len(prompt_ids)} tokens and {max_tokens} more are asked for; "
            f"{model.config.name} takes at most {model.config.context_tokens} in all"
        )
    began_s = time.perf_counter()
    result = Generation(cached_tokens=kv.begin(prompt_ids))
    try:
        logits = prefill(model, kv, prompt_ids, result.cached_tokens)
        while True:
            token = int(logits.argmax())
            result.tokens.append(token)
            result.token_times_s.append(time.perf_counter() - began_s)
            if on_token:
                on_token(token)
            ended = stop_at_end and token == model.config.end_token
            if ended or len(result.tokens) == max_tokens:
                return result
            logits = extend(model, kv, [token], len(prompt_ids) + len(result.tokens) - 1)
    finally:
        kv.end()


def prefill(model: Llama, kv: SequenceCache, prompt_ids: Sequence[int], cached: int) -> Tensor:
    """Compute the prompt from token ``cached`` on, in pieces; returns the last token's logits."""
    require(cached < len(prompt_ids), "the cache left no token of the prompt to compute")
    for first in range(cached, len(prompt_ids), PREFILL_TOKENS):
        logits = extend(model, kv, prompt_ids[first : first + PREFILL_TOKENS], first)
    return logits


def extend(model: Llama, kv: SequenceCache, token_ids: Sequence[int], first: int) -> Tensor:
    """One forward pass over the next tokens of the sequence: make room, compute, announce."""
    kv.reserve(len(token_ids))
    logits = model.forward(token_ids, first, kv)
    kv.append(token_ids)
    return logits
