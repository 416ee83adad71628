"""Checksums as an oracle computes them: one payload at a time, by the xxhash package."""

from __future__ import annotations

import xxhash

from tierkv.core.ids import U8


def checksum(payload: U8) -> tuple[int, int]:
    """xxh3_128 of a payload, as (high, low) half."""
    digest = xxhash.xxh3_128_intdigest(payload.tobytes())
    return digest >> 64, digest & (1 << 64) - 1
