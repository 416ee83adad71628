"""The loops, in Python and native, against one call of xxhash or numpy per block."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvariantViolation
from tierkv.native.loops import EntryColumns, Loops
from tierkv.tiers.entry import entry_dtype, make_entries

SEED = bytes(range(16))
LENGTHS = 1100
"""All shorter inputs are tried: every path for short ones, and the first rounds of long ones."""

RNG = np.random.default_rng(4)
BYTES = RNG.integers(0, 256, 4 << 20, np.uint8)


def digests(rows: np.ndarray) -> list[bytes]:
    return [xxhash.xxh3_128_digest(row.tobytes()) for row in rows]


def as_bytes(sums: np.ndarray) -> list[bytes]:
    assert sums.dtype == np.uint8
    assert sums.shape[1:] == (16,)
    return [row.tobytes() for row in sums]


def test_checksums_of_every_length(loops: Loops) -> None:
    for length in range(LENGTHS):
        pool = np.lib.stride_tricks.as_strided(BYTES[1:], (3, length), (length + 7, 1))
        slots = np.array([2, 0])
        assert as_bytes(loops.checksums(pool, slots)) == digests(pool[slots]), length


def test_checksums_of_long_blocks(loops: Loops) -> None:
    for length in [*range(4090, 4100), 65536, (2 << 20) - 1, *RNG.integers(1100, 2 << 20, 30)]:
        start = int(RNG.integers(0, 64))
        pool = BYTES[start : start + length].reshape(1, length)
        assert as_bytes(loops.checksums(pool, np.zeros(1, np.int64))) == digests(pool), length


def test_checks_of_every_length(loops: Loops) -> None:
    for length in [*range(17, LENGTHS), 5000]:
        rows = np.lib.stride_tricks.as_strided(BYTES[3:], (3, length), (length + 9, 1))
        expected = [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]
        assert loops.checks(rows).tolist() == expected, length


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=400),
    block_tokens=st.integers(1, 80),
    data=st.data(),
)
def test_chain_hashes_equal_the_oracle(loops: Loops, tokens, block_tokens, data) -> None:
    blocks = len(tokens) // block_tokens
    keys = st.lists(st.integers(0, 2**64 - 1) | st.just(0), min_size=blocks, max_size=blocks + 2)
    extras = data.draw(st.none() | keys)
    arguments = (
        SEED,
        np.array(tokens, np.uint32),
        block_tokens,
        None if extras is None else np.array(extras, np.uint64),
    )
    found = loops.chain_hashes(*arguments)
    assert found.shape == (blocks, 16)
    assert as_bytes(found) == as_bytes(chain_hashes(*arguments))


@pytest.mark.parametrize(
    ("seed", "extras"), [(SEED[:15], None), (SEED, np.array([1, 2], np.uint64))]
)
def test_chains_are_checked(loops: Loops, seed: bytes, extras: np.ndarray | None) -> None:
    with pytest.raises(InvariantViolation):
        loops.chain_hashes(seed, np.zeros(12, np.uint32), 4, extras)


@pytest.mark.parametrize("length", [0, 1, 100, 240, 241, 1000, 4096, 5000, 65536, 300_000])
@pytest.mark.parametrize("offset", [0, 3, 16, 48])
def test_copies_and_their_checksums(loops: Loops, length: int, offset: int) -> None:
    stride = length + 64 - length % 64
    memory = np.full(12 * stride + 64, 7, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    pool = memory[start : start + 11 * stride].reshape(11, stride)[:, :length]
    source = BYTES[: 4 * (length + 5)].reshape(4, length + 5)[:, 3 : 3 + length]
    slots = np.array([9, 0, 4, 10], np.int32)

    assert as_bytes(loops.copy_in(pool, slots, source)) == digests(source)

    np.testing.assert_array_equal(pool[slots], source)
    untouched = np.ones(len(memory), np.bool_)
    for slot in slots.tolist():
        untouched[start + slot * stride : start + slot * stride + length] = False
    assert (memory[untouched] == 7).all()

    back = np.zeros((5, length), np.uint8)
    loops.copy_out(pool, slots, back[1:])
    np.testing.assert_array_equal(back[1:], source)
    assert not back[0].any()

    other = np.zeros((3, length), np.uint8)
    sums = loops.copy_between(other, np.array([2, 0]), pool, slots[[3, 1]])
    assert as_bytes(sums) == digests(source[[3, 1]])
    np.testing.assert_array_equal(other[[2, 0]], source[[3, 1]])
    assert not other[1].any()


def test_nothing_is_no_work(loops: Loops) -> None:
    pool, none = np.zeros((4, 100), np.uint8), np.zeros(0, np.uint32)
    assert loops.checksums(pool, none).shape == (0, 16)
    assert loops.copy_in(pool, none, pool[:0]).shape == (0, 16)
    assert loops.copy_between(pool[:0], none, pool, none).shape == (0, 16)
    loops.copy_out(pool, none, pool[:0])
    assert loops.checks(pool[:0]).shape == (0,)
    assert loops.chain_hashes(SEED, none, 16).shape == (0, 16)


@pytest.mark.parametrize("slot", [-1, 4, 2**32])
def test_slots_outside_of_the_pool_are_refused(loops: Loops, slot: int) -> None:
    pool, rows = np.zeros((4, 300), np.uint8), np.ones((2, 300), np.uint8)
    slots = np.array([0, slot])
    for call in (
        lambda: loops.checksums(pool, slots),
        lambda: loops.copy_in(pool, slots, rows),
        lambda: loops.copy_out(pool, slots, rows),
        lambda: loops.copy_between(pool, slots, rows, np.array([0, 1])),
        lambda: loops.copy_between(rows, np.array([0, 1]), pool, slots),
    ):
        with pytest.raises(InvariantViolation, match="slots"):
            call()
    assert not pool.any()
    assert rows.all()


def test_shapes_that_do_not_fit_are_refused(loops: Loops) -> None:
    pool, slots = np.zeros((4, 300), np.uint8), np.array([0, 1])
    wide, many = np.ones((2, 301), np.uint8), np.ones((3, 300), np.uint8)
    for call in (
        lambda: loops.copy_in(pool, slots, wide),
        lambda: loops.copy_in(pool, slots, many),
        lambda: loops.copy_out(pool, slots, wide),
        lambda: loops.copy_out(pool, slots, many),
        lambda: loops.copy_between(pool, slots, wide, slots),
        lambda: loops.copy_between(pool, slots, many, np.array([0, 1, 2])),
        lambda: loops.checks(pool[:, :16]),
        lambda: loops.checksums(pool[:, ::2], slots),
        lambda: loops.checks(pool[:, ::2]),
    ):
        with pytest.raises(InvariantViolation):
            call()
    assert not pool.any()


def test_a_target_that_is_read_only_is_refused(loops: Loops) -> None:
    pool, slots = np.zeros((4, 300), np.uint8), np.array([0, 1])
    pool.flags.writeable = False
    with pytest.raises((InvariantViolation, ValueError)):
        loops.copy_in(pool, slots, np.ones((2, 300), np.uint8))
    with pytest.raises((InvariantViolation, ValueError)):
        loops.copy_out(np.ones((4, 300), np.uint8), slots, pool[:2])
    assert not pool.any()


def test_a_checksum_is_that_of_the_bytes_that_came_to_lie_there(loops: Loops) -> None:
    """Somebody writes into the source meanwhile; what is said of the copy is true all the same."""
    source, target = (
        np.zeros((1, (1 << 20) + 33), np.uint8),
        np.empty((1, (1 << 20) + 33), np.uint8),
    )
    slots, stop = np.zeros(1, np.int64), threading.Event()

    def scribble() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            source[:] = value

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        for _ in range(50):
            sums = loops.copy_in(target, slots, source)
            assert as_bytes(sums) == digests(target)
    finally:
        stop.set()
        scribbler.join()


@pytest.mark.parametrize("block_tokens", [1, 2, 15, 16, 1023])
@pytest.mark.parametrize("sealed", [False, True])
def test_entries_are_written_as_they_are_made(
    loops: Loops, block_tokens: int, sealed: bool
) -> None:
    count = 5
    words = [RNG.integers(0, 2**63, count).astype(np.uint64) for _ in range(7)]
    tokens = RNG.integers(0, 2**32, (count, block_tokens)).astype(np.uint32)
    digest = bytes(range(16)) if sealed else bytes(16)
    if not sealed:
        words[1:], tokens[:] = [np.zeros(count, np.uint64)] * 6, 0
    made = make_entries(
        ids=words[0],
        parents=words[1],
        hash_hi=words[2],
        hash_lo=words[3],
        sum_hi=words[4],
        sum_lo=words[5],
        extra=words[6],
        tokens=tokens,
        length=4096,
        digest=digest,
    )
    table = np.frombuffer(bytearray(b"x" * 9 * made.dtype.itemsize), np.uint8).reshape(9, -1)
    slots = np.array([7, 0, 3, 8, 4])
    columns = EntryColumns(
        tuple(words) if sealed else (words[0], *[None] * 6),
        *(4096, block_tokens, digest, tokens if sealed else None),
    )
    loops.write_entries(table, slots, columns)
    found = table.view(entry_dtype(block_tokens)).reshape(-1)
    assert found[slots].tobytes() == made.tobytes()
    assert table[[1, 2, 5, 6]].tobytes() == b"x" * 4 * made.dtype.itemsize


def test_no_entry_is_written_where_there_is_no_slot(loops: Loops) -> None:
    size = entry_dtype(2).itemsize
    table = np.zeros((3, size), np.uint8)
    ids = np.arange(1, 3, dtype=np.uint64)
    columns = EntryColumns((ids, *[None] * 6), 4096, 2, bytes(16), None)
    for slot in (3, 2**32):
        with pytest.raises(InvariantViolation):
            loops.write_entries(table, np.array([0, slot]), columns)
    assert not table.any()


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
def test_content_is_compared(loops: Loops, block_tokens: int) -> None:
    count = 20
    tokens = RNG.integers(0, 2**32, (count, block_tokens)).astype(np.uint32)
    extras = RNG.integers(0, 2**63, count).astype(np.uint64)
    table = np.zeros((count, entry_dtype(block_tokens).itemsize), np.uint8)
    slots = RNG.permutation(count)
    ids = np.arange(count, dtype=np.uint64)
    words = (ids, None, None, None, None, None, extras)
    loops.write_entries(table, slots, EntryColumns(words, 1, block_tokens, bytes(16), tokens))
    assert loops.same_content(table, slots, tokens, extras).all()
    other_tokens, other_extras = tokens.copy(), extras.copy()
    other_tokens[3, -1] ^= 1
    other_tokens[7, 0] ^= 1 << 31
    other_extras[11] ^= 1
    found = loops.same_content(table, slots, other_tokens, other_extras)
    assert np.flatnonzero(~found).tolist() == [3, 7, 11]
    assert loops.same_content(table, slots[::-1], tokens[::-1], extras[::-1]).all()
    with pytest.raises(InvariantViolation):
        loops.same_content(table, slots + 1, tokens, extras)
