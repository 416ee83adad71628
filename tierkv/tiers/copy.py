"""Copies of blocks from one RAM tier to another, and checks of blocks where they lie.

One of the two may be a GPU's memory. Checksums are always those of the side in host memory, taken
when the copy has ended.

A whole batch is one call that frees the GIL.

Crash: a destination slot's entry is emptied first and written last, so a slot whose entry is valid
holds the whole payload.
"""

from __future__ import annotations

import numpy as np

from tierkv.core.ids import U32, U64, Bool
from tierkv.errors import require
from tierkv.tiers.arena import Arena
from tierkv.tiers.blocks import Blocks
from tierkv.tiers.entry import (
    Entries,
    Sums,
    checks_match,
    copy_payload,
    fill_sums,
    has_sum,
    payload_sums,
    sums_agree,
)


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
    copied = np.flatnonzero(good)
    sums = _carry(dst, dst_slots[copied], src, src_slots[copied], pool)
    fill_sums(entries, copied, sums)
    if verify:
        good[copied] = sums_agree(entries, copied, sums)
    dst.table(pool)[dst_slots[good]] = entries[good]
    return good


def check_entries(arena: Arena, pool: int, slots: U32, ids: U64) -> Bool:
    """Which slots have a valid entry for the block expected there, shape [n]. Reads no payload."""
    entries: Entries = arena.table(pool)[slots]
    return _entries_of(entries, arena.block_bytes(pool), ids)


def verify_blocks(arena: Blocks, pool: int, slots: U32, ids: U64) -> Bool:
    """Which slots provably hold the block expected there: entry, id and payload, shape [n].

    A block whose entry has no checksum cannot be verified: False. See ``check_entries`` for those.
    """
    entries: Entries = arena.table(pool)[slots]
    good = _entries_of(entries, arena.block_bytes(pool), ids) & has_sum(entries)
    likely = np.flatnonzero(good)
    sums = payload_sums(arena.payload(pool), slots[likely])
    good[likely] = sums_agree(entries, likely, sums)
    return good


def checked_entries(blocks: Blocks, pool: int, slots: U32) -> tuple[Entries, Bool]:
    """The slots' entries, all with checksums, and which of the blocks are whole, shape [n] both.

    Those are not whole whose payload does not have the checksum that the entry states.
    """
    entries: Entries = blocks.table(pool)[slots]
    good = whole_entries(entries, blocks.block_bytes(pool))
    likely = np.flatnonzero(good)
    sums = payload_sums(blocks.payload(pool), slots[likely])
    fill_sums(entries, likely, sums)
    good[likely] = sums_agree(entries, likely, sums)
    return entries, good


def whole_entries(entries: Entries, block_bytes: int) -> Bool:
    """Which entries are valid and describe a block of this geometry, shape [n]."""
    whole: Bool = checks_match(entries) & (entries["length"] == block_bytes)
    whole &= entries["block_tokens"] == entries["tokens"].shape[1]
    return whole


def _carry(dst: Arena, to: U32, src: Arena, at: U32, pool: int) -> Sums:
    """Copy payloads; checksums of the copies. Raises GpuFailed."""
    source, target = src.gpu(pool), dst.gpu(pool)
    require(source is None or target is None, "a copy from GPU to GPU goes through a window")
    if source is not None:
        source.fetch(at, dst.payload(pool), to)
        return payload_sums(dst.payload(pool), to)
    if target is not None:
        target.store(to, src.payload(pool), at)
        # Of the source, after the copy: had it become another block's meanwhile, it would show.
        return payload_sums(src.payload(pool), at)
    return copy_payload(dst.payload(pool), to, src.payload(pool), at)


def _entries_of(entries: Entries, block_bytes: int, ids: U64) -> Bool:
    matching: Bool = whole_entries(entries, block_bytes) & (entries["id"] == ids)
    return matching
