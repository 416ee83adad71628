"""Test support: payloads that follow from their tokens, so that every reader can check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tierkv import KVSpec
from tierkv.core.prefix import chain_hashes, extra_digests
from tierkv.tiers.disk import disk_slot_bytes

SPEC = KVSpec(
    model="m", layers=2, kv_heads=2, head_dim=16, block_tokens=16, vocab_size=50_000, salt=""
)
"""Blocks of 8 KiB."""

BLOCK = SPEC.block_tokens


def sized(device: int, host: int, disk: int, **more: str) -> dict[str, str]:
    """Settings of tiers that hold so many blocks of SPEC."""
    return {
        "device.bytes": str(device * SPEC.block_bytes),
        "host.bytes": str(host * SPEC.block_bytes),
        "disk.bytes": str(disk * disk_slot_bytes(SPEC.block_bytes, BLOCK)),
        "disk.segment_bytes": "1MiB",
        **more,
    }


def tokens(blocks: int, seed: int, block_tokens: int = BLOCK) -> np.ndarray:
    """``blocks`` full blocks of token ids; other seeds, other ids from the first block on."""
    return np.random.default_rng(seed).integers(0, 50_000, blocks * block_tokens).astype(np.uint32)


def payloads(
    spec: KVSpec, ids: np.ndarray, extra_keys: Sequence[bytes | None] | None = None
) -> np.ndarray:
    """What the full blocks of ``ids`` must hold: u8 [blocks, block_bytes].

    Like real K and V, a block's bytes depend on the namespace and on all tokens up to it.
    """
    blocks = len(ids) // spec.block_tokens
    extras = np.zeros(blocks, np.uint64)
    given = extra_digests(extra_keys or ())[:blocks]
    extras[: len(given)] = given
    hashes = chain_hashes(spec.digest, ids, spec.block_tokens, extras)
    shape = (len(hashes), -(-spec.block_bytes // 16))
    words = hashes.view("<u8").reshape(-1, 2)[:, :1] + np.arange(2 * shape[1], dtype=np.uint64)
    return np.ascontiguousarray(words).view(np.uint8)[:, : spec.block_bytes]


def held(sequence: Any, ns: Any) -> np.ndarray:
    """The bytes that the sequence's blocks hold now: u8 [blocks, block_bytes], a copy."""
    return ns.pool[sequence.block_table, : ns.spec.block_bytes]


def check(
    ns: Any, sequence: Any, extra_keys: Sequence[bytes | None] | None = None, blocks: int = -1
) -> None:
    """All full blocks of the sequence (or its first ``blocks``) hold what they must."""
    expected = payloads(ns.spec, sequence.tokens, extra_keys)
    expected = expected if blocks < 0 else expected[:blocks]
    assert np.array_equal(held(sequence, ns)[: len(expected)], expected)


def grow(
    ns: Any, sequence: Any, ids: np.ndarray, extra_keys: Sequence[bytes | None] | None = None
) -> None:
    """Compute and append further tokens, from a block boundary on."""
    first = sequence.num_tokens // ns.spec.block_tokens
    wanted = payloads(ns.spec, np.concatenate([sequence.tokens, ids]), extra_keys)[first:]
    sequence.reserve(len(ids))
    slots = sequence.block_table[first : first + len(wanted)]
    ns.pool[slots, : ns.spec.block_bytes] = wanted
    sequence.append(ids)


def fill(ns: Any, ids: np.ndarray, extra_keys: Sequence[bytes | None] | None = None) -> Any:
    """A sequence with all these tokens: the cached part is checked, the rest is computed."""
    sequence = ns.begin(ids, keep=0, extra_keys=extra_keys)
    try:
        check(ns, sequence, extra_keys)
        if sequence.num_tokens < len(ids):
            grow(ns, sequence, ids[sequence.num_tokens :], extra_keys)
    except BaseException:
        sequence.end()
        raise
    return sequence


def store(ns: Any, ids: np.ndarray, extra_keys: Sequence[bytes | None] | None = None) -> None:
    """Leave these tokens' blocks in the cache, held by nobody."""
    fill(ns, ids, extra_keys).end()


def press(client: Any, ns: Any, blocks: int, seed: int) -> None:
    """Fill the device tier with other blocks, a few at a time.

    Flushes first: a block that is just being copied cannot leave, and another one goes instead.
    """
    client.flush()
    for at in range(0, blocks, 4):
        store(ns, tokens(4, seed=seed + at))
