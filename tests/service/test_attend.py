"""Attention computed by the daemon is the worker's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.service import blocks
from tests.service.blocks import tokens
from tests.service.raw import Peer
from tests.service.running import Daemon, environment, running
from tierkv import KVSpec
from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvalidArgument, TierkvError
from tierkv.rpc import messages as m
from tierkv.rpc.wire import encode

SPEC = KVSpec(model="a", layers=2, kv_heads=2, head_dim=32, block_tokens=8)
Q_HEADS = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""The daemon also computes the softmax's sum, on another path: one rounding more or less."""

VARIANTS = [
    KVSpec(model="a", layers=2, kv_heads=2, head_dim=32, block_tokens=8, dtype=dtype, layout=layout)
    for dtype, layout in (("float32", "NHD"), ("bfloat16", "NHD"), ("float32", "HND"))
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running({"disk.bytes": "0"}) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def maps_torch(daemon: Daemon) -> bool:
    return "libtorch" in Path(f"/proc/{daemon.pid}/maps").read_text()


def test_the_daemon_has_no_torch_until_somebody_asks_for_attention(daemon: Daemon, client) -> None:
    ns = client.namespace(SPEC)
    sequence = filled(ns, 5, seed=1)
    assert not maps_torch(daemon)
    q = torch.randn(1, Q_HEADS, 32)
    ns.attention(0, q, [sequence], where="daemon")
    assert maps_torch(daemon)


def filled(ns: Any, count: int, seed: int) -> Any:
    """A sequence of ``count`` tokens with random K and V in all layers."""
    chance = torch.Generator().manual_seed(seed)
    sequence = ns.begin([])
    sequence.reserve(count)
    for layer in range(ns.spec.layers):
        k, v = torch.randn(2, count, ns.spec.kv_heads, ns.spec.head_dim, generator=chance)
        ns.write_kv(layer, sequence, 0, k, v)
    sequence.append(tokens(1, seed=seed, block_tokens=count))
    return sequence


def both(ns: Any, q: torch.Tensor, sequences: list, **options: Any) -> None:
    """The same in the daemon and here, in every layer."""
    for layer in range(ns.spec.layers):
        there = ns.attention(layer, q, sequences, where="daemon", **options)
        here = ns.attention(layer, q, sequences, where="worker", **options)
        assert there.shape == here.shape == q.shape
        assert there.dtype == here.dtype == q.dtype
        assert torch.isfinite(there).all()
        torch.testing.assert_close(there, here, rtol=TOLERANCE[q.dtype], atol=TOLERANCE[q.dtype])


@pytest.fixture(params=VARIANTS, ids=lambda spec: f"{spec.dtype}-{spec.layout}")
def variant(request: pytest.FixtureRequest, client) -> Any:
    return client.namespace(request.param)


def query(ns: Any, rows: int, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, Q_HEADS, ns.spec.head_dim, generator=chance)
    return q.to(getattr(torch, ns.spec.dtype))


def test_decode_of_several_sequences(variant) -> None:
    sequences = [filled(variant, count, seed=count) for count in (1, 8, 19, 64)]
    both(variant, query(variant, 4, seed=2), sequences)


def test_prefill(variant) -> None:
    both(variant, query(variant, 21, seed=3), [filled(variant, 21, seed=30)])


def test_prefill_that_extends_cached_prefixes(variant) -> None:
    sequences = [filled(variant, count, seed=count) for count in (17, 40, 9)]
    q = query(variant, 5 + 8 + 9, seed=4)
    both(variant, q, sequences, q_indptr=[0, 5, 13, 22])


def test_lengths_of_the_worker_s_choice(variant) -> None:
    sequences = [filled(variant, count, seed=count) for count in (17, 40)]
    both(variant, query(variant, 2, seed=5), sequences, seq_lens=[9, 24])


@pytest.mark.parametrize(
    "options",
    [
        {"window": 7},
        {"window": 0},
        {"softcap": 5.0},
        {"scale": 0.3},
        {"causal": False},
        {"window": 12, "softcap": 2.0, "scale": 0.5},
    ],
    ids=str,
)
def test_options(variant, options: dict[str, Any]) -> None:
    sequences = [filled(variant, count, seed=count) for count in (17, 40)]
    q = query(variant, 12, seed=6)
    both(variant, q, sequences, q_indptr=[0, 4, 12], **options)
    plain = variant.attention(0, q, sequences, q_indptr=[0, 4, 12], where="daemon")
    given = variant.attention(0, q, sequences, q_indptr=[0, 4, 12], where="daemon", **options)
    assert not torch.equal(plain, given)


# --- bad arguments --------------------------------------------------------------------------------


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


GOOD = m.Attend(0, 0, [1], u32(9), u32(0, 2), Q_HEADS, 0, 4096, 8192)
BAD: dict[str, dict[str, Any]] = {
    "no sequences": {"sequences": [], "seq_lens": b"", "q_indptr": u32(0)},
    "a length too many": {"seq_lens": u32(9, 9)},
    "no lengths": {"seq_lens": b""},
    "odd bytes": {"seq_lens": b"\1\2\3"},
    "q_indptr too short": {"q_indptr": u32(0)},
    "q_indptr not from 0": {"q_indptr": u32(1, 2)},
    "q_indptr falls": {"sequences": [1, 1], "seq_lens": u32(9, 9), "q_indptr": u32(0, 5, 3)},
    "more queries than tokens": {"q_indptr": u32(0, 10)},
    "more tokens than blocks": {"seq_lens": u32(17)},
    "all the tokens there can be": {"seq_lens": u32(2**32 - 1)},
    "the same, many times": {
        "sequences": [1] * 1000,
        "seq_lens": u32(*[2**32 - 1] * 1000),
        "q_indptr": u32(*range(1001)),
    },
    "no such layer": {"layer": 2},
    "negative layer": {"layer": -1},
    "no heads": {"q_heads": 0},
    "negative heads": {"q_heads": -2},
    "heads that do not divide": {"q_heads": 3},
    "heads without end": {"q_heads": 2**40},
    "q before the memory": {"q_offset": -4},
    "q beyond the memory": {"q_offset": 1 << 40},
    "q not aligned": {"q_offset": 2},
    "out beyond the memory": {"out_offset": 64 << 20},
    "lse not aligned": {"lse_offset": 8193},
    "lse ends beyond the memory": {"lse_offset": (64 << 20) - 4},
    "window": {"window": -2},
    "softcap": {"softcap": -1.0},
    "softcap is no number": {"softcap": float("nan")},
    "scale is no number": {"scale": float("nan")},
    "scale is infinite": {"scale": float("inf")},
    "no query rows": {"q_indptr": u32(0, 0)},
}


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Peer]:
    with Peer(daemon) as peer:
        peer.hello()
        opened = peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened)
        peer.namespace = opened.namespace
        peer.want(m.Acquire(opened.namespace, 1, b"", b""), m.Table)
        peer.want(m.Reserve(1, 0, 16), m.Table)
        yield peer


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_typed_errors(daemon: Daemon, peer: Peer, name: str) -> None:
    good = msgspec.structs.replace(GOOD, namespace=peer.namespace)
    before = daemon.metrics().get(
        'tierkv_rpc_requests_total{code="invalid_argument",verb="attend"}', 0
    )
    failure = peer.refused(msgspec.structs.replace(good, **BAD[name]), "invalid_argument")
    assert failure.message.startswith("attend")
    after = daemon.metrics()['tierkv_rpc_requests_total{code="invalid_argument",verb="attend"}']
    assert after == before + 1
    peer.want(good, m.Done)


def test_a_suspended_sequence(peer: Peer) -> None:
    peer.want(m.Suspend(1), m.Done)
    failure = peer.refused(
        msgspec.structs.replace(GOOD, namespace=peer.namespace), "invalid_argument"
    )
    assert "suspended" in failure.message


def test_a_sequence_of_another_namespace(peer: Peer) -> None:
    other = msgspec.structs.replace(SPEC, salt="other")
    opened = peer.want(m.OpenNamespace(other, other.digest), m.NamespaceOpened)
    failure = peer.refused(
        msgspec.structs.replace(GOOD, namespace=opened.namespace), "invalid_argument"
    )
    assert "another namespace" in failure.message


def test_a_dtype_without_attention(peer: Peer) -> None:
    spec = msgspec.structs.replace(SPEC, dtype="uint8")
    opened = peer.want(m.OpenNamespace(spec, spec.digest), m.NamespaceOpened)
    peer.want(m.Acquire(opened.namespace, 2, b"", b""), m.Table)
    peer.want(m.Reserve(2, 0, 16), m.Table)
    good = msgspec.structs.replace(GOOD, namespace=opened.namespace, sequences=[2])
    failure = peer.refused(good, "invalid_argument")
    assert "uint8" in failure.message


def test_there_is_no_attention_to_packed_blocks(client, peer: Peer) -> None:
    spec = KVSpec(model="engine", packing="engine-1", packed_bytes=1000, block_tokens=8)
    opened = peer.want(m.OpenNamespace(spec, spec.digest), m.NamespaceOpened)
    peer.want(m.Acquire(opened.namespace, 2, b"", b""), m.Table)
    peer.want(m.Reserve(2, 0, 16), m.Table)
    good = msgspec.structs.replace(GOOD, namespace=opened.namespace, sequences=[2])
    assert "packed as 'engine-1'" in peer.refused(good, "invalid_argument").message
    ns = client.namespace(spec)
    with ns.begin([], reserve=16) as sequence:
        q = torch.zeros(1, Q_HEADS, 32)
        for call in (
            lambda: ns.blocks,
            lambda: ns.k(0),
            lambda: ns.v(0),
            lambda: ns.write_kv(0, sequence, 0, q, q),
            lambda: ns.attention(0, q, [sequence]),
            lambda: ns.attention(0, q, [sequence], where="daemon"),
        ):
            with pytest.raises(InvalidArgument, match="packed as 'engine-1'"):
                call()


def test_the_client_checks_as_well(client) -> None:
    ns = client.namespace(SPEC)
    sequence = filled(ns, 5, seed=7)
    q = torch.randn(1, Q_HEADS, 32)
    for call in (
        lambda: ns.attention(2, q, [sequence], where="daemon"),
        lambda: ns.attention(0, q[:, :3], [sequence], where="daemon"),
        lambda: ns.attention(0, q, [sequence], where="moon"),
        lambda: ns.attention(0, q, [sequence], window=-2, where="daemon"),
        lambda: ns.attention(0, q, [sequence], seq_lens=[9], where="daemon"),
    ):
        with pytest.raises(InvalidArgument):
            call()


def test_a_machine_without_torch(tmp_path: Path) -> None:
    """Attention fails, with a reason; all else works."""
    tmp_path.joinpath("torch.py").write_text("raise ImportError('there is no torch here')")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    with running(extra={"PYTHONPATH": path}) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        sequence = filled(ns, 5, seed=8)
        with pytest.raises(TierkvError, match="there is no torch here"):
            ns.attention(0, torch.randn(1, Q_HEADS, 32), [sequence], where="daemon")
        sequence.reserve(20)
        assert daemon.stop() == 0


def test_a_sequence_that_is_still_coming_up() -> None:
    """Its later blocks are on their way from disk: what would be read is somebody else's."""
    ids = blocks.tokens(32, seed=40)
    with running(blocks.sized(device=40, host=0, disk=200)) as daemon:
        with daemon.connect() as client:
            ns = client.namespace(blocks.SPEC)
            blocks.store(ns, ids)
            blocks.press(client, ns, 40, seed=41)
            assert ns.lookup(ids, keep=0).disk == 32
        with Peer(daemon) as peer:
            peer.hello()
            spec = blocks.SPEC
            opened = peer.want(m.OpenNamespace(spec, spec.digest), m.NamespaceOpened)
            hashes = chain_hashes(spec.digest, ids, spec.block_tokens, np.zeros(32, np.uint64))
            begin = m.Acquire(opened.namespace, 1, hashes.tobytes(), ids.tobytes(), wait=False)
            attend = m.Attend(
                *(opened.namespace, 0, [1], u32(len(ids)), u32(0, 1), Q_HEADS, 0, 4096, 8192)
            )
            # In one piece: the daemon looks at the second before any block can have arrived.
            peer.sock.sendall(encode(3, begin) + encode(4, attend))
            replies = dict(filter(None, (peer.receive(), peer.receive())))
            refused = replies[4]
            assert isinstance(refused, m.Failure), refused
            assert refused.code == "invalid_argument"
            assert "still coming up" in refused.message
            peer.send(5, m.Await(1, 32))
            found = peer.receive()
            assert found is not None
            peer.send(6, attend)
            assert peer.receive() == (6, m.Done())
        assert daemon.stop() == 0
