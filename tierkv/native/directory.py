"""The directory of a pool: which slot may hold which block, for readers that ask nobody.

``places`` is u64 [buckets, 8] in shared memory. A block belongs to the bucket that the low bits of
its chain hash's low half name. A place is 0, or

    upper 32 bits   tag: those of the hash's low half
    lower 32 bits   slot + 1

One process writes, one whole place at a time. By ``where`` (u32 [slots]: the slot's place, counted
through all buckets, plus 1; 0 = none) it knows which place a slot leaves when it gets another
block. So a slot has one place at most, and nothing is left over. If a bucket is full, one of its
places is written over.

A place only hints: it may be missing, or name a slot that holds another block by now. Readers prove
what they find.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import U32, U64

PLACES = 8
PLACE_BYTES = 8
SLOT_BITS = (1 << 32) - 1
MEAN_LOAD_MAX = 2
"""Blocks of a full pool for each bucket: then one of some ten thousand finds its bucket full."""


def bucket_count(slots: int) -> int:
    """How many buckets the directory of a pool of ``slots`` slots has: a power of two."""
    return 1 << max(0, -(-slots // MEAN_LOAD_MAX) - 1).bit_length()


def enter(places: U64, where: U32, slots: npt.NDArray[np.integer[Any]], hash_lo: U64) -> None:
    """Slots ([n], all in the pool) hold blocks of these names ([n]) now, and nothing else."""
    mask = len(places) - 1
    flat = places.reshape(-1)
    for slot, name in zip(slots.tolist(), hash_lo.tolist(), strict=True):
        _leave(flat, where, slot)
        bucket = places[name & mask]
        at = next((n for n, place in enumerate(bucket.tolist()) if not place), PLACES)
        if at == PLACES:
            at = slot % PLACES
            where[(int(bucket[at]) & SLOT_BITS) - 1] = 0
        place = (name & mask) * PLACES + at
        flat[place] = name & ~SLOT_BITS | slot + 1
        where[slot] = place + 1


def leave(places: U64, where: U32, slots: npt.NDArray[np.integer[Any]]) -> None:
    """Slots ([n], all in the pool) hold nothing that anybody should find."""
    flat = places.reshape(-1)
    for slot in slots.tolist():
        _leave(flat, where, slot)


def candidates(places: U64, hash_lo: int, slots: int) -> list[int]:
    """The slots, below ``slots``, that may hold a block of this name."""
    bucket = places[hash_lo & (len(places) - 1)].tolist()
    tagged = [place for place in bucket if (place ^ hash_lo) >> 32 == 0]
    return [slot for place in tagged if 0 <= (slot := (place & SLOT_BITS) - 1) < slots]


def _leave(flat: U64, where: U32, slot: int) -> None:
    if where[slot]:
        flat[where[slot] - 1] = 0
    where[slot] = 0
