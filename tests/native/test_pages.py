"""Copies between slots and an engine's pages, against the same bytes put together by numpy."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.native.test_reading import Memory, chain, payload_of
from tierkv.errors import InvalidArgument, InvariantViolation
from tierkv.native.loops import Loops
from tierkv.native.pages import PagedBlocks, Pages

BLOCKS = 9
WIDTHS = st.lists(st.integers(1, 300) | st.sampled_from([64, 1024, 4096]), min_size=1, max_size=7)


def engine(widths: list[int], seed: int = 0, gap: int = 5, offset: int = 0) -> Pages:
    """Arrays of random bytes, with gaps between their rows."""
    rng = np.random.default_rng(seed)
    arrays = []
    for width in widths:
        memory = rng.integers(0, 256, BLOCKS * (width + gap) + offset, np.uint8)
        arrays.append(memory[offset:].reshape(BLOCKS, width + gap)[:, :width])
    return Pages(arrays)


def paged(pages: Pages, *blocks: int) -> PagedBlocks:
    return PagedBlocks(pages, np.array(blocks, np.uint32))


def whole(blocks: PagedBlocks) -> np.ndarray:
    """The blocks in one piece each, u8 [n, block bytes]."""
    return np.concatenate([array[blocks.ids] for array in blocks.pages.arrays], 1)


def digests(rows: np.ndarray) -> list[bytes]:
    return [xxhash.xxh3_128_digest(row.tobytes()) for row in rows]


@settings(deadline=None)
@given(widths=WIDTHS, offset=st.integers(0, 17))
@example(widths=[240], offset=0)
@example(widths=[241], offset=0)
@example(widths=[1, 239, 1], offset=0)
@example(widths=[64] * 17, offset=0)
@example(widths=[1024, 1], offset=0)
@example(widths=[1023, 2, 63, 64, 65], offset=3)
@example(widths=[1] * 300, offset=0)
@example(widths=[5000, 4096, 20_000], offset=0)
def test_pages_are_copied_both_ways(loops: Loops, widths: list[int], offset: int) -> None:
    blocks = paged(engine(widths, offset=offset), 7, 0, 3)
    size, stride = sum(widths), sum(widths) + 70
    memory = np.full(6 * stride + 128, 9, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    padded = memory[start : start + 6 * stride].reshape(6, stride)
    pool = padded[:, :size]
    slots = np.array([4, 0, 5], np.int32)
    expected = whole(blocks)

    sums = loops.copy_in(pool, slots, blocks)

    assert [one.tobytes() for one in sums] == digests(expected)
    np.testing.assert_array_equal(pool[slots], expected)
    assert (pool[[1, 2, 3]] == 9).all()
    assert (padded[:, size:] == 9).all()

    target = engine(widths, seed=1, offset=offset)
    before = [array.copy() for array in target.arrays]
    loops.copy_out(pool, slots, paged(target, 2, 8, 1))
    np.testing.assert_array_equal(whole(paged(target, 2, 8, 1)), expected)
    others = [0, 3, 4, 5, 6, 7]
    for array, old in zip(target.arrays, before, strict=True):
        np.testing.assert_array_equal(array[others], old[others])


@pytest.mark.parametrize("widths", [[2 << 20, 4096, 1 << 20], [(1 << 20) + 8, (1 << 20) - 5]])
def test_much_is_copied_past_the_caches(loops: Loops, widths: list[int]) -> None:
    blocks = paged(engine(widths, gap=16), 8, 2)
    pool = np.zeros((2, sum(widths)), np.uint8)
    sums = loops.copy_in(pool, np.arange(2), blocks)
    assert [one.tobytes() for one in sums] == digests(whole(blocks))
    np.testing.assert_array_equal(pool, whole(blocks))


@settings(deadline=None)
@given(widths=WIDTHS, first=st.integers(0, 4), named=st.booleans())
@example(widths=[240], first=1, named=False)
@example(widths=[30, 250], first=0, named=True)
def test_a_chain_is_read_into_pages(loops: Loops, widths: list[int], first: int, named) -> None:
    memory, wanted, slots = Memory(sum(widths)), chain(1), np.array([5, 0, 23, 9], np.uint32)
    memory.put(wanted, slots.tolist())
    pages = engine(widths)
    before = [array.copy() for array in pages.arrays]
    out = paged(pages, *[7, 0, 3, 4][first:])
    given = (wanted.hashes, wanted.tokens.reshape(-1), None, slots if named else None)
    assert loops.read(memory.readable, *given, out, first) == 4
    for n, row in enumerate(whole(out)):
        np.testing.assert_array_equal(row, payload_of(wanted.hashes[first + n], sum(widths)))
    others = [b for b in range(BLOCKS) if b not in out.ids]
    for array, old in zip(pages.arrays, before, strict=True):
        np.testing.assert_array_equal(array[others], old[others])


def read(loops: Loops, memory: Memory, wanted, first: int, pages: Pages) -> int:
    return loops.read(
        *(memory.readable, wanted.hashes, wanted.tokens.reshape(-1), None, None),
        *(paged(pages, *range(len(wanted) - first)), first),
    )


def test_no_byte_of_a_payload_may_be_another(loops: Loops) -> None:
    widths = [60, 1, 130, 64, 66]
    memory, wanted, pages = Memory(sum(widths)), chain(1, 1), engine(widths)
    memory.put(wanted, [3])
    for at in range(memory.block_bytes):
        memory.slots[3, at] ^= 4
        assert read(loops, memory, wanted, 0, pages) == 0, at
        memory.slots[3, at] ^= 4
    assert read(loops, memory, wanted, 0, pages) == 1


def test_what_is_not_copied_must_be_cached_nonetheless(loops: Loops) -> None:
    memory, wanted, pages = Memory(), chain(1), engine([40, 60])
    memory.put(wanted, [5, 0, 23, 9])
    memory.slots[5] ^= 1  # nobody looks at bytes that are not copied
    assert read(loops, memory, wanted, 1, pages) == 4
    memory.entries["tokens"][5, 0] ^= 1
    assert read(loops, memory, wanted, 1, pages) == 0
    memory.put(wanted, [5, 0, 23, 9])
    memory.entries["check"][0] ^= 1
    assert read(loops, memory, wanted, 3, pages) == 1
    assert read(loops, memory, wanted, 4, pages) == 1


def test_what_is_read_while_it_is_written_is_right(loops: Loops) -> None:
    """A thread puts now this chain, now that one into the same slots, as fast as it can."""
    widths = [1000, 7, 930, 1063]
    memory, chains, stop = Memory(sum(widths)), [chain(n) for n in range(3)], threading.Event()

    def scribble() -> None:
        for one in itertools.cycle(chains):
            if stop.is_set():
                return
            memory.put(one, [0, 1, 2, 3])

    def right(one) -> int:
        pages = engine(widths)
        count = read(loops, memory, one, 0, pages)
        rows = whole(paged(pages, *range(count)))
        for n in range(count):
            np.testing.assert_array_equal(rows[n], payload_of(one.hashes[n], sum(widths)))
        return count

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(100):
            for one in chains:
                right(one)
    finally:
        stop.set()
        writer.join()
    memory.put(chains[0], [0, 1, 2, 3])
    assert right(chains[0]) == 4


def test_sums_are_of_what_came_to_lie_in_the_slots(loops: Loops) -> None:
    """While somebody writes into the pages."""
    pages, stop = engine([5000, 33, 2000], gap=0), threading.Event()

    def scribble() -> None:
        for value in itertools.cycle(range(256)):
            if stop.is_set():
                return
            for array in pages.arrays:
                array[:] = value

    pool = np.zeros((2, pages.block_bytes), np.uint8)
    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(300):
            sums = loops.copy_in(pool, np.arange(2), paged(pages, 1, 6))
            assert [one.tobytes() for one in sums] == digests(pool)
    finally:
        stop.set()
        writer.join()


def test_what_does_not_fit_is_refused(loops: Loops) -> None:
    pages, pool, slots = engine([40, 60]), np.zeros((4, 100), np.uint8), np.array([0, 3])
    for arguments in (
        (pool[:, :99], slots, paged(pages, 0, 1)),
        (pool, slots, paged(pages, 0)),
        (pool, slots + 1, paged(pages, 0, 1)),
        (pool, slots, paged(pages, 0, BLOCKS)),
    ):
        for call in (loops.copy_in, loops.copy_out):
            with pytest.raises(InvariantViolation):
                call(*arguments)
    fixed = np.zeros((BLOCKS, 100), np.uint8)
    fixed.flags.writeable = False
    loops.copy_in(pool, slots, paged(Pages([fixed]), 0, 1))
    with pytest.raises(InvariantViolation):
        loops.copy_out(pool, slots, paged(Pages([fixed]), 0, 1))
    with pytest.raises(InvariantViolation):
        loops.copy_in(fixed, slots, paged(pages, 0, 1))
    memory, wanted = Memory(), chain(1)
    for out, first in (
        (paged(pages, 0, 1, 2), 0),
        (paged(pages, 0, 1, 2, BLOCKS), 0),
        (paged(Pages([fixed]), 0, 1, 2, 3), 0),
        (paged(engine([99]), 0, 1, 2, 3), 0),
        (paged(pages), 5),
        (paged(pages, 0, 1, 2, 3, 4), -1),
    ):
        with pytest.raises(InvariantViolation):
            loops.read(
                *(memory.readable, wanted.hashes, wanted.tokens.reshape(-1), None, None),
                *(out, first),
            )


def test_no_blocks_are_no_work(loops: Loops) -> None:
    pages, pool, none = engine([40, 60]), np.zeros((4, 100), np.uint8), np.zeros(0, np.uint32)
    assert loops.copy_in(pool, none, paged(pages)).shape == (0, 16)
    loops.copy_out(pool, none, paged(pages))
    assert read(loops, Memory(), chain(1, 0), 0, pages) == 0


ROWS = np.zeros((4, 8), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ([], "no arrays"),
        ([ROWS, b"bytes"], r"pages\[1\] is bytes"),
        ([ROWS.view(np.int8)], r"pages\[0\] is int8 \[4, 8\]"),
        ([ROWS[0]], r"pages\[0\] is uint8 \[8\]"),
        ([ROWS[:, :0]], r"pages\[0\] is uint8 \[4, 0\]"),
        ([ROWS[:, ::2]], r"pages\[0\] has strides \[8, 2\]"),
        ([ROWS, ROWS[::-1]], r"pages\[1\] has strides \[-8, 1\]"),
        ([ROWS.T], r"pages\[0\] has strides \[1, 8\]"),
    ],
)
def test_arrays_that_are_no_pages(arrays: list, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Pages(arrays)


def test_pages_say_what_they_are() -> None:
    pages = Pages([ROWS, np.zeros((3, 5), np.uint8)])
    assert (len(pages), pages.block_bytes, pages.writable) == (3, 13, True)
    assert repr(pages) == "<Pages of 3 blocks, 13 bytes each in 2 arrays>"
