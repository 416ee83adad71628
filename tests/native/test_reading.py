"""Reading cached blocks, in Python and native: what is not exactly the block is not found."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvariantViolation
from tierkv.native.directory import PLACES, bucket_count
from tierkv.native.loops import Loops, PythonLoops
from tierkv.native.reading import Readable
from tierkv.tiers.entry import entry_dtype, make_entries, set_checks, split_hashes

DIGEST = bytes(range(16))
TOKENS = 3
SLOTS = 24
PYTHON = PythonLoops("writes what is read")


@dataclass
class Chain:
    """Blocks of random tokens, with the names that they have."""

    tokens: np.ndarray
    extras: np.ndarray | None = None
    digest: bytes = DIGEST
    hashes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.hashes = chain_hashes(self.digest, self.tokens.reshape(-1), TOKENS, self.extras)

    def __len__(self) -> int:
        return len(self.hashes)


def chain(seed: int, blocks: int = 4, extras: np.ndarray | None = None) -> Chain:
    rng = np.random.default_rng(seed)
    return Chain(rng.integers(0, 2**32, (blocks, TOKENS)).astype(np.uint32), extras)


def payload_of(name: np.ndarray, block_bytes: int) -> np.ndarray:
    return np.resize(np.concatenate([name, name[::-1] + np.uint8(1)]), block_bytes)


class Memory:
    """A pool with entries, payload and a directory, as a daemon keeps it."""

    def __init__(self, block_bytes: int = 100) -> None:
        self.entries = np.zeros(SLOTS, entry_dtype(TOKENS))
        stride = block_bytes + 28
        self.slots = np.zeros((SLOTS, stride), np.uint8)
        self.places = np.zeros((bucket_count(SLOTS), PLACES), np.uint64)
        self.where = np.zeros(SLOTS, np.uint32)
        self.block_bytes = block_bytes
        self.ids = itertools.count(1)

    @property
    def readable(self) -> Readable:
        rows = self.entries.view(np.uint8).reshape(SLOTS, -1)
        return Readable(rows, self.slots[:, : self.block_bytes], self.places, DIGEST, TOKENS)

    def put(self, wanted: Chain, slots: list[int], ids: list[int] | None = None) -> None:
        """Blocks of a chain come to lie in these slots."""
        names = ids or [next(self.ids) for _ in slots]
        hi, lo = split_hashes(wanted.hashes.tobytes())
        count = len(slots)
        for n, slot in enumerate(slots):
            payload = payload_of(wanted.hashes[n], self.block_bytes)
            self.slots[slot, : self.block_bytes] = payload
            sums = split_hashes(xxhash.xxh3_128_digest(payload.tobytes()))
            self.entries[slot] = make_entries(
                ids=np.array([names[n]], np.uint64),
                parents=names[n - 1] if n else 0,
                hash_hi=hi[n : n + 1],
                hash_lo=lo[n : n + 1],
                sum_hi=sums[0],
                sum_lo=sums[1],
                tokens=wanted.tokens[n : n + 1],
                length=self.block_bytes,
                digest=wanted.digest,
                extra=0 if wanted.extras is None else wanted.extras[n],
            )[0]
        PYTHON.enter(self.places, self.where, np.array(slots), lo[:count])

    def read(self, loops: Loops, wanted: Chain, slots: list[int] | None = None) -> int:
        """How many blocks are found; their bytes are checked."""
        out = np.full((len(wanted), self.block_bytes), 7, np.uint8)
        count = loops.read(
            self.readable,
            wanted.hashes,
            wanted.tokens.reshape(-1),
            wanted.extras,
            None if slots is None else np.array(slots, np.uint32),
            out,
        )
        for n in range(count):
            np.testing.assert_array_equal(out[n], payload_of(wanted.hashes[n], self.block_bytes))
        return count


@pytest.mark.parametrize("block_bytes", [1, 16, 100, 240, 241, 4096, 70_000])
def test_a_chain_is_read(loops: Loops, block_bytes: int) -> None:
    memory, wanted = Memory(block_bytes), chain(1)
    memory.put(wanted, [5, 0, 23, 9])
    assert memory.read(loops, wanted) == 4
    assert memory.read(loops, wanted, [5, 0, 23, 9]) == 4


def test_as_much_is_read_as_is_there(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1)
    assert memory.read(loops, wanted) == 0
    memory.put(wanted, [5, 0])
    assert memory.read(loops, wanted) == 2
    assert memory.read(loops, chain(2)) == 0
    assert memory.read(loops, chain(1, 0)) == 0


def test_slots_that_are_named_are_looked_at_and_no_others(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1)
    memory.put(wanted, [5, 0, 23, 9])
    assert memory.read(loops, wanted, [5, 0, 9, 23]) == 2
    memory.places[:] = 0
    assert memory.read(loops, wanted) == 0
    assert memory.read(loops, wanted, [5, 0, 23, 9]) == 4


def test_extra_keys_make_another_block(loops: Loops) -> None:
    memory, keys = Memory(), np.array([0, 7, 0, 9], np.uint64)
    plain, wanted = chain(1), chain(1, extras=keys)
    memory.put(plain, [0, 1, 2, 3])
    assert memory.read(loops, wanted) == 1
    memory.put(wanted, [4, 5, 6, 7])
    assert memory.read(loops, wanted) == 4
    assert memory.read(loops, plain) == 1  # the first one's youngest block has other children


FIELDS = ["parent", "hash_hi", "hash_lo", "extra", "digest", "tokens"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("at", [0, 2])
def test_an_entry_that_says_anything_else_is_another_block(
    loops: Loops, field: str, at: int
) -> None:
    memory, wanted = Memory(), chain(1)
    slots = [5, 0, 23, 9]
    memory.put(wanted, slots)
    entry = memory.entries[slots[at] : slots[at] + 1]
    entry[field].reshape(-1)[-1:] ^= np.array([1], entry[field].dtype)
    set_checks(entry)
    assert memory.read(loops, wanted) == at
    assert memory.read(loops, wanted, slots) == at


def test_no_byte_of_an_entry_may_be_another(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1, 1)
    memory.put(wanted, [3])
    entry = memory.entries[3:4].view(np.uint8)
    for at in range(len(entry)):
        entry[at] ^= 4
        assert memory.read(loops, wanted) == 0, at
        entry[at] ^= 4
    assert memory.read(loops, wanted) == 1


def test_no_byte_of_a_payload_may_be_another(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1, 1)
    memory.put(wanted, [3])
    for at in range(memory.block_bytes):
        memory.slots[3, at] ^= 4
        assert memory.read(loops, wanted) == 0, at
        memory.slots[3, at] ^= 4
    assert memory.read(loops, wanted) == 1


def test_a_payload_whose_checksum_is_not_known_is_not_read(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1, 1)
    memory.put(wanted, [3])
    memory.entries["sum_hi"][3] = memory.entries["sum_lo"][3] = 0
    set_checks(memory.entries[3:4])
    assert memory.read(loops, wanted) == 0


def test_of_two_blocks_of_one_name_the_younger_is_read_and_its_children(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1)
    memory.put(wanted, [0, 1, 2, 3], ids=[11, 12, 13, 14])
    memory.put(wanted, [4, 5, 6, 7], ids=[21, 22, 23, 24])
    assert memory.read(loops, wanted) == 4
    memory.put(chain(3), [5])
    assert memory.read(loops, wanted) == 1  # the older second block has another parent


def test_the_older_of_two_is_read_if_the_younger_is_damaged(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1)
    memory.put(wanted, [4, 5, 6, 7], ids=[21, 22, 23, 24])
    memory.put(wanted, [0, 1, 2, 3], ids=[11, 12, 13, 14])
    memory.slots[4:8, 50] ^= 1
    assert memory.read(loops, wanted) == 4
    memory.entries["check"][0] ^= 1
    assert memory.read(loops, wanted) == 0


def test_places_that_name_no_slot_are_passed_over(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1, 1)
    memory.put(wanted, [3])
    _, lo = split_hashes(wanted.hashes.tobytes())
    bucket = memory.places[int(lo[0]) & (len(memory.places) - 1)]
    tag = int(lo[0]) & ~0xFFFFFFFF
    bucket[1:] = [tag | low for low in (0, 0xFFFFFFFF, SLOTS + 1, 1, 4, 9, 2)]
    assert memory.read(loops, wanted) == 1


NOISE = st.lists(
    st.tuples(
        st.sampled_from(["put", "entry", "payload", "place"]),
        st.integers(0, 3),
        st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4, unique=True),
        st.integers(0, 2**20),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(noise=NOISE)
def test_both_find_the_same_in_any_memory(loops: Loops, noise) -> None:
    memory = Memory()
    for what, seed, slots, bit in noise:
        if what == "put":
            memory.put(chain(seed), slots)
        else:
            bytes_of = {
                "entry": memory.entries.view(np.uint8),
                "payload": memory.slots.reshape(-1),
                "place": memory.places.reshape(-1).view(np.uint8),
            }[what]
            bytes_of[bit % len(bytes_of)] ^= 1 << bit % 8
    for seed in range(4):
        assert memory.read(loops, chain(seed)) == memory.read(PYTHON, chain(seed))


def test_what_is_read_while_it_is_written_is_right(loops: Loops) -> None:
    """A thread puts now this chain, now that one into the same slots, as fast as it can."""
    memory, chains, stop = Memory(3000), [chain(seed) for seed in range(3)], threading.Event()

    def scribble() -> None:
        for one in itertools.cycle(chains):
            if stop.is_set():
                return
            memory.put(one, [0, 1, 2, 3])

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(200):
            for one in chains:
                memory.read(loops, one)
    finally:
        stop.set()
        writer.join()
    memory.put(chains[0], [0, 1, 2, 3])
    assert memory.read(loops, chains[0]) == 4


def test_what_does_not_fit_is_refused(loops: Loops) -> None:
    memory, wanted = Memory(), chain(1)
    out, ids = np.zeros((4, 100), np.uint8), wanted.tokens.reshape(-1)
    readable, slots = memory.readable, np.arange(4, dtype=np.uint32)
    read_only = np.zeros((4, 100), np.uint8)
    read_only.flags.writeable = False
    for arguments in (
        (wanted.hashes, ids[:-1], None, None, out),
        (wanted.hashes, ids, None, None, out[:3]),
        (wanted.hashes, ids, None, None, out[:, :99]),
        (wanted.hashes, ids, None, None, read_only),
        (wanted.hashes, ids, np.zeros(3, np.uint64), None, out),
        (wanted.hashes, ids, None, slots[:3], out),
        (wanted.hashes, ids, None, slots + SLOTS - 3, out),
    ):
        with pytest.raises(InvariantViolation):
            loops.read(readable, *arguments)


def test_memory_that_does_not_fit_is_refused() -> None:
    entries, payload = np.zeros((4, 96), np.uint8), np.zeros((4, 100), np.uint8)
    places = np.zeros((2, PLACES), np.uint64)
    Readable(entries, payload, places, DIGEST, 2)
    for arguments in (
        (entries, payload, places, DIGEST, 3),
        (entries, payload[:3], places, DIGEST, 2),
        (entries, payload, np.zeros((3, PLACES), np.uint64), DIGEST, 2),
        (entries, payload, places[:, :4], DIGEST, 2),
        (entries, payload, places, DIGEST[:-1], 2),
    ):
        with pytest.raises(InvariantViolation):
            Readable(*arguments)
