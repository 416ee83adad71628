"""Copies between arenas: bytes, checksums, and what a broken block leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.tiers.sums import checksum
from tierkv.errors import InvariantViolation
from tierkv.tiers.arena import Arena
from tierkv.tiers.copy import check_entries, copy_blocks, verify_blocks
from tierkv.tiers.entry import has_sum, set_checks

BLOCK_BYTES = 5000
SLOTS = np.array([4, 0, 9], np.uint32)
TARGETS = np.array([1, 2, 7], np.uint32)
IDS = [11, 12, 13]

Pair = tuple[Arena, Arena]


@pytest.fixture
def pair(open_arena: Callable[..., Arena]) -> Pair:
    src, dst = open_arena("device", 1 << 20), open_arena("host", 2 << 20)
    for arena in (src, dst):
        arena.add_pool(0, BLOCK_BYTES, 16)
    return src, dst


@pytest.mark.parametrize("block_bytes", [64, 100, 4096, 5000, 64 << 10, 2 << 20])
def test_blocks_arrive_whole(
    open_arena: Callable[..., Arena], put_blocks: Any, block_bytes: int
) -> None:
    src, dst = open_arena("device", 8 << 20), open_arena("host", 6 << 20)
    for arena in (src, dst):
        arena.add_pool(5, block_bytes, 8)
    payload = put_blocks(src, 5, [2, 0], [1, 2])
    there = np.array([0, 1], np.uint32)
    assert copy_blocks(src, np.array([2, 0], np.uint32), dst, there, 5, verify=True).all()
    np.testing.assert_array_equal(dst.payload(5)[:2], payload)
    np.testing.assert_array_equal(dst.table(5)[:2], src.table(5)[[2, 0]])
    assert verify_blocks(dst, 5, there, np.array([1, 2], np.uint64)).all()


def test_an_empty_batch_is_fine(pair: Pair) -> None:
    src, dst = pair
    nothing = np.zeros(0, np.uint32)
    assert copy_blocks(src, nothing, dst, nothing, 0, verify=True).tolist() == []
    assert verify_blocks(src, 0, nothing, np.zeros(0, np.uint64)).tolist() == []


def test_a_flipped_bit_in_the_source_payload_is_not_copied(pair: Pair, put_blocks: Any) -> None:
    src, dst = pair
    put_blocks(src, 0, SLOTS.tolist(), IDS)
    src.payload(0)[SLOTS[1], BLOCK_BYTES - 1] ^= 0x40
    assert copy_blocks(src, SLOTS, dst, TARGETS, 0, verify=True).tolist() == [True, False, True]
    assert dst.table(0)["id"][TARGETS].tolist() == [11, 0, 13]


def test_without_verify_the_destination_still_shows_the_rot(pair: Pair, put_blocks: Any) -> None:
    src, dst = pair
    put_blocks(src, 0, SLOTS.tolist(), IDS)
    src.payload(0)[SLOTS[1], 0] ^= 1
    assert copy_blocks(src, SLOTS, dst, TARGETS, 0, verify=False).all()
    ids = np.array(IDS, np.uint64)
    assert verify_blocks(dst, 0, TARGETS, ids).tolist() == [True, False, True]


@pytest.mark.parametrize("field", ["id", "hash_hi", "sum_lo", "length", "tokens", "check"])
def test_a_damaged_source_entry_is_not_copied(pair: Pair, put_blocks: Any, field: str) -> None:
    src, dst = pair
    put_blocks(src, 0, SLOTS.tolist(), IDS)
    put_blocks(dst, 0, TARGETS.tolist(), [21, 22, 23])
    src.table(0)[field][SLOTS[0]] ^= 1
    assert copy_blocks(src, SLOTS, dst, TARGETS, 0, verify=False).tolist() == [False, True, True]
    assert dst.table(0)["id"][TARGETS[0]] == 0


def test_an_entry_of_another_block_size_is_not_copied(pair: Pair, put_blocks: Any) -> None:
    src, dst = pair
    put_blocks(src, 0, SLOTS.tolist(), IDS)
    entry = src.table(0)[SLOTS[:1]]
    entry["length"] -= 1
    set_checks(entry)
    src.table(0)[SLOTS[:1]] = entry
    assert copy_blocks(src, SLOTS, dst, TARGETS, 0, verify=False).tolist() == [False, True, True]


def test_a_copy_of_an_unsealed_block_gets_a_checksum(pair: Pair, put_blocks: Any) -> None:
    src, dst = pair
    payload = put_blocks(src, 0, SLOTS.tolist(), IDS, summed=False)
    ids = np.array(IDS, np.uint64)
    assert check_entries(src, 0, SLOTS, ids).all()
    assert not verify_blocks(src, 0, SLOTS, ids).any()
    assert copy_blocks(src, SLOTS, dst, TARGETS, 0, verify=False).all()
    copied = dst.table(0)[TARGETS]
    sums = list(zip(copied["sum_hi"].tolist(), copied["sum_lo"].tolist(), strict=True))
    assert sums == [checksum(block) for block in payload]
    assert verify_blocks(dst, 0, TARGETS, ids).all()
    assert not has_sum(src.table(0)[SLOTS]).any()


@pytest.mark.parametrize("damage", ["payload", "entry", "id"])
def test_verification_finds_damage_where_the_block_lies(
    pair: Pair, put_blocks: Any, damage: str
) -> None:
    arena, _ = pair
    put_blocks(arena, 0, SLOTS.tolist(), IDS)
    ids = np.array(IDS, np.uint64)
    if damage == "payload":
        arena.payload(0)[SLOTS[2], 17] ^= 8
    elif damage == "entry":
        arena.table(0)["parent"][SLOTS[2]] ^= 8
    else:
        ids[2] = 99
    assert verify_blocks(arena, 0, SLOTS, ids).tolist() == [True, True, False]
    cheap = check_entries(arena, 0, SLOTS, ids).tolist()
    assert cheap == [True, True, damage == "payload"]


def test_arenas_with_different_pools_do_not_mix(open_arena: Callable[..., Arena]) -> None:
    src, dst = open_arena("device"), open_arena("host")
    src.add_pool(0, 64, 4)
    dst.add_pool(0, 128, 4)
    with pytest.raises(InvariantViolation, match="same pools"):
        copy_blocks(src, SLOTS, dst, TARGETS, 0, verify=True)


def test_threads_copy_different_slots_at_the_same_time(
    open_arena: Callable[..., Arena], put_blocks: Any
) -> None:
    src, dst = open_arena("device", 8 << 20), open_arena("host", 8 << 20)
    for arena in (src, dst):
        arena.add_pool(0, 64 << 10, 16)
    every = list(range(128))
    payload = put_blocks(src, 0, every, [slot + 1 for slot in every])

    def copy(part: int) -> bool:
        slots = np.arange(part, 128, 4, dtype=np.uint32)
        return bool(copy_blocks(src, slots, dst, slots, 0, verify=True).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(copy, range(4)))
    np.testing.assert_array_equal(dst.payload(0), payload)
