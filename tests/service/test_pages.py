"""Namespace.write_pages and read_pages with a real daemon: what is copied, what comes back."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, payloads, press, sized, tokens
from tests.service.running import Daemon, running
from tierkv import KVSpec, Pages

SLOTS = 128
BLOCKS = 20
"""More than are written in one round trip."""

PAGES = 4
PACKED = KVSpec(model="engine", packing="engine-1", packed_bytes=SPEC.block_bytes, block_tokens=16)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(sized(SLOTS, 64, 1024)) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


@pytest.fixture
def ns(client):
    return client.namespace(PACKED)


def engine(blocks: int = BLOCKS) -> Pages:
    """An engine's memory in one allocation: its layers lie side by side."""
    memory = np.zeros((blocks, PAGES, PACKED.block_bytes // PAGES), np.uint8)
    return Pages([memory[:, layer] for layer in range(PAGES)])


def compute(ids: np.ndarray) -> tuple[Pages, np.ndarray]:
    """What an engine has after it computed a prompt, and in which of its blocks."""
    rows = payloads(PACKED, ids)
    pages, places = engine(len(rows)), np.random.default_rng(1).permutation(len(rows))
    for layer, part in enumerate(np.split(rows, PAGES, axis=1)):
        pages.arrays[layer][places] = part
    return pages, places


def put(ns, ids: np.ndarray, first: int = 0) -> int:
    pages, places = compute(ids)
    return ns.write_pages(ids, pages, places[first:], first=first)


def get(ns, ids: np.ndarray, first: int = 0) -> int:
    """How many blocks come back; all of them must be right."""
    pages, places = engine(), np.arange(len(ids) // BLOCK - first)[::-1]
    found = ns.read_pages(ids, pages, places, first=first)
    back = np.concatenate([array[places[:found]] for array in pages.arrays], 1)
    np.testing.assert_array_equal(back, payloads(PACKED, ids)[first:][:found])
    return found


def deduplicated(daemon: Daemon) -> float:
    return daemon.metrics()["tierkv_deduplicated_blocks_total"]


def test_pages_come_back_from_every_tier(ns, client) -> None:
    ids = [tokens(BLOCKS, seed=n) for n in range(4)]
    for one in ids:
        assert put(ns, one) == BLOCKS
    assert [get(ns, one) for one in ids] == [BLOCKS] * 4
    assert get(ns, ids[0], BLOCKS - 3) == 3
    plain = client.namespace(SPEC)
    press(client, plain, SLOTS, seed=100)
    assert ns.lookup(ids[0]).device == 0
    assert get(ns, ids[0], 5) == BLOCKS - 5
    assert ns.lookup(ids[0]).device == BLOCKS
    press(client, plain, 2 * SLOTS, seed=200)
    assert ns.lookup(ids[1]).disk == BLOCKS
    assert [get(ns, one) for one in ids] == [BLOCKS] * 4


def test_what_lies_in_the_device_tier_is_not_copied_again(ns, daemon) -> None:
    """Only the last one is, whose answer says that all are durable."""
    ids, longer = tokens(BLOCKS, seed=300), tokens(2 * BLOCKS, seed=300)
    assert np.array_equal(longer[: len(ids)], ids)
    assert put(ns, ids) == BLOCKS
    before = deduplicated(daemon)
    assert put(ns, longer) == 2 * BLOCKS
    assert deduplicated(daemon) == before
    assert put(ns, longer) == 2 * BLOCKS
    assert put(ns, longer, BLOCKS + 3) == BLOCKS - 3
    assert deduplicated(daemon) == before + 2
    pages, places = compute(longer)
    assert ns.read_pages(longer, pages, places) == 2 * BLOCKS


def test_what_lies_below_is_written_to_the_device_tier(ns, client) -> None:
    """It need not come up then, and a copy there that was damaged is not what counts."""
    ids = tokens(BLOCKS, seed=400)
    put(ns, ids)
    press(client, client.namespace(SPEC), SLOTS, seed=500)
    assert ns.lookup(ids).device == 0
    assert put(ns, ids) == BLOCKS
    assert ns.lookup(ids).device == BLOCKS
    assert get(ns, ids) == BLOCKS


def damage(ns, ids: np.ndarray, block: int) -> None:
    """Flip a bit of a block where it lies in the device tier."""
    with ns.begin(ids, keep=0) as sequence:
        ns.pool[sequence.block_table[block], 100] ^= 1


def test_a_block_that_was_damaged_in_memory_comes_from_the_disk(ns, client, daemon) -> None:
    ids = tokens(BLOCKS, seed=700)
    put(ns, ids)
    client.flush()
    for block in (3, 11):
        damage(ns, ids, block)
    before = daemon.metrics()['tierkv_checksum_failures_total{tier="device"}']
    assert get(ns, ids) == BLOCKS
    assert daemon.metrics()['tierkv_checksum_failures_total{tier="device"}'] == before + 2
    assert get(ns, ids) == BLOCKS
    damage(ns, ids, 5)
    assert get(ns, ids, 4) == BLOCKS - 4


def test_or_is_missing_until_it_is_written_again() -> None:
    with running(sized(SLOTS, 0, 0)) as daemon, daemon.connect() as client:
        ns, ids = client.namespace(PACKED), tokens(BLOCKS, seed=701)
        put(ns, ids)
        damage(ns, ids, 7)
        assert get(ns, ids) == 7
        assert ns.lookup(ids).tokens == 7 * BLOCK
        assert put(ns, ids) == BLOCKS
        assert get(ns, ids) == BLOCKS
        with ns.begin(ids, keep=0) as holder:  # what others use cannot go
            damage(ns, ids, 9)
            assert get(ns, ids) == 9
            assert len(holder.block_table) == BLOCKS
        assert get(ns, ids) == 9
        assert put(ns, ids, 9) == BLOCKS - 9
        assert get(ns, ids) == BLOCKS
        rows = np.zeros((BLOCKS, PACKED.block_bytes), np.uint8)
        damage(ns, ids, 0)
        assert ns.read(ids, rows) == 0
        assert ns.write(ids, payloads(PACKED, ids)) == BLOCKS
        assert ns.read(ids, rows) == BLOCKS


def test_another_arena_has_none_of_it(tmp_path) -> None:
    """The worker still sees the old one's blocks when it begins to write."""
    with Daemon(sized(SLOTS, 64, 1024)) as daemon:
        daemon.start()
        with daemon.connect() as client:
            ns, ids = client.namespace(PACKED), tokens(BLOCKS, seed=1)
            assert put(ns, ids) == BLOCKS
            daemon.process.kill()
            daemon.wait()
            shutil.rmtree(daemon.state)
            shutil.rmtree(daemon.arenas)
            daemon.arenas.mkdir()
            assert get(ns, ids) == BLOCKS
            daemon.launch()
            assert put(ns, ids) == BLOCKS
            assert ns.lookup(ids).device == BLOCKS
            assert get(ns, ids) == BLOCKS
        assert daemon.stop() == 0, daemon.said()


def test_workers_that_write_the_same_at_once(daemon) -> None:
    start, prompts = threading.Barrier(3), [tokens(BLOCKS, seed=600 + n) for n in range(6)]
    faults: list[BaseException] = []

    def work(order: list[np.ndarray]) -> None:
        try:
            with daemon.connect() as client:
                ns = client.namespace(PACKED)
                start.wait()
                for one in order:
                    assert put(ns, one) == BLOCKS
                    assert get(ns, one, 4) == BLOCKS - 4
        except BaseException as fault:
            faults.append(fault)
            raise

    orders = [prompts, prompts[::-1], prompts[3:] + prompts[:3]]
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
