"""tierkv's worker API in a few lines of torch: the rules that the examples must keep to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierkv.core.spec import KVSpec


class FakeCache:
    """What ``tierkv.connect()`` returns."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, FakeNamespace] = {}

    def __enter__(self) -> FakeCache:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def namespace(self, spec: KVSpec) -> FakeNamespace:
        spec.check()
        return self.namespaces.setdefault(spec.digest, FakeNamespace(spec))


class FakeNamespace:
    """A pool of shuffled slots, poisoned with NaN, and the sealed blocks by their tokens."""

    def __init__(self, spec: KVSpec, slots: int = 64) -> None:
        self.spec = spec
        shape = (slots, spec.layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
        self.memory = torch.full(shape, torch.nan)
        self.pool = self.memory.numpy()
        self.free = random.Random(7).sample(range(slots), slots)
        self.sealed: dict[tuple[int, ...], int] = {}
        self.query_rows = 0
        self.open_sequences = 0

    def begin(self, token_ids: Sequence[int]) -> FakeSequence:
        """The longest sealed prefix that leaves a token to compute."""
        step = self.spec.block_tokens
        table = []
        for end in range(step, len(token_ids), step):
            slot = self.sealed.get(tuple(token_ids[:end]))
            if slot is None:
                break
            table.append(slot)
        self.open_sequences += 1
        return FakeSequence(self, table, list(token_ids[: len(table) * step]))

    def write_kv(
        self, layer: int, sequence: FakeSequence, first_token: int, k: Tensor, v: Tensor
    ) -> None:
        assert k.shape == v.shape == (len(k), self.spec.kv_heads, self.spec.head_dim)
        assert k.dtype == v.dtype == torch.float32
        assert first_token == sequence.num_tokens, "written tokens are sealed or leave a gap"
        assert first_token + len(k) <= sequence.capacity, "not reserved"
        tokens = torch.arange(first_token, first_token + len(k))
        slots = torch.tensor(sequence.block_table)[tokens // self.spec.block_tokens]
        self.memory[slots, layer, 0, tokens % self.spec.block_tokens] = k
        self.memory[slots, layer, 1, tokens % self.spec.block_tokens] = v

    def attention(
        self,
        layer: int,
        q: Tensor,
        sequences: list[FakeSequence],
        *,
        seq_lens: list[int],
        q_indptr: list[int],
        where: str,
    ) -> Tensor:
        """Softmax attention of one sequence's last rows, written out in double precision."""
        (sequence,), (length,) = sequences, seq_lens
        assert q_indptr == [0, len(q)]
        assert where == "worker"
        self.query_rows += len(q)
        kv = self.memory[sequence.block_table, layer].transpose(0, 1).flatten(1, 2)[:, :length]
        group = q.shape[1] // self.spec.kv_heads
        k, v = kv.double().repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) / self.spec.head_dim**0.5
        positions = torch.arange(length)
        future = positions[None] > positions[length - len(q) :, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v).float()


class FakeSequence:
    """A block table and the tokens written so far."""

    def __init__(self, namespace: FakeNamespace, table: list[int], tokens: list[int]) -> None:
        self.namespace = namespace
        self.block_table = table
        self.tokens = tokens
        self.cached_tokens = len(tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        return len(self.block_table) * self.namespace.spec.block_tokens

    def reserve(self, tokens: int) -> None:
        while self.capacity < self.num_tokens + tokens:
            self.block_table.append(self.namespace.free.pop())

    def append(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)
        assert self.num_tokens <= self.capacity, "more tokens than slots"
        step = self.namespace.spec.block_tokens
        for block in range(self.num_tokens // step):
            name = tuple(self.tokens[: (block + 1) * step])
            slot = self.namespace.sealed.setdefault(name, self.block_table[block])
            assert not self.namespace.memory[slot].isnan().any(), "sealed before it was written"

    def end(self) -> None:
        self.namespace.open_sequences -= 1
        self.block_table = []


def namespace_for(model: Any, block_tokens: int = 16) -> FakeNamespace:
    """A fresh pool for the model's blocks."""
    return FakeCache().namespace(model.spec(block_tokens))
