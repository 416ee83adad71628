"""Every limit: a typed error that names it, nothing changed, and service as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

import tierkv
from tests.service.blocks import BLOCK, SPEC, check, fill, store, tokens
from tests.service.raw import Peer
from tests.service.running import Daemon, running, until
from tierkv.errors import LimitExceeded, PoolExhausted
from tierkv.rpc import messages as m
from tierkv.rpc.wire import HEADER_BYTES, encode

DEVICE_BLOCKS = 32


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    settings = {
        "device.bytes": str(DEVICE_BLOCKS * SPEC.block_bytes),
        "host.bytes": "0",
        "disk.bytes": "0",
        "server.sequences_max": "3",
        "server.blocks_per_request_max": "40",
        "server.connections_max": "4",
        "server.message_bytes_max": "64KiB",
    }
    with running(settings) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


# --- a full pool ----------------------------------------------------------------------------------


def test_a_full_pool_says_what_it_has_and_changes_nothing(ns, client) -> None:
    store(ns, tokens(8, seed=10))
    with fill(ns, tokens(20, seed=11)) as holder, ns.begin([]) as asker:
        before = client.stat()
        with pytest.raises(PoolExhausted) as caught:
            asker.reserve(13 * BLOCK)
        assert caught.value.details == {"tier": "device", "asked": 13, "free": 4, "evictable": 8}
        after = client.stat()
        assert after["tiers"] == before["tiers"]
        assert after["evictions"] == before["evictions"]
        assert after["wal"]["appended_lsn"] == before["wal"]["appended_lsn"]
        assert asker.num_tokens == 0
        assert len(asker.block_table) == 0
        check(ns, holder)
        assert ns.lookup(tokens(8, seed=10)).tokens == 8 * BLOCK
        asker.reserve(12 * BLOCK)
    with ns.begin([]) as asker:
        asker.reserve(DEVICE_BLOCKS * BLOCK)


def test_more_than_the_tier_could_ever_hold(ns) -> None:
    with ns.begin([]) as asker:
        with pytest.raises(PoolExhausted) as caught:
            asker.reserve((DEVICE_BLOCKS + 1) * BLOCK)
        assert caught.value.details["asked"] == DEVICE_BLOCKS + 1
        asker.reserve(BLOCK)


def test_growth_that_fails_leaves_the_sequence_as_it_was(ns) -> None:
    ids = tokens(20, seed=12)
    with fill(ns, ids) as sequence, fill(ns, tokens(10, seed=13)):
        table = sequence.block_table
        with pytest.raises(PoolExhausted):
            sequence.reserve(3 * BLOCK)
        assert np.array_equal(sequence.block_table, table)
        check(ns, sequence)
        sequence.reserve(2 * BLOCK)


def test_a_suspended_sequence_without_a_tier_below_stays_and_others_make_room(ns) -> None:
    """Its blocks have nowhere to go; blocks that nobody holds go instead."""
    with fill(ns, tokens(10, seed=14)) as sleeper:
        sleeper.suspend()
        store(ns, tokens(22, seed=15))
        with ns.begin([]) as asker:
            asker.reserve(22 * BLOCK)
            with pytest.raises(PoolExhausted) as caught:
                asker.reserve(23 * BLOCK)
            assert caught.value.details["evictable"] == 0
        sleeper.resume()
        check(ns, sleeper)


# --- limits ---------------------------------------------------------------------------------------


def test_sequences_of_one_lease(daemon: Daemon, client, ns) -> None:
    held = [ns.begin([]) for _ in range(3)]
    with pytest.raises(LimitExceeded) as caught:
        ns.begin([])
    assert caught.value.details["limit"] == 3
    with pytest.raises(LimitExceeded):
        held[0].fork()
    with daemon.connect() as other:
        other.namespace(SPEC).begin([]).end()
    held.pop().end()
    held.append(ns.begin([]))
    client.release(held)


def test_a_request_that_is_sent_again_at_the_limit_is_answered_again(daemon: Daemon) -> None:
    """A worker repeats its last request after a reconnect: it must not count twice."""
    with Peer(daemon) as peer:
        peer.hello()
        namespace = peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened).namespace
        for number in (1, 2):
            peer.want(m.Acquire(namespace, number, b"", b""), m.Table)
        peer.want(m.Fork(1, 3, 0), m.Table)
        peer.refused(m.Acquire(namespace, 4, b"", b""), "limit_exceeded")
        peer.want(m.Acquire(namespace, 2, b"", b""), m.Table)
        peer.want(m.Fork(1, 3, 0), m.Table)


def test_blocks_of_one_request(ns) -> None:
    with pytest.raises(LimitExceeded) as caught:
        ns.begin(tokens(41, seed=16), keep=0)
    assert caught.value.details == {"limit": 40, "asked": 41}
    assert "server.blocks_per_request_max" in str(caught.value)
    with ns.begin([]) as sequence, pytest.raises(LimitExceeded):
        sequence.reserve(41 * BLOCK)
    with ns.begin(tokens(40, seed=16), keep=0) as sequence:
        assert sequence.num_tokens == 0


def test_a_lookup_is_limited_as_well(ns) -> None:
    with pytest.raises(LimitExceeded):
        ns.lookup(tokens(41, seed=16))


def test_connections(daemon: Daemon, client) -> None:
    held = [daemon.connect() for _ in range(3)]
    with pytest.raises(LimitExceeded) as caught:
        tierkv.connect(daemon.socket, timeout_s=5)
    assert caught.value.details["limit"] == 4
    held.pop().close()
    until(lambda: client.stat()["connections"] == 3)
    held.append(daemon.connect())
    assert client.stat()["connections"] == 4
    for one in held:
        one.close()
    until(lambda: client.stat()["connections"] == 1)


def test_message_bytes(daemon: Daemon, client, ns) -> None:
    with Peer(daemon) as peer:
        peer.hello()
        namespace = peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened).namespace
        too_long = m.Lookup(namespace, bytes(16 * 5000))
        with suppress(BrokenPipeError, ConnectionResetError):
            peer.send(3, too_long)
        failure = peer.closing_reason()
        assert failure.code == "protocol"
        asked = len(encode(3, too_long)) - HEADER_BYTES
        assert failure.details == {"reason": "oversized", "limit": 65_536, "asked": asked}
    assert client.stat()["state"] == "serving"
    with fill(ns, tokens(3, seed=17)) as sequence:
        check(ns, sequence)


def test_requests_in_flight_beyond_the_limit_wait_their_turn(daemon: Daemon) -> None:
    with Peer(daemon) as peer:
        peer.hello()
        for request_id in range(2, 1002):
            peer.send(request_id, m.Lookup(0, b""))
        answered = [peer.receive() for _ in range(1000)]
        assert sorted(found[0] for found in answered if found) == list(range(2, 1002))
