"""Prompts that share prefixes, and payloads that follow from them: anyone can tell a wrong byte."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from tierkv import KVSpec
from tierkv.core.prefix import chain_hashes

SMALL = KVSpec(model="small", layers=1, kv_heads=1, head_dim=64, block_tokens=8)
"""4 KiB a block."""

LARGE = KVSpec(model="large", layers=2, kv_heads=1, head_dim=80, block_tokens=5)
"""6400 bytes a block: another pool, another stride."""

SPECS = (SMALL, LARGE)
VOCABULARY = 50_000
BRANCHES = 2
SEGMENT_TOKENS = (3, 9)

_WEYL = np.uint64(0x9E3779B97F4A7C15)

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]


@cache
def _segment(seed: int, choices: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of one edge of the tree, which follow from the way that leads there."""
    chance = random.Random(xxhash.xxh3_64_intdigest(repr((seed, choices)).encode()))
    return tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(*SEGMENT_TOKENS)))


def prompt(seed: int, choices: Items[int]) -> list[int]:
    """Token ids along a way through the tree of prefixes."""
    way = tuple(choices)
    return [token for end in range(1, len(way) + 1) for token in _segment(seed, way[:end])]


def payload(spec: KVSpec, tokens: Items[int] | U32) -> U8:
    """The bytes of each token, u8 [tokens, token_bytes]: they follow from all tokens up to it."""
    ids = np.asarray(tokens, np.uint32)
    hashes = chain_hashes(spec.digest, ids, 1).view("<u8")
    words = np.arange(spec.token_bytes // 8, dtype=np.uint64) * _WEYL
    mixed = (hashes[:, :1] + words) ^ (hashes[:, 1:] + (words >> np.uint64(7)))
    return np.ascontiguousarray(mixed).view(np.uint8)


def rows(spec: KVSpec, pool: U8, table: npt.NDArray[np.int32]) -> U8:
    """The slots of a block table as rows of one token each: u8 [tokens, token_bytes], a copy."""
    return pool[table, : spec.block_bytes].reshape(-1, spec.token_bytes)


def put(spec: KVSpec, pool: U8, table: npt.NDArray[np.int32], first: int, data: U8) -> None:
    """Write the rows ``data`` of the tokens from ``first`` on into the slots of a table."""
    for at, row in enumerate(data, first):
        block, place = divmod(at, spec.block_tokens)
        start = place * spec.token_bytes
        pool[table[block], start : start + spec.token_bytes] = row


def wrong_tokens(spec: KVSpec, pool: U8, table: npt.NDArray[np.int32], tokens: U32) -> list[int]:
    """The tokens whose bytes in the pool are not their own."""
    found = rows(spec, pool, table)[: len(tokens)]
    differs = (found != payload(spec, tokens)).any(axis=1)
    wrong: list[int] = np.flatnonzero(differs).tolist()
    return wrong


def wrong_token(spec: KVSpec, pool: U8, table: npt.NDArray[np.int32], tokens: U32) -> int | None:
    """The first token whose bytes in the pool are not its own, None if all are right."""
    return next(iter(wrong_tokens(spec, pool, table, tokens)), None)
