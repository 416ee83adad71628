"""Copies of blocks from one RAM tier to another, and checks of blocks where they lie.

Both are loops of one C call per block (copy, checksum) that frees the GIL for blocks of real size.

Crash: a destination slot's entry is emptied first and written last, so a slot whose entry is valid
holds the whole payload.
"""

from __future__ import annotations

import numpy as np

from tierkv.core.ids import U8, U32, U64, Bool
from tierkv.errors import require
from tierkv.tiers.arena import Arena
from tierkv.tiers.entry import Entries, checks_match, checksum, has_sum, set_checks


def copy_blocks(
    src: Arena, src_slots: U32, dst: Arena, dst_slots: U32, pool: int, *, verify: bool
) -> Bool:
    """Copy blocks, payload and entry, between two arenas; True where it went well, shape [n].

    ``src_slots`` and ``dst_slots`` have shape [n]; no destination may be named twice. With
    ``verify`` the copied payload's checksum must be the entry's. A block without a checksum gets
    the one of its copy. False, with an empty entry in ``dst``: the source's entry is empty, broken
    or of another geometry, or the checksum differs.
    """
    require(len(src_slots) == len(dst_slots), "one destination per source slot")
    require(src.block_bytes(pool) == dst.block_bytes(pool), "both arenas have the same pools")
    dst.empty(pool, dst_slots)
    entries: Entries = src.table(pool)[src_slots]
    good = whole_entries(entries, src.block_bytes(pool))
    known = has_sum(entries)
    source, target = src.payload(pool), dst.payload(pool)
    for index in np.flatnonzero(good).tolist():
        copied = target[dst_slots[index]]
        np.copyto(copied, source[src_slots[index]])
        if not known[index]:
            entries["sum_hi"][index], entries["sum_lo"][index] = checksum(copied)
        elif verify:
            good[index] = sum_matches(entries, index, copied)
    fresh = entries[~known]
    set_checks(fresh)
    entries[~known] = fresh
    dst.table(pool)[dst_slots[good]] = entries[good]
    return good


def check_entries(arena: Arena, pool: int, slots: U32, ids: U64) -> Bool:
    """Which slots have a valid entry for the block expected there, shape [n]. Reads no payload."""
    entries: Entries = arena.table(pool)[slots]
    return _entries_of(entries, arena.block_bytes(pool), ids)


def verify_blocks(arena: Arena, pool: int, slots: U32, ids: U64) -> Bool:
    """Which slots provably hold the block expected there: entry, id and payload, shape [n].

    A block whose entry has no checksum cannot be verified: False. See ``check_entries`` for those.
    """
    entries: Entries = arena.table(pool)[slots]
    good = _entries_of(entries, arena.block_bytes(pool), ids) & has_sum(entries)
    payload = arena.payload(pool)
    for index in np.flatnonzero(good).tolist():
        good[index] = sum_matches(entries, index, payload[slots[index]])
    return good


def whole_entries(entries: Entries, block_bytes: int) -> Bool:
    """Which entries are valid and describe a block of this geometry, shape [n]."""
    whole: Bool = checks_match(entries) & (entries["length"] == block_bytes)
    whole &= entries["block_tokens"] == entries["tokens"].shape[1]
    return whole


def sum_matches(entries: Entries, index: int, payload: U8) -> bool:
    """Whether a payload has the checksum that ``entries[index]`` states."""
    stated = int(entries["sum_hi"][index]), int(entries["sum_lo"][index])
    return checksum(payload) == stated


def _entries_of(entries: Entries, block_bytes: int, ids: U64) -> Bool:
    matching: Bool = whole_entries(entries, block_bytes) & (entries["id"] == ids)
    return matching
