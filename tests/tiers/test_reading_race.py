"""A process seals, evicts and uses slots again as fast as it can; another one reads them."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tierkv.core.ids import Tier
from tierkv.core.slot_tables import BlockEntries
from tierkv.native.library import load
from tierkv.native.loops import Loops, NativeLoops, PythonLoops, loops
from tierkv.native.reading import Readable
from tierkv.tiers.arena import Arena
from tierkv.tiers.entry import payload_sums, split_hashes
from tierkv.tiers.tables import ArenaTables

BLOCK_BYTES = 1500
TOKENS = 4
SLOTS = 6
BLOCKS = 3
CHAINS = 4
FOUND = 2000
"""Blocks that are to be found, each in the middle of all that writing."""
DIGEST = bytes(range(16))
FORK = multiprocessing.get_context("fork")


def tokens_of(chain: int) -> np.ndarray:
    """All chains begin with the same block."""
    ids = np.random.default_rng(chain).integers(0, 2**32, (BLOCKS, TOKENS)).astype(np.uint32)
    ids[0] = 7
    return ids


def payload_of(name: np.ndarray) -> np.ndarray:
    return np.resize(name, BLOCK_BYTES)


def write(arena: Arena) -> None:
    """Put random chains into random slots, for ever: three of six, so they take each other's."""
    tables, rng, next_id = ArenaTables({Tier.DEVICE: arena}), np.random.default_rng(0), 1
    every = np.arange(SLOTS)
    while True:
        chain = int(rng.integers(CHAINS))
        slots = rng.permutation(every)[:BLOCKS]
        ids = np.arange(next_id, next_id + BLOCKS).astype(np.uint64)
        next_id += BLOCKS
        tables.open(Tier.DEVICE, 0, slots, ids)
        ids_of = tokens_of(chain)
        hashes = loops().chain_hashes(DIGEST, ids_of.reshape(-1), TOKENS)
        for slot, name in zip(slots, hashes, strict=True):
            arena.payload(0)[slot] = payload_of(name)
        hi, lo = split_hashes(hashes.tobytes())
        sums = payload_sums(arena.payload(0), slots)
        parents = np.concatenate([np.zeros(1, np.uint64), ids[:-1]])
        entries = BlockEntries(
            *(DIGEST, ids, parents, hi, lo), *sums, np.zeros(BLOCKS, np.uint64), ids_of
        )
        tables.fill(Tier.DEVICE, 0, slots, entries)


@pytest.fixture
def written(open_arena: Any) -> Iterator[Arena]:
    """An arena that a process writes into."""
    arena = open_arena(budget_bytes=SLOTS * 1536)
    arena.add_pool(0, BLOCK_BYTES, TOKENS)
    writer = FORK.Process(target=write, args=(arena,))
    writer.start()
    yield arena
    writer.kill()
    writer.join()


def readable(arena: Arena) -> Readable:
    """The arena's pool, mapped as a worker does."""
    from tierkv.client.attach import map_shared

    place = arena.table_place(0)
    at = place.directory_offset - place.entries_offset
    mapped = map_shared(
        arena.shown_table_fd, at + 64 * place.buckets, place.entries_offset, writable=False
    )
    entries = mapped[: SLOTS * place.entry_bytes].reshape(SLOTS, place.entry_bytes)
    places = mapped[at:].view(np.uint64).reshape(-1, 8)
    return Readable(entries, arena.payload(0), places, DIGEST, TOKENS)


@pytest.mark.parametrize("kind", ["native", "python"])
def test_never_a_wrong_byte(written: Arena, kind: str) -> None:
    reading: Loops = PythonLoops("the test asks for it")
    if kind == "native":
        reading = NativeLoops(load({}))
    pool, out = readable(written), np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    chains = [tokens_of(chain).reshape(-1) for chain in range(CHAINS)]
    names = [loops().chain_hashes(DIGEST, ids, TOKENS) for ids in chains]
    found = 0
    for chain in itertools.cycle(range(CHAINS)):
        count = reading.read(pool, names[chain], chains[chain], None, None, out)
        for block in range(count):
            np.testing.assert_array_equal(out[block], payload_of(names[chain][block]))
        found += count
        if found >= FOUND:
            break
        assert multiprocessing.active_children(), "the writer has died"
