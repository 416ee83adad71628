"""Where blocks are found as pressure moves them down, and that their bytes are right there."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.service.blocks import (
    BLOCK,
    SPEC,
    check,
    fill,
    grow,
    held,
    press,
    sized,
    store,
    tokens,
)
from tests.service.running import Daemon, running
from tierkv.tiers.linux import takes_direct_io


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Small tiers of 16, 16 and 64 blocks."""
    with running(sized(16, 16, 64)) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def begin(ns, ids):
    """A sequence on the cached part of ``ids``, whose bytes are right."""
    sequence = ns.begin(ids, keep=0)
    check(ns, sequence)
    return sequence


def test_a_prefix_is_found_in_every_tier_as_it_moves_down(ns, client) -> None:
    ids = tokens(8, seed=100)
    store(ns, ids)
    assert ns.lookup(ids)[:4] == (8 * BLOCK, 8, 0, 0)
    with begin(ns, ids) as sequence:
        assert sequence.cached_from == (8 * BLOCK, 8, 0, 0)

    press(client, ns, 16, seed=1000)
    assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 8, 0)
    with begin(ns, ids) as sequence:
        assert sequence.cached_from == (8 * BLOCK, 0, 8, 0)
    assert ns.lookup(ids)[:4] == (8 * BLOCK, 8, 0, 0)

    press(client, ns, 32, seed=2000)
    assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 0, 8)
    with begin(ns, ids) as sequence:
        assert sequence.cached_from == (8 * BLOCK, 0, 0, 8)

    client.flush()
    press(client, ns, 100, seed=3000)
    client.flush()
    assert ns.lookup(ids).tokens == 0
    with begin(ns, ids) as sequence:
        assert sequence.cached_tokens == 0


def test_leaves_go_before_roots(ns, client) -> None:
    """What is left of a prefix is its beginning, in the slower tiers its end."""
    ids = tokens(8, seed=110)
    store(ns, ids)
    press(client, ns, 12, seed=4000)
    found = ns.lookup(ids)[:4]
    assert found == (8 * BLOCK, 4, 4, 0)
    with begin(ns, ids) as sequence:
        assert sequence.cached_from == found


def test_more_live_sequences_than_the_device_holds(ns) -> None:
    """Five of 6 blocks in a device of 16: suspended ones spill, and all come back whole."""
    prompts = [tokens(6, seed=120 + k) for k in range(5)]
    sequences = []
    for ids in prompts:
        sequence = fill(ns, ids)
        sequence.suspend()
        sequences.append(sequence)
    for turn in range(3):
        for k, sequence in enumerate(sequences):
            sequence.resume()
            check(ns, sequence)
            grow(ns, sequence, tokens(1, seed=500 + 10 * turn + k))
            check(ns, sequence)
            sequence.suspend()
    for sequence in sequences:
        sequence.end()


def test_a_suspended_sequence_comes_back_from_disk_with_its_open_block(ns, client) -> None:
    ids = tokens(4, seed=130)
    sequence = fill(ns, ids)
    sequence.reserve(5)
    ns.pool[sequence.block_table[4], : SPEC.block_bytes] = 77
    sequence.append([1, 2, 3])
    sequence.suspend()
    press(client, ns, 48, seed=5000)
    client.flush()
    assert ns.lookup(ids).device == 0
    sequence.resume()
    check(ns, sequence)
    assert (held(sequence, ns)[4] == 77).all()
    sequence.reserve(2)
    sequence.append([4, 5])
    assert sequence.num_tokens == 4 * BLOCK + 5
    sequence.end()


def test_pools_of_two_block_sizes_share_one_budget(client, ns) -> None:
    """Blocks of one size make room for blocks of another, in every tier."""
    spec = msgspec.structs.replace(SPEC, model="large", layers=4)
    large = client.namespace(spec)
    assert large.pool.shape == (8, 2 * SPEC.block_bytes)
    small_ids, large_ids = tokens(16, seed=140), tokens(8, seed=141)
    store(ns, small_ids)
    client.flush()
    store(large, large_ids)
    client.flush()
    assert large.lookup(large_ids)[:4] == (8 * BLOCK, 8, 0, 0)
    assert ns.lookup(small_ids)[:4] == (16 * BLOCK, 0, 16, 0)
    with begin(ns, small_ids) as sequence:
        assert sequence.cached_from == (16 * BLOCK, 0, 16, 0)
    client.flush()
    client.flush()
    assert large.lookup(large_ids)[:4] == (8 * BLOCK, 0, 8, 0)
    with begin(large, large_ids) as sequence:
        assert sequence.cached_from == (8 * BLOCK, 0, 8, 0)
    with fill(ns, tokens(8, seed=142)), fill(large, tokens(4, seed=143)):
        device = client.stat()["tiers"]["device"]
        assert device["used_bytes"] == device["capacity_bytes"]
        assert device["evictable_blocks"] == 0


# --- other configurations -------------------------------------------------------------------------


def test_without_a_host_tier() -> None:
    with running(sized(16, 0, 64)) as daemon, daemon.connect() as client:
        assert client.stat()["tiers"]["host"]["state"] == "off"
        ns = client.namespace(SPEC)
        ids = tokens(8, seed=150)
        store(ns, ids)
        press(client, ns, 16, seed=1000)
        assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 0, 8)
        sleeper = begin(ns, ids)
        sleeper.suspend()
        press(client, ns, 16, seed=2000)
        sleeper.resume()
        check(ns, sleeper)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_the_disk_is_read_as_configured_and_says_so(direct: str) -> None:
    settings = sized(16, 0, 64, **{"disk.io": "threads", "disk.direct": direct})
    with running(settings) as daemon, daemon.connect() as client:
        goes_direct = direct == "auto" and takes_direct_io(daemon.state)
        how = "direct" if goes_direct else "through the page cache"
        assert client.stat()["tiers"]["disk"]["io"] == f"4 threads, {how}"
        assert client.stat()["tiers"]["device"]["io"] == ""
        ns = client.namespace(SPEC)
        ids = tokens(8, seed=170)
        store(ns, ids)
        client.flush()
        press(client, ns, 16, seed=1000)
        assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 0, 8)
        begin(ns, ids).end()


def test_without_a_disk_tier() -> None:
    with running(sized(16, 16, 0)) as daemon, daemon.connect() as client:
        assert client.stat()["tiers"]["disk"]["state"] == "off"
        ns = client.namespace(SPEC)
        ids = tokens(8, seed=160)
        store(ns, ids)
        client.flush()
        press(client, ns, 16, seed=1000)
        assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 8, 0)
        sleeper = begin(ns, ids)
        sleeper.suspend()
        press(client, ns, 32, seed=2000)
        sleeper.resume()
        check(ns, sleeper)
        sleeper.end()
        press(client, ns, 32, seed=3000)
        assert ns.lookup(ids).tokens == 0
        assert not daemon.state.joinpath("data").exists()
        assert daemon.stop() == 0


def test_write_demote_keeps_the_disk_out_of_it_until_it_must() -> None:
    settings = sized(16, 16, 64, **{"disk.write": "demote"})
    with running(settings) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        ids = tokens(8, seed=170)
        store(ns, ids)
        store(ns, tokens(16, seed=171))
        assert client.stat()["tiers"]["disk"]["blocks"] == 0
        assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 8, 0)
        store(ns, tokens(16, seed=172))
        assert ns.lookup(ids)[:4] == (8 * BLOCK, 0, 0, 8)
        with begin(ns, ids) as sequence:
            assert sequence.cached_from == (8 * BLOCK, 0, 0, 8)
        client.flush()
        tiers = client.stat()["tiers"]
        assert tiers["disk"]["blocks"] == 8 + 16 + 16
