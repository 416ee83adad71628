"""The slot entry: its bytes, its check, and the digests' two forms."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.sums import checksum
from tierkv.errors import InvalidArgument
from tierkv.tiers.entry import (
    blank_entries,
    checks_match,
    copy_payload,
    entry_dtype,
    fill_sums,
    has_sum,
    make_entries,
    payload_sums,
    set_checks,
    split_hashes,
    sums_agree,
)


def some_entries(count: int, block_tokens: int) -> np.ndarray:
    tokens = np.arange(count * block_tokens, dtype=np.uint32).reshape(count, block_tokens)
    return make_entries(
        ids=np.arange(1, count + 1, dtype=np.uint64),
        parents=np.arange(count, dtype=np.uint64),
        hash_hi=7,
        hash_lo=8,
        tokens=tokens,
        length=4096,
        digest=bytes(range(16)),
    )


@pytest.mark.parametrize("block_tokens", [1, 2, 15, 16, 1024])
def test_an_entry_is_a_multiple_of_eight_bytes_without_gaps(block_tokens: int) -> None:
    dtype = entry_dtype(block_tokens)
    assert dtype.itemsize % 8 == 0
    assert sum(dtype[name].itemsize for name in dtype.names) == dtype.itemsize


def test_entries_have_the_documented_bytes() -> None:
    data = some_entries(1, 2).tobytes()
    assert data[:8] == (1).to_bytes(8, "little")
    assert data[16:24] == (7).to_bytes(8, "little")
    assert data[56:60] == (4096).to_bytes(4, "little")
    assert data[60:64] == (2).to_bytes(4, "little")
    assert data[64:80] == bytes(range(16))
    assert data[80:88] == bytes(4) + (1).to_bytes(4, "little")
    assert data[88:] == xxhash.xxh3_64_intdigest(data[:88]).to_bytes(8, "little")


def test_made_entries_match_their_checks_and_empty_ones_do_not() -> None:
    entries = np.concatenate([some_entries(3, 5), blank_entries(2, 5)])
    assert checks_match(entries).tolist() == [True] * 3 + [False] * 2
    assert checks_match(entries[:0]).tolist() == []


def test_entries_are_checked_through_strided_views() -> None:
    entries = some_entries(6, 4)
    entries["length"][2] = 1
    assert checks_match(entries[::2]).tolist() == [True, False, True]


@given(block_tokens=st.integers(1, 40), byte=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_breaks_the_check(block_tokens: int, byte: int, bit: int) -> None:
    entries = some_entries(2, block_tokens)
    data = entries.view(np.uint8).reshape(2, -1)
    data[1, byte % data.shape[1]] ^= 1 << bit
    assert checks_match(entries).tolist() == [True, False]


def test_a_sum_is_known_when_either_half_is_set() -> None:
    entries = some_entries(3, 4)
    entries["sum_hi"][0] = 1
    entries["sum_lo"][1] = 1
    assert has_sum(entries).tolist() == [True, True, False]


def test_sums_are_the_big_endian_halves_of_the_digests() -> None:
    payload = np.arange(5000, dtype=np.uint8).reshape(5, 1000)
    slots = np.array([4, 0, 4])
    hi, lo = payload_sums(payload, slots)
    expected = [checksum(payload[slot]) for slot in slots]
    assert list(zip(hi.tolist(), lo.tolist(), strict=True)) == expected

    copied = np.zeros_like(payload)
    assert [half.tolist() for half in copy_payload(copied, slots[:2], payload, slots[1:])] == [
        half[1:].tolist() for half in (hi, lo)
    ]
    np.testing.assert_array_equal(copied[[4, 0]], payload[[0, 4]])


def test_only_entries_that_know_no_sum_are_given_one() -> None:
    entries = some_entries(3, 5)
    entries["sum_hi"][1] = 7
    set_checks(entries)
    sums = np.array([1, 2], np.uint64), np.array([3, 4], np.uint64)
    fill_sums(entries, np.array([1, 2]), sums)
    assert entries["sum_hi"].tolist() == [0, 7, 2]
    assert entries["sum_lo"].tolist() == [0, 0, 4]
    assert checks_match(entries).all()
    assert sums_agree(entries, np.array([1, 2]), sums).tolist() == [False, True]


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_hashes_split_into_big_endian_halves(hashes: list[bytes]) -> None:
    high, low = split_hashes(b"".join(hashes))
    assert high.tolist() == [int.from_bytes(h[:8], "big") for h in hashes]
    assert low.tolist() == [int.from_bytes(h[8:], "big") for h in hashes]


def test_hashes_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="17 bytes"):
        split_hashes(bytes(17))
