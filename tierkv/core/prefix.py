"""Chain hashes: the name of a block and of everything before it.

``H_i = xxh3_128(H_{i-1} || tokens_i || extra_i)``, where H_{-1} is the namespace's digest, tokens
are u32 little-endian, and extra is nothing, or the u64 little-endian digest of the block's extra
keys (an image's content hash, say). xxh3 is fast, not collision-resistant: whoever finds a block
by this name compares its tokens too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import xxhash

from tierkv.core.ids import U8, U32, U64
from tierkv.errors import InvalidArgument, require

HASH_BYTES = 16


def chain_hashes(seed: bytes, tokens: U32, block_tokens: int, extras: U64 | None = None) -> U8:
    """Chain hashes of the full blocks of ``tokens`` ([t] u32), u8 [blocks, 16].

    ``seed`` is the hash before the first block: the namespace's digest, or the last hash so far.
    ``extras`` (u64, one per block at least) come from ``extra_digests``.
    """
    require(len(seed) == HASH_BYTES, "a chain starts from 16 bytes")
    blocks = len(tokens) // block_tokens
    if blocks == 0:
        return np.empty((0, HASH_BYTES), np.uint8)
    payload = np.ascontiguousarray(tokens[: blocks * block_tokens], "<u4").data
    ids_of_blocks = struct.iter_unpack(f"{4 * block_tokens}s", payload)
    digest = xxhash.xxh3_128_digest
    before = seed
    if extras is None or not extras[:blocks].any():
        hashes = [before := digest(before + ids) for (ids,) in ids_of_blocks]
    else:
        require(len(extras) >= blocks, "one extra digest per block")
        keys = [key.to_bytes(8, "little") if key else b"" for key in extras[:blocks].tolist()]
        hashes = [
            before := digest(before + ids + key)
            for (ids,), key in zip(ids_of_blocks, keys, strict=True)
        ]
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(blocks, HASH_BYTES)


def extra_digests(extra_keys: Iterable[bytes | None]) -> U64:
    """xxh3_64 of each block's extra key bytes (shape [blocks], u64); 0 for none or empty.

    Raises InvalidArgument for a key that is neither bytes nor None.
    """
    return np.array([_extra_digest(key) for key in extra_keys], np.uint64)


def _extra_digest(key: bytes | None) -> int:
    if key is None:
        return 0
    if not isinstance(key, bytes):
        raise InvalidArgument(f"an extra key is {key!r}; each block has bytes or None")
    return (xxhash.xxh3_64_intdigest(key) or 1) if key else 0
