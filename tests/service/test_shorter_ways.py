"""Verbs that save round trips or waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, payloads, press, sized, store, tokens
from tests.service.running import Daemon, running, until
from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvalidArgument, PoolExhausted


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Small tiers of 64, 16 and 512 blocks."""
    with running(sized(64, 16, 512)) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def out_of(blocks: int) -> np.ndarray:
    return np.zeros((blocks, SPEC.block_bytes), np.uint8)


# --- begin with room ------------------------------------------------------------------------------


def test_a_sequence_begins_with_room_for_the_rest_of_its_prompt(ns, daemon) -> None:
    ids = tokens(8, seed=1)
    store(ns, ids[: 3 * BLOCK])
    before = daemon.metrics()
    with ns.begin(ids, keep=0, reserve=BLOCK) as sequence:
        assert sequence.cached_tokens == 3 * BLOCK
        assert len(sequence.block_table) == 9
        wanted = payloads(SPEC, ids)
        ns.pool[sequence.block_table[3:8], : SPEC.block_bytes] = wanted[3:]
        sequence.append(ids[3 * BLOCK :])
        check(ns, sequence)
    after = daemon.metrics()
    name = 'tierkv_rpc_requests_total{code="ok",verb="%s"}'
    assert after[name % "acquire"] == before[name % "acquire"] + 1
    assert after.get(name % "reserve") == before.get(name % "reserve")
    assert ns.lookup(ids).tokens == 8 * BLOCK


def test_room_may_end_within_what_is_cached(ns) -> None:
    ids = tokens(4, seed=2)
    store(ns, ids)
    with ns.begin(ids, keep=0, reserve=0) as sequence:
        assert sequence.cached_tokens == len(ids)
        assert len(sequence.block_table) == 4


def test_without_enough_room_there_is_no_sequence(ns, client) -> None:
    ids = tokens(4, seed=3)
    store(ns, ids)
    with pytest.raises(PoolExhausted):
        ns.begin(ids, keep=0, reserve=100 * BLOCK)
    assert client.stat()["workers"][0]["sequences"] == 0
    with fill(ns, ids) as sequence:
        assert sequence.cached_tokens == len(ids)


def test_room_must_not_be_negative(ns) -> None:
    with pytest.raises(InvalidArgument, match="reserve is -1"):
        ns.begin([1, 2, 3], reserve=-1)


# --- read -----------------------------------------------------------------------------------------


def test_cached_blocks_are_read_without_asking(ns, client, monkeypatch) -> None:
    ids = tokens(8, seed=10)
    store(ns, ids)
    monkeypatch.setattr(client, "_run", None)
    out = out_of(8)
    assert ns.read(ids, out) == 8
    assert np.array_equal(out, payloads(SPEC, ids))


def test_blocks_that_differ_by_extra_keys_only_are_read_apart(ns) -> None:
    ids = tokens(2, seed=11)
    store(ns, ids)
    store(ns, ids, [None, b"image"])
    out = out_of(2)
    for keys in (None, [None, b"image"]):
        assert ns.read(ids, out, extra_keys=keys) == 2
        assert np.array_equal(out, payloads(SPEC, ids, keys))
    assert ns.read(ids, out, extra_keys=[None, b"other"]) == 1


def test_what_is_read_counts_as_used_and_nothing_is_logged(ns, client, daemon) -> None:
    """Told at once or in a while; a block that is missing counts as looked up."""
    ids = tokens(8, seed=12)
    store(ns, ids[: 6 * BLOCK])
    client.flush()
    lsn, before = client.stat()["wal"]["appended_lsn"], daemon.metrics()
    for _ in range(100):
        assert ns.read(ids[: 6 * BLOCK], out_of(6)) == 6
    assert ns.read(ids, out_of(8)) == 6
    assert client.stat()["wal"]["appended_lsn"] == lsn
    client.close()

    def counted(name: str) -> float:
        return daemon.metrics()[name] - before[name]

    until(lambda: counted("tierkv_prefix_lookup_tokens_total") == (101 * 6 + 2) * BLOCK)
    assert counted('tierkv_prefix_hit_tokens_total{tier="device"}') == 101 * 6 * BLOCK


def test_what_is_read_again_and_again_stays_in_the_device_tier(ns, client, monkeypatch) -> None:
    monkeypatch.setattr("tierkv.client.uses.TOLD_S", 0.0)
    ids = tokens(8, seed=13)
    store(ns, ids)
    for seed in range(14_000, 14_020):
        store(ns, tokens(8, seed=seed))
        assert ns.read(ids, out_of(8)) == 8
    assert ns.lookup(ids).device == 8


@pytest.mark.parametrize("cached", [0, 1, 5])
def test_as_much_is_read_as_is_cached(ns, cached: int) -> None:
    ids = tokens(8, seed=20 + cached)
    store(ns, ids[: cached * BLOCK])
    out = out_of(8)
    assert ns.read(ids, out) == cached
    assert np.array_equal(out[:cached], payloads(SPEC, ids)[:cached])


def test_no_more_is_read_than_there_is_memory_for(ns) -> None:
    ids = tokens(8, seed=30)
    store(ns, ids)
    out = out_of(3)
    assert ns.read(ids, out) == 3
    assert np.array_equal(out, payloads(SPEC, ids)[:3])


def test_blocks_of_slower_tiers_come_up_to_be_read(ns, client) -> None:
    ids = tokens(8, seed=40)
    store(ns, ids)
    press(client, ns, 200, seed=41_000)
    assert ns.lookup(ids).disk == 8
    out = out_of(8)
    assert ns.read(ids, out) == 8
    assert np.array_equal(out, payloads(SPEC, ids))
    assert client.stat()["workers"][0]["sequences"] == 0
    assert ns.lookup(ids).device == 8


def test_a_damaged_block_is_a_miss(ns) -> None:
    """The worker's own copy is checked, so memory that has changed is no content, pinned or not."""
    ids = tokens(4, seed=50)
    with fill(ns, ids) as sequence:
        slot = sequence.block_table[2]
        ns.pool[slot, 7] ^= 1
        out = out_of(4)
        assert ns.read(ids, out) == 2
        assert np.array_equal(out[:2], payloads(SPEC, ids)[:2])
        ns.pool[slot, 7] ^= 1
        assert ns.read(ids, out) == 4


def test_what_is_read_while_its_slots_go_to_others_is_right_or_nothing(ns, client, daemon) -> None:
    """One worker writes without a pause what evicts what the other reads."""
    ids = tokens(16, seed=60)
    expected, stop = payloads(SPEC, ids), threading.Event()
    store(ns, ids)

    def evict() -> None:
        with daemon.connect() as other:
            theirs = other.namespace(SPEC)
            seed = 70_000
            while not stop.is_set():
                store(theirs, tokens(16, seed=seed))
                seed += 1

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        for _ in range(150):
            out = out_of(16)
            count = ns.read(ids, out)
            assert np.array_equal(out[:count], expected[:count])
            store(ns, ids)
    finally:
        stop.set()
        thread.join()


def test_memory_of_another_shape_is_refused(ns) -> None:
    for out in (np.zeros(SPEC.block_bytes, np.uint8), np.zeros((2, 4), np.uint8)):
        with pytest.raises(InvalidArgument, match="blocks are uint8"):
            ns.read(tokens(2, seed=80), out)
    for out in (
        out_of(4)[::2],
        np.frombuffer(bytes(2 * SPEC.block_bytes), np.uint8).reshape(2, -1),
    ):
        with pytest.raises(InvalidArgument, match="not contiguous, or read-only"):
            ns.read(tokens(2, seed=80), out)


# --- exists ---------------------------------------------------------------------------------------


def test_blocks_are_found_by_their_hashes_alone(ns, client) -> None:
    ids, absent = tokens(8, seed=90), tokens(4, seed=91)
    store(ns, ids)
    names = [chain_hashes(SPEC.digest, each, BLOCK) for each in (ids, absent)]
    # Neither the beginning of the chain nor its order matter.
    asked = np.concatenate([names[0][5:], names[1], names[0][:2]])
    assert ns.exists(asked).tolist() == [0] * 3 + [255] * 4 + [0] * 2
    press(client, ns, 200, seed=92_000)
    assert ns.exists(asked).tolist() == [2] * 3 + [255] * 4 + [2] * 2
    assert ns.exists(asked[:0]).tolist() == []


# --- begin without waiting ------------------------------------------------------------------------


@pytest.fixture
def on_disk(ns, client) -> np.ndarray:
    """The tokens of 48 blocks that are only on disk."""
    ids = tokens(48, seed=100)
    store(ns, ids)
    press(client, ns, 160, seed=101_000)
    assert ns.lookup(ids).disk == 48
    assert ns.lookup(ids).load_s > 0
    return ids


def test_first_blocks_may_be_used_while_others_come_up(ns, on_disk) -> None:
    with ns.begin(on_disk, keep=0, wait=False) as sequence:
        assert sequence.cached_tokens == len(on_disk)
        for wanted in (1, BLOCK, 20 * BLOCK):
            assert sequence.wait(wanted) >= wanted
            assert sequence.ready_tokens >= wanted
            check(ns, sequence, blocks=sequence.ready_tokens // BLOCK)
        assert sequence.wait() == len(on_disk)
        assert len(sequence.block_table) == 48
        assert sequence.cached_from == (len(on_disk), 0, 0, 48)
        assert sequence.load_s == 0
        check(ns, sequence)


def test_other_verbs_wait_for_the_whole_prefix(ns, on_disk) -> None:
    more = tokens(2, seed=102)
    ids = np.concatenate([on_disk, more])
    with ns.begin(ids, keep=0, wait=False, reserve=BLOCK) as sequence:
        sequence.reserve(len(more))
        assert sequence.ready_tokens == len(on_disk)
        wanted = payloads(SPEC, ids)[48:]
        ns.pool[sequence.block_table[48:50], : SPEC.block_bytes] = wanted
        sequence.append(more)
        check(ns, sequence)
        forked = sequence.fork()
        check(ns, forked)
        forked.end()


def test_what_is_up_already_is_ready_at_once(ns) -> None:
    ids = tokens(8, seed=103)
    store(ns, ids)
    with ns.begin(ids, keep=0, wait=False) as sequence:
        assert sequence.ready_tokens == len(ids)
        assert sequence.wait() == len(ids)
        assert sequence.cached_from == (len(ids), 8, 0, 0)


def test_a_sequence_may_end_while_it_comes_up(ns, client, on_disk) -> None:
    for _ in range(10):
        ns.begin(on_disk, keep=0, wait=False).end()
    assert client.stat()["workers"][0]["sequences"] == 0
    with ns.begin(on_disk, keep=0) as sequence:
        check(ns, sequence)


def test_another_connection_finds_what_the_first_one_began(ns, client, daemon, on_disk) -> None:
    """The connection breaks while blocks come up; the sequence goes on where it was, or is lost."""
    from tierkv.errors import LeaseLost

    sequence = ns.begin(on_disk, keep=0, wait=False)
    client._link._sock.shutdown(2)
    try:
        assert sequence.wait() == len(on_disk)
        check(ns, sequence)
    except LeaseLost:
        assert sequence.lost
    with ns.begin(on_disk, keep=0) as again:
        check(ns, again)


# --- prefetch -------------------------------------------------------------------------------------


def test_a_lookup_may_start_bringing_blocks_up(ns, on_disk) -> None:
    found = ns.lookup(on_disk, prefetch=True)
    assert found[:4] == (len(on_disk), 0, 0, 48)
    until(lambda: ns.lookup(on_disk).device == 48)
    with ns.begin(on_disk, keep=0) as sequence:
        assert sequence.cached_from == (len(on_disk), 48, 0, 0)
        check(ns, sequence)


def test_who_begins_meanwhile_waits_for_what_is_on_its_way(ns, on_disk) -> None:
    for _ in range(5):
        ns.lookup(on_disk, prefetch=True)
    with ns.begin(on_disk, keep=0) as sequence:
        assert sequence.cached_tokens == len(on_disk)
        check(ns, sequence)


def test_more_than_fits_is_brought_up_as_far_as_it_does(ns, client) -> None:
    """Three chains of 48 blocks for a device of 64: none is lost, and there is room for others."""
    chains = [tokens(48, seed=110 + k) for k in range(3)]
    for ids in chains:
        store(ns, ids)
    press(client, ns, 160, seed=111_000)
    for ids in chains:
        assert ns.lookup(ids, prefetch=True).disk == 48
    until(lambda: sum(ns.lookup(ids).device for ids in chains) > 0)
    with fill(ns, tokens(60, seed=112)) as sequence:
        check(ns, sequence)
    for ids in chains:
        with ns.begin(ids, keep=0) as sequence:
            assert sequence.cached_tokens == len(ids)
            check(ns, sequence)


def test_what_is_up_already_is_not_brought_up_again(ns, daemon) -> None:
    ids = tokens(8, seed=113)
    store(ns, ids)
    moved = 'tierkv_transfer_bytes_total{from_tier="disk",to_tier="device"}'
    before = daemon.metrics().get(moved, 0)
    ns.lookup(ids, prefetch=True)
    assert ns.lookup(ids).device == 8
    assert daemon.metrics().get(moved, 0) == before
