"""Bytes that are not the protocol: that connection ends with a reason, and nothing else does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from tests.service.raw import Peer
from tests.service.running import Daemon, until
from tierkv.rpc import messages as m
from tierkv.rpc.wire import HEADER, MAGIC, encode

HELLO = m.Hello(m.PROTOCOL_VERSION)

pytestmark = pytest.mark.usefixtures("bystander")


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Peer]:
    with Peer(daemon) as peer:
        yield peer


def frame(payload: bytes, request_id: int = 1, magic: int = MAGIC, size: int = -1) -> bytes:
    return HEADER.pack(len(payload) if size < 0 else size, magic, 0, 0, request_id) + payload


BAD_FRAMES = {
    "noise": (b"\xff" * 64, "bad_magic"),
    "an HTTP request": (b"GET /metrics HTTP/1.1\r\n\r\n", "bad_magic"),
    "wrong magic": (frame(b"\x90", magic=MAGIC ^ 1), "bad_magic"),
    "reserved bytes": (HEADER.pack(1, MAGIC, 0, 7, 1) + b"\x90", "bad_magic"),
    "huge header": (frame(b"", size=0xFFFFFFFF), "oversized"),
    "one byte too many": (frame(b"", size=(16 << 20) + 1), "oversized"),
    "no message": (frame(b""), "undecodable"),
    "not msgpack": (frame(b"\xc1\xc1\xc1"), "undecodable"),
    "not a list": (frame(msgspec.msgpack.encode({"verb": "hello"})), "undecodable"),
    "unknown verb": (frame(msgspec.msgpack.encode(["reboot", 1])), "undecodable"),
    "wrong types": (frame(msgspec.msgpack.encode(["hello", "one", []])), "undecodable"),
    "missing fields": (frame(msgspec.msgpack.encode(["lookup", 1])), "undecodable"),
    "bytes left over": (frame(msgspec.msgpack.encode(HELLO) + b"\x00"), "undecodable"),
    "deep nesting": (frame(b"\x91" * 100_000), "undecodable"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_first_bytes_close_the_connection_with_a_reason(peer: Peer, name: str) -> None:
    sent, reason = BAD_FRAMES[name]
    peer.sock.sendall(sent)
    failure = peer.closing_reason()
    assert failure.code == "protocol"
    assert failure.details["reason"] == reason


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_they_do_so_after_a_hello_as_well(peer: Peer, name: str) -> None:
    sent, reason = BAD_FRAMES[name]
    peer.hello()
    peer.sock.sendall(sent)
    failure = peer.closing_reason()
    assert failure.code == "protocol"
    assert failure.details["reason"] == reason


def test_a_spec_with_unknown_or_ill_typed_fields_is_undecodable(peer: Peer) -> None:
    peer.hello()
    spec = {"model": "m", "layers": "two", "kv_heads": 1, "head_dim": 1, "colour": 3}
    peer.sock.sendall(frame(msgspec.msgpack.encode(["open_namespace", spec, b""]), request_id=2))
    assert peer.closing_reason().details["reason"] == "undecodable"


def test_a_request_before_hello_is_out_of_order(peer: Peer) -> None:
    peer.send(1, m.Stat())
    failure = peer.closing_reason()
    assert (failure.code, failure.details["reason"]) == ("protocol", "out_of_order")
    assert "hello first" in failure.message


def test_a_second_hello_is_out_of_order(peer: Peer) -> None:
    peer.hello()
    peer.send(2, HELLO)
    failure = peer.closing_reason()
    assert (failure.code, failure.details["reason"]) == ("protocol", "out_of_order")
    assert "one hello only" in failure.message


@pytest.mark.parametrize("request_id", [0, 1])
def test_request_ids_must_grow(peer: Peer, request_id: int) -> None:
    peer.hello()
    peer.send(request_id, m.Stat())
    failure = peer.closing_reason()
    assert (failure.code, failure.details["reason"]) == ("protocol", "out_of_order")
    assert "ids must grow" in failure.message


@pytest.mark.parametrize("version", [0, m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1, 2**31])
def test_another_protocol_version_is_refused_and_named(peer: Peer, version: int) -> None:
    peer.send(1, m.Hello(version))
    found = peer.receive()
    assert found is not None
    request_id, failure = found
    assert request_id == 1
    assert isinstance(failure, m.Failure)
    assert failure.code == "version_mismatch"
    assert failure.details == {"ours": m.PROTOCOL_VERSION, "theirs": version}
    assert peer.receive() is None


def test_a_truncated_frame_and_then_silence_holds_up_nobody(daemon: Daemon, peer: Peer) -> None:
    whole = bytes(encode(1, HELLO))
    with Peer(daemon) as other:
        peer.sock.sendall(whole[:1])
        other.hello()
        peer.sock.sendall(whole[1:-1])
        other.want(m.Stat(), m.Status)
        peer.sock.sendall(whole[-1:])
        found = peer.receive()
        assert found is not None
        assert isinstance(found[1], m.Welcome)


def test_a_peer_that_goes_in_the_middle_of_a_frame_is_forgotten(daemon: Daemon) -> None:
    before = daemon.status()["connections"]
    peer = Peer(daemon).hello()
    assert daemon.status()["connections"] == before + 1
    peer.sock.sendall(bytes(encode(2, m.Stat()))[:-1])
    peer.close()
    until(lambda: daemon.status()["connections"] == before)


def test_the_lease_of_a_misbehaving_peer_ends_at_once(daemon: Daemon, peer: Peer) -> None:
    before = daemon.status()["leases"]
    peer.hello()
    assert daemon.status()["leases"] == before + 1
    peer.sock.sendall(b"\xff" * 16)
    peer.closing_reason()
    assert daemon.status()["leases"] == before


def test_a_peer_that_never_reads_its_replies_is_not_read_from_any_more(
    daemon: Daemon, peer: Peer
) -> None:
    """Unread replies must not gather in the daemon without end."""
    peer.hello()
    peer.sock.settimeout(0.5)
    sent = 0
    try:
        for request_id in range(2, 200_000):
            peer.send(request_id, m.Stat())
            sent += 1
    except TimeoutError:
        pass
    assert sent < 100_000
    with Peer(daemon) as other:
        other.hello()
        other.want(m.Stat(), m.Status)


def test_many_peers_that_say_nothing_cost_only_their_connections(daemon: Daemon) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(50)]
    try:
        for sock in silent:
            sock.connect(os.fspath(daemon.socket))
        with Peer(daemon) as peer:
            peer.hello()
            peer.want(m.Stat(), m.Status)
    finally:
        for sock in silent:
            sock.close()
