"""Reading cached blocks out of memory that the daemon changes meanwhile, and proving each.

The directory only hints. An entry is copied before anything is concluded from it, and its check
says whether it was whole; then the payload is copied, and its copy hashed. Whatever becomes of the
slot in between: bytes that have the checksum of the block's entry are the block.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from tierkv.core.ids import U8, U32, U64
from tierkv.errors import require
from tierkv.native.directory import PLACES, candidates
from tierkv.native.memory import address
from tierkv.native.pages import PagedBlocks, Rows

DIGEST_BYTES = 16
CHECK_BYTES = 8
WORDS = ("id", "parent", "hash_hi", "hash_lo", "sum_hi", "sum_lo", "extra")
DIGEST_AT = 64
TOKENS_AT = 80
"""Of an entry, in bytes; ``tiers.entry`` describes all of it."""


class _Pool(ctypes.Structure):
    """What the library takes."""

    _fields_ = (
        ("entries", ctypes.c_void_p),
        ("entry_bytes", ctypes.c_size_t),
        ("payload", ctypes.c_void_p),
        ("stride", ctypes.c_size_t),
        ("block_bytes", ctypes.c_size_t),
        ("slots", ctypes.c_size_t),
        ("places", ctypes.c_void_p),
        ("mask", ctypes.c_uint64),
        ("digest", ctypes.c_char_p),
        ("block_tokens", ctypes.c_size_t),
    )


@dataclass(frozen=True, eq=False)
class Readable:
    """Where the blocks of one namespace lie, if they do.

    ``entries``: its pool's slot table, u8 [slots, entry bytes]. ``payload``: u8 [slots,
    block_bytes], rows contiguous. ``places``: the directory, u64 [buckets, 8]. ``digest``: the
    namespace's. Raises InvariantViolation for shapes that do not fit each other.
    """

    entries: U8
    payload: U8
    places: U64
    digest: bytes
    block_tokens: int

    def __post_init__(self) -> None:
        entry_bytes = self.entries.shape[1]
        fits = TOKENS_AT + 4 * self.block_tokens + CHECK_BYTES <= entry_bytes
        require(fits and self.entries.flags.c_contiguous, "entries have room for a block's tokens")
        require(len(self.payload) == len(self.entries), "an entry for each slot")
        buckets = len(self.places)
        whole = buckets & (buckets - 1) == 0 < buckets and self.places.shape[1] == PLACES
        require(whole and self.places.flags.c_contiguous, "a power of two of buckets")
        require(len(self.digest) == DIGEST_BYTES, "a digest has 16 bytes")

    @cached_property
    def library_address(self) -> int:
        """Where the library finds all of this, as long as this object lives."""
        return ctypes.addressof(self._pool)

    @cached_property
    def _pool(self) -> _Pool:
        return _Pool(
            entries=address(self.entries),
            entry_bytes=self.entries.shape[1],
            payload=address(self.payload),
            stride=self.payload.strides[0],
            block_bytes=self.payload.shape[1],
            slots=len(self.payload),
            places=address(self.places),
            mask=len(self.places) - 1,
            digest=self.digest,
            block_tokens=self.block_tokens,
        )


def read(
    pool: Readable,
    hashes: U8,
    tokens: U32,
    extras: U64 | None,
    slots: U32 | None,
    out: Rows,
    first: int,
) -> int:
    """See ``native.loops.Loops.read``."""
    parent: int = 0
    names = hashes.view(">u8").tolist()
    ids = tokens.reshape(-1, pool.block_tokens)
    for n, (hash_hi, hash_lo) in enumerate(names):
        extra = 0 if extras is None else int(extras[n])
        said = (parent, hash_hi, hash_lo, extra)
        if slots is None:
            found = candidates(pool.places, hash_lo, len(pool.payload))
        else:
            found = [int(slots[n])]
        parts = _parts(out, n - first) if n >= first else None
        parent = _take_any(pool, found, said, ids[n].tobytes(), parts)
        if not parent:
            return n
    return len(names)


def _parts(out: Rows, n: int) -> list[U8]:
    """The n-th block of ``out``, as what its bytes are in one after another."""
    return out.pages.of(int(out.ids[n])) if isinstance(out, PagedBlocks) else [out[n]]


def scatter(block: U8, parts: list[U8]) -> None:
    """Copy a block into its parts."""
    at = 0
    for part in parts:
        np.copyto(part, block[at : at + len(part)])
        at += len(part)


def _take_any(
    pool: Readable,
    slots: list[int],
    said: tuple[int, int, int, int],
    tokens: bytes,
    parts: list[U8] | None,
) -> int:
    """Copy a block from whichever slot holds it into its parts, if any; its id, or 0.

    The youngest comes first: of several of one name it is the one that younger children name.
    """
    slots.sort(key=lambda slot: int(pool.entries[slot, :8].view("<u8")[0]), reverse=True)
    taken = (_take(pool, slot, said, tokens, parts) for slot in slots)
    return next((block for block in taken if block), 0)


def _take(
    pool: Readable,
    slot: int,
    said: tuple[int, int, int, int],
    tokens: bytes,
    parts: list[U8] | None,
) -> int:
    """Copy a block if the slot holds it; its id, or 0."""
    entry = pool.entries[slot].tobytes()
    words = dict(zip(WORDS, np.frombuffer(entry, "<u8", len(WORDS)).tolist(), strict=True))
    if (words["parent"], words["hash_hi"], words["hash_lo"], words["extra"]) != said:
        return 0
    if entry[DIGEST_AT:TOKENS_AT] != pool.digest or not entry.startswith(tokens, TOKENS_AT):
        return 0
    sums = words["sum_hi"], words["sum_lo"]
    check = int.from_bytes(entry[-CHECK_BYTES:], "little")
    if sums == (0, 0) or check != xxhash.xxh3_64_intdigest(entry[:-CHECK_BYTES]):
        return 0
    if parts is None:
        return int(words["id"])
    scatter(pool.payload[slot], parts)
    hashing = xxhash.xxh3_128()
    for part in parts:
        hashing.update(part.data)
    copied = hashing.intdigest()
    return words["id"] if copied == sums[0] << 64 | sums[1] else 0
