"""What put, get and spill share: prompts with blocks of real size, and copies in memory."""

from __future__ import annotations

import time

import numpy as np
import xxhash

from benchmarks.daemon import some_tokens
from benchmarks.harness import Bench
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8, U32
from tierkv.core.spec import KVSpec

SMALL = KVSpec(model="64-kib-blocks", layers=4, kv_heads=8, head_dim=16)
LARGE = KVSpec(model="720-kib-blocks", layers=30, kv_heads=3, head_dim=64)
"""The latter is SmolLM2-135M in float32."""


def specs(bench: Bench) -> list[KVSpec]:
    """The geometries to measure."""
    return [SMALL] if bench.quick else [SMALL, LARGE]


def repeats(bench: Bench) -> int:
    """Batches of one variant in a round: their median is less at the mercy of a time slice."""
    return bench.pick(3, 1)


def label(spec: KVSpec) -> str:
    """Size of the spec's blocks, for a line's name."""
    return f"{spec.block_bytes >> 10}k"


def batch_blocks(bench: Bench, spec: KVSpec) -> int:
    """Blocks of one piece of work: 64 MiB, or 8 MiB in a quick run."""
    return bench.pick(64 << 20, 8 << 20) // spec.block_bytes


def some_payload(spec: KVSpec, blocks: int) -> U8:
    """Random blocks (u8 [blocks, block_bytes])."""
    generator = np.random.default_rng(blocks)
    return generator.integers(0, 256, (blocks, spec.block_bytes), np.uint8)


def put(namespace: Namespace, tokens: U32, payload: U8) -> float:
    """Cache these tokens with this payload and let go of them; returns the seconds it took."""
    began = time.perf_counter()
    sequence = namespace.begin(tokens)
    sequence.reserve(len(tokens))
    namespace.pool[sequence.block_table, : payload.shape[1]] = payload
    sequence.append(tokens)
    spent = time.perf_counter() - began
    sequence.end()
    return spent


class Prompts:
    """An endless supply of prompts of ``blocks`` blocks that nobody has seen."""

    def __init__(self, spec: KVSpec, blocks: int, first_seed: int = 0) -> None:
        self._count = blocks * spec.block_tokens
        self._seed = first_seed

    def fresh(self) -> U32:
        """Token ids (u32 [blocks x block_tokens])."""
        self._seed += 1
        return some_tokens(self._seed, self._count)


class Ring:
    """A private copy target, bigger than a batch, so that it is as cold as the arena's slots."""

    def __init__(self, payload: U8, batches: int) -> None:
        self._payload = payload
        self._target = np.zeros((batches, *payload.shape), np.uint8)
        self._at = 0

    def copy(self) -> U8:
        """One memcpy per block of the whole payload; returns the copy."""
        self._at = (self._at + 1) % len(self._target)
        target: U8 = self._target[self._at]
        for source, block in zip(self._payload, target, strict=True):
            np.copyto(block, source)
        return target

    def copy_and_check(self) -> None:
        """The same and a checksum of every block."""
        for block in self.copy():
            xxhash.xxh3_128_digest(block.data)
