"""What the workloads on payload share: prompts with blocks of real size, and plain copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from tierkv.bench import worker
from tierkv.bench.daemon import some_tokens, spec_of
from tierkv.bench.harness import Bench
from tierkv.client.sync import Namespace
from tierkv.client.sync import Sequence as Held
from tierkv.core.ids import U8, U32
from tierkv.core.spec import KVSpec
from tierkv.core.state import PoolShape
from tierkv.errors import CorruptionError

BLOCKS_PER_CALL = 64


def specs(bench: Bench, sizes: Sequence[int]) -> list[KVSpec]:
    """Geometries with blocks of these sizes; only the first in a quick run."""
    return [spec_of(size) for size in (sizes[:1] if bench.quick else sizes)]


def shape_of(spec: KVSpec) -> PoolShape:
    """The geometry as the daemon's pools know it."""
    return PoolShape(spec.block_bytes, spec.block_tokens)


def repeats(bench: Bench) -> int:
    """Batches of one variant in a round: their median is less at the mercy of a time slice."""
    return bench.pick(3, 1)


def label(spec: KVSpec) -> str:
    """Size of the spec's blocks, for a line's name."""
    size = spec.block_bytes
    return f"{size >> 20}m" if size >= 1 << 20 else f"{size >> 10}k"


def batch_blocks(bench: Bench, spec: KVSpec) -> int:
    """Blocks of one piece of work: 64 MiB, or 8 MiB in a quick run."""
    return bench.pick(64 << 20, 8 << 20) // spec.block_bytes


def some_payload(spec: KVSpec, blocks: int) -> U8:
    """Random blocks (u8 [blocks, block_bytes])."""
    generator = np.random.default_rng(blocks)
    return generator.integers(0, 256, (blocks, spec.block_bytes), np.uint8)


Put = Callable[[Namespace, U32, U8], None]


def timed_put(namespace: Namespace, tokens: U32, payload: U8, put: Put = worker.put) -> float:
    """Seconds of a put by copy, from the prompt until the blocks are acknowledged and released."""
    began = time.perf_counter()
    put(namespace, tokens, payload)
    return time.perf_counter() - began


def check(namespace: Namespace, tokens: U32, payload: U8) -> None:
    """Raise CorruptionError unless the daemon has these tokens with this payload, byte by byte."""
    found = np.zeros_like(payload)
    worker.get(namespace, tokens, found)
    if not np.array_equal(found, payload):
        raise CorruptionError(f"wrong bytes in blocks of {namespace.spec.block_bytes} bytes")


class Prompts:
    """An endless supply of prompts of ``blocks`` blocks that nobody has seen."""

    def __init__(self, spec: KVSpec, blocks: int, first_seed: int = 0) -> None:
        self._count = blocks * spec.block_tokens
        self._seed = first_seed
        self.last: U32 = some_tokens(first_seed, self._count)

    def fresh(self) -> U32:
        """Token ids (u32 [blocks x block_tokens])."""
        self._seed += 1
        self.last = some_tokens(self._seed, self._count)
        return self.last


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


class HeldSlots:
    """Slots of the pool that this worker keeps for plain copies, ``batches`` x ``blocks`` of them.

    What the same copies cost with no daemon in the way, into and out of the same memory.
    """

    def __init__(self, namespace: Namespace, payload: U8, batches: int) -> None:
        self._namespace = namespace
        self._payload = payload
        self._prompts = Prompts(namespace.spec, len(payload), first_seed=1 << 40)
        self._sequences = [worker.reserve(namespace, self._prompts.fresh()) for _ in range(batches)]
        self._at = 0
        for _ in range(batches):
            self.put()

    def put(self) -> None:
        """Copy the payload into the next batch of slots."""
        self._slots()[self._next().block_table] = self._payload

    def get(self, out: U8) -> None:
        """Copy the next batch of slots into ``out``."""
        np.take(self._slots(), self._next().block_table, 0, out=out, mode="clip")

    def _slots(self) -> U8:
        pool: U8 = self._namespace.pool
        return pool[:, : self._payload.shape[1]]

    def _next(self) -> Held:
        self._at = (self._at + 1) % len(self._sequences)
        return self._sequences[self._at]
