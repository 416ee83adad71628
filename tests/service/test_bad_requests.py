"""Well-formed requests for what cannot be: a typed error each, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, tokens
from tests.service.raw import Peer
from tests.service.running import Daemon
from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvalidArgument, NamespaceMismatch, UnknownNamespace
from tierkv.rpc import messages as m

pytestmark = pytest.mark.usefixtures("bystander")

ONE_ROW = np.array([1], "<u4").tobytes(), np.array([0, 1], "<u4").tobytes()
"""``seq_lens`` and ``q_indptr`` of a sequence with one token and one query."""


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Peer]:
    with Peer(daemon) as peer:
        yield peer.hello()


@pytest.fixture
def namespace(peer: Peer) -> int:
    return peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened).namespace


def acquire(namespace: int, sequence: int, ids: np.ndarray) -> m.Acquire:
    hashes = chain_hashes(SPEC.digest, ids, BLOCK).tobytes()
    return m.Acquire(namespace, sequence, hashes, ids.astype("<u4").tobytes())


def seal(sequence: int, first: int, ids: np.ndarray) -> m.Seal:
    hashes = chain_hashes(SPEC.digest, ids, BLOCK).tobytes()
    return m.Seal(sequence, first, hashes, ids.astype("<u4").tobytes(), hashes)


def lookup(peer: Peer, namespace: int, ids: np.ndarray) -> int:
    hashes = chain_hashes(SPEC.digest, ids, BLOCK).tobytes()
    return peer.want(m.Lookup(namespace, hashes), m.Found).blocks


# --- namespaces -----------------------------------------------------------------------------------

IMPOSSIBLE = {
    "layers": 0,
    "kv_heads": -1,
    "head_dim": 65_537,
    "block_tokens": 0,
    "dtype": "float12",
    "layout": "NDH",
    "vocab_size": -1,
    "tp_rank": 1,
    "pp_size": 0,
    "packed_bytes": 100,
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_impossible_geometry(client, peer: Peer, field: str) -> None:
    spec = msgspec.structs.replace(SPEC, **{field: IMPOSSIBLE[field]})
    with pytest.raises(InvalidArgument):
        client.namespace(spec)
    known = len(client.stat()["namespaces"])
    failure = peer.refused(m.OpenNamespace(spec, spec.digest), "invalid_argument")
    assert field.split("_")[-1] in failure.message
    assert len(client.stat()["namespaces"]) == known


@pytest.mark.parametrize("digest", [b"", bytes(16), SPEC.digest[:-1], SPEC.digest + b"\0"])
def test_a_digest_that_is_not_the_spec_s(peer: Peer, digest: bytes) -> None:
    failure = peer.refused(m.OpenNamespace(SPEC, digest), NamespaceMismatch.code)
    assert failure.details == {"ours": SPEC.digest.hex(), "theirs": digest.hex()}


def test_a_block_that_is_larger_than_the_device_tier(client) -> None:
    known = client.stat()["namespaces"]
    spec = msgspec.structs.replace(SPEC, layers=4096)
    with pytest.raises(InvalidArgument, match=r"raise device\.bytes or lower block_tokens"):
        client.namespace(spec)
    assert client.stat()["namespaces"] == known


def test_astronomic_geometry(client) -> None:
    huge = {"layers": 65_536, "kv_heads": 65_536, "head_dim": 65_536, "block_tokens": 65_536}
    with pytest.raises(InvalidArgument, match=r"KVSpec\.block_bytes is"):
        client.namespace(msgspec.structs.replace(SPEC, **huge))


def test_a_namespace_that_this_connection_has_not_opened(
    daemon: Daemon, client, peer: Peer
) -> None:
    client.namespace(SPEC)
    for number in (0, 1, 65_535, 2**40, -1):
        peer.refused(m.Lookup(number, bytes(16)), UnknownNamespace.code)
        peer.refused(acquire(number, 1, tokens(1, 3)), UnknownNamespace.code)
        attend = m.Attend(number, 0, [1], bytes(4), bytes(8), 2, 0, 0, 0)
        peer.refused(attend, UnknownNamespace.code)


# --- tokens, hashes and lengths -------------------------------------------------------------------


@pytest.mark.parametrize("bad", [SPEC.vocab_size, 2**32 - 1, 2**32, -1])
def test_token_ids_out_of_range_are_refused_by_the_client(ns, bad: int) -> None:
    ids = [*tokens(1, 4)[:-1].tolist(), bad]
    with pytest.raises(InvalidArgument, match=rf"token_ids\[15\] is {bad}"):
        ns.begin(ids)
    with pytest.raises(InvalidArgument, match=rf"token_ids\[15\] is {bad}"):
        ns.lookup(ids)
    with ns.begin([]) as sequence:
        sequence.reserve(BLOCK)
        with pytest.raises(InvalidArgument, match=rf"token_ids\[15\] is {bad}"):
            sequence.append(ids)
        assert sequence.num_tokens == 0


@pytest.mark.parametrize("bad", [SPEC.vocab_size, 2**32 - 1])
def test_and_by_the_daemon(peer: Peer, namespace: int, bad: int) -> None:
    ids = tokens(2, 4)
    ids[BLOCK] = bad
    failure = peer.refused(acquire(namespace, 1, ids), "invalid_argument")
    assert str(bad) in failure.message
    peer.want(acquire(namespace, 1, tokens(0, 4)), m.Table)
    peer.want(m.Reserve(1, 0, 2 * BLOCK), m.Table)
    peer.refused(seal(1, 0, ids), "invalid_argument")
    assert peer.want(m.Reserve(1, 0, 2 * BLOCK), m.Table).sealed == 0
    assert lookup(peer, namespace, ids) == 0


def test_blobs_of_the_wrong_length(peer: Peer, namespace: int) -> None:
    good = acquire(namespace, 1, tokens(2, 5))
    for wrong in (
        {"hashes": good.hashes[:-1]},
        {"hashes": good.hashes[:-16]},
        {"tokens": good.tokens[:-4]},
        {"tokens": good.tokens + b"\0"},
        {"extras": bytes(8)},
        {"extras": bytes(17)},
    ):
        peer.refused(msgspec.structs.replace(good, **wrong), "invalid_argument")
    peer.refused(m.Lookup(namespace, bytes(15)), "invalid_argument")
    peer.want(acquire(namespace, 1, tokens(0, 5)), m.Table)
    peer.want(m.Reserve(1, 0, 2 * BLOCK), m.Table)
    sealing = seal(1, 0, tokens(2, 5))
    for wrong in (
        {"checksums": sealing.checksums[:-16]},
        {"checksums": b""},
        {"tokens": b""},
        {"first": -1},
        {"first": 1},
        {"first": 2**60},
    ):
        peer.refused(msgspec.structs.replace(sealing, **wrong), "invalid_argument")
    assert peer.want(sealing, m.Table).sealed == 2


# --- sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 2**32, 2**63])
def test_sequence_numbers_that_cannot_be(peer: Peer, namespace: int, number: int) -> None:
    peer.refused(acquire(namespace, number, tokens(1, 6)), "invalid_argument")


def test_unknown_sequences(peer: Peer, namespace: int) -> None:
    for number in (1, 2**32 - 1, -1, 0):
        for request in (
            m.Reserve(number, 0, 1),
            seal(number, 0, tokens(1, 6)),
            m.Truncate(number, 0),
            m.Fork(number, 7, 0),
            m.Suspend(number),
            m.Resume(number),
            m.Attend(namespace, 0, [number], *ONE_ROW, 2, 0, 0, 0),
        ):
            peer.refused(request, "unknown_sequence")
        peer.want(m.Release([number]), m.Done)


def test_an_ended_sequence_is_unknown(peer: Peer, namespace: int) -> None:
    peer.want(acquire(namespace, 1, tokens(0, 6)), m.Table)
    peer.want(m.Release([1]), m.Done)
    peer.want(m.Release([1]), m.Done)
    peer.refused(m.Reserve(1, 0, 1), "unknown_sequence")


def test_numbers_of_tokens_that_cannot_be(peer: Peer, namespace: int) -> None:
    peer.want(acquire(namespace, 1, tokens(0, 6)), m.Table)
    peer.want(m.Reserve(1, 0, 2 * BLOCK), m.Table)
    for written, total in ((-1, 5), (6, 5), (2 * BLOCK + 1, 3 * BLOCK), (-(2**60), 2**60)):
        failure = peer.want(m.Reserve(1, written, total), m.Failure)
        assert failure.code in ("invalid_argument", "limit_exceeded")
    for kept in (-1, 2 * BLOCK + 1, 2**60):
        peer.refused(m.Truncate(1, kept), "invalid_argument")
        peer.refused(m.Fork(1, 2, kept), "invalid_argument")
    peer.refused(m.Fork(1, 0, 0), "invalid_argument")
    assert len(peer.want(m.Reserve(1, 0, 1), m.Table).slots) == 2 * 4


def test_a_suspended_sequence_takes_no_writes(peer: Peer, namespace: int) -> None:
    peer.want(acquire(namespace, 1, tokens(0, 6)), m.Table)
    peer.want(m.Reserve(1, 0, BLOCK), m.Table)
    peer.want(m.Suspend(1), m.Done)
    peer.refused(m.Reserve(1, 0, 1), "invalid_argument")
    peer.refused(seal(1, 0, tokens(1, 6)), "invalid_argument")
    peer.refused(m.Fork(1, 2, 0), "invalid_argument")
    assert len(peer.want(m.Resume(1), m.Table).slots) == 4


def test_a_sequence_of_another_lease_is_its_owner_s_alone(client, ns, peer: Peer) -> None:
    """Sequences are named within a lease; the daemon-wide name (lease << 32) | n is no way in."""
    ids = tokens(4, 7)
    with fill(ns, ids) as owned:
        namespace = peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened).namespace
        stranger = (client.lease << 32) | owned._core.number
        requests = [
            m.Reserve(stranger, 0, 1),
            seal(stranger, 0, ids),
            m.Truncate(stranger, 0),
            m.Fork(stranger, 2, BLOCK),
            m.Suspend(stranger),
            m.Resume(stranger),
            m.Release([stranger]),
            m.Attend(namespace, 0, [stranger], *ONE_ROW, 2, 0, 0, 0),
        ]
        for request in requests:
            peer.refused(request, "not_owner")
        peer.refused(m.Reserve(owned._core.number, 0, 1), "unknown_sequence")
        check(ns, owned)
        owned.reserve(1)
        assert not owned.lost
        assert len(owned.block_table) == 5


def test_a_release_with_one_foreign_sequence_releases_nothing(
    client, ns, peer: Peer, namespace: int
) -> None:
    with fill(ns, tokens(1, 7)) as owned:
        peer.want(acquire(namespace, 5, tokens(0, 6)), m.Table)
        stranger = (client.lease << 32) | owned._core.number
        peer.refused(m.Release([5, stranger]), "not_owner")
        peer.want(m.Reserve(5, 0, 1), m.Table)


def test_one_s_own_sequence_may_be_named_in_full(peer: Peer, namespace: int) -> None:
    peer.want(acquire(namespace, 5, tokens(0, 6)), m.Table)
    peer.want(m.Reserve((peer.lease << 32) | 5, 0, 1), m.Table)
    peer.want(m.Release([(peer.lease << 32) | 5]), m.Done)
    peer.refused(m.Reserve(5, 0, 1), "unknown_sequence")
