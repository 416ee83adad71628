"""Frames and the decoder: any split, any garbage."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.spec import KVSpec
from tierkv.errors import LimitExceeded, PoolExhausted, ProtocolError, error_from_wire
from tierkv.rpc import messages
from tierkv.rpc.wire import (
    BUFFER_BYTES_KEPT,
    HEADER_BYTES,
    FrameDecoder,
    decode_opening,
    decode_reply,
    decode_request,
    encode,
    failure,
)

SPEC = KVSpec(model="m", layers=2, kv_heads=1, head_dim=8)
REQUESTS = [
    messages.Hello(1, "worker", b"t" * 16),
    messages.OpenNamespace(SPEC, SPEC.digest),
    messages.Lookup(1, b"h" * 32),
    messages.Acquire(1, 2, b"h" * 32, b"t" * 128, b""),
    messages.Reserve(2, 16, 48),
    messages.Seal(2, 0, b"h" * 16, b"t" * 64, b"c" * 16),
    messages.Truncate(2, 3),
    messages.Fork(2, 3, 17),
    messages.Suspend(2),
    messages.Resume(2),
    messages.Release([2, 3]),
    messages.Attend(1, 0, [2], b"l" * 4, b"i" * 8, 4, 0, 64, 128, 0.5, False, 9, 30.0),
    messages.Stat(),
    messages.Flush(),
    messages.Drain(undo=True, look=True),
    messages.Reload(),
    messages.List("chains", messages.Selector(1, "acme", "0a"), 5, 10),
    messages.Inspect("lease", 7),
    messages.Contents(messages.Selector(tenant="acme"), 2**60, 10),
    messages.Pin(messages.Selector(hash="0a"), undo=True),
    messages.Delete(messages.Selector(namespace=3), really=True),
    messages.Warm(messages.Selector()),
]
REPLIES = [
    messages.Welcome(1, b"t" * 16, 3, True, [messages.SequenceState(2, 1, b"s" * 8, 1, False)]),
    messages.NamespaceOpened(1, 4096, 4096, 100, 8192, 152, 16384, 64),
    messages.Found(3, 1, 1, 1),
    messages.Table(2, b"s" * 8, 1, 1, 0, 0),
    messages.Done(),
    messages.Status({"tiers": {"device": 3}}),
    messages.Draining(True, 2, 300, False),
    messages.Reloaded(["log.level"], ["device.bytes"]),
    messages.Listed([{"hash": "0a", "tiers": ["disk"]}], 7, 70),
    messages.Inspected({"tokens": [1, 2]}),
    messages.Content(b"n" * 4, b"h" * 16, b"p" * 16, [b"t" * 64], b"e" * 8, 2**60, 1),
    messages.Pinned(1, 20, -3),
    messages.Deleted(5, {"disk": 9}, 1, 0, True),
    messages.Warmed(1, 2, 3),
    messages.Failure("protocol", "no", {"reason": "oversized"}),
]


def feed(decoder: FrameDecoder, data: bytes, step: int) -> list[tuple[int, bytes]]:
    """Push ``data`` in pieces of at most ``step`` bytes; all frames that come out."""
    frames = []
    while data:
        room = decoder.writable()[:step]
        piece, data = data[: len(room)], data[len(room) :]
        room[: len(piece)] = piece
        decoder.received(len(piece))
        while (frame := decoder.next()) is not None:
            frames.append((frame.request_id, bytes(frame.payload)))
    return frames


def reason_or_result(call, *args):
    """What ``call`` returns, or the reason of the ProtocolError it raises."""
    try:
        return call(*args)
    except ProtocolError as error:
        return error.details["reason"]


def test_every_message_survives_the_trip():
    for message in REQUESTS:
        assert decode_request(bytes(encode(7, message))[HEADER_BYTES:]) == message
    for message in REPLIES:
        assert decode_reply(bytes(encode(7, message))[HEADER_BYTES:]) == message
    greeting = messages.Greeting(1, 2, b"a" * 16, 1 << 30, 4096, "serving")
    assert decode_opening(bytes(encode(0, greeting))[HEADER_BYTES:]) == greeting


def test_the_header_is_what_the_page_says():
    frame = encode(0x0102030405060708, messages.Stat())
    assert frame[:4] == struct.pack("<I", len(frame) - 16)
    assert frame[4:8] == b"\xa1\0\0\0"
    assert frame[8:16] == bytes([8, 7, 6, 5, 4, 3, 2, 1])


@pytest.mark.parametrize("step", [1, 2, 3, 5, 15, 16, 17, 64, 1 << 20])
def test_frames_come_out_whole_at_any_split(step):
    stream = b"".join(bytes(encode(i + 1, m)) for i, m in enumerate(REQUESTS))
    frames = feed(FrameDecoder(), stream, step)
    assert [decode_request(payload) for _, payload in frames] == REQUESTS
    assert [request_id for request_id, _ in frames] == list(range(1, len(REQUESTS) + 1))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 70_000), max_size=4), step=st.integers(700, 50_000))
def test_any_sizes_at_any_split(sizes, step):
    blobs = [bytes([i]) * size for i, size in enumerate(sizes)]
    sent = [messages.Lookup(1, blob) for blob in blobs]
    stream = b"".join(bytes(encode(i + 1, m)) for i, m in enumerate(sent))
    assert [decode_request(payload) for _, payload in feed(FrameDecoder(), stream, step)] == sent


def test_a_truncated_frame_is_no_frame():
    whole = bytes(encode(1, REQUESTS[3]))
    for cut in range(len(whole)):
        assert feed(FrameDecoder(), whole[:cut], 1 << 20) == []


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error_or_waits_for_more(data):
    decoder = FrameDecoder(1024)
    frames = reason_or_result(feed, decoder, data, 7)
    if isinstance(frames, list):
        framed = sum(HEADER_BYTES + len(payload) for _, payload in frames)
        assert decoder.buffered_bytes + framed == len(data)
    else:
        assert frames in ("bad_magic", "oversized")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_a_garbage_payload_is_undecodable(payload):
    for decode in (decode_request, decode_reply, decode_opening):
        found = reason_or_result(decode, payload)
        assert found == "undecodable" or isinstance(found, messages.Message)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
tags = st.sampled_from([type(message).__struct_config__.tag for message in REQUESTS])


@settings(deadline=None)
@given(tag=tags, fields=st.lists(values, max_size=9))
def test_wrong_types_are_undecodable_and_nothing_else(tag, fields):
    payload = msgspec.msgpack.encode([tag, *fields])
    found = reason_or_result(decode_request, payload)
    assert found == "undecodable" or isinstance(found, messages.Message)


def test_deep_nesting_is_undecodable():
    bomb = b"\x92\xa6status" + b"\x91" * 100_000
    with pytest.raises(ProtocolError, match="undecodable"):
        decode_reply(bomb)


def test_an_invalid_string_is_undecodable():
    with pytest.raises(ProtocolError, match="undecodable"):
        decode_reply(b"\x94\xa7failure\xa2\xff\xfe\xa1x\x80")


def test_a_wrong_magic_is_told_at_the_header():
    with pytest.raises(ProtocolError) as caught:
        feed(FrameDecoder(), b"GET / HTTP/1.1\r\n", 100)
    assert caught.value.details["reason"] == "bad_magic"


def test_reserved_bytes_must_be_zero():
    frame = encode(1, messages.Stat())
    for index in (5, 6, 7):
        bent = bytearray(frame)
        bent[index] = 1
        with pytest.raises(ProtocolError, match="header"):
            feed(FrameDecoder(), bytes(bent), 100)


def test_an_oversized_frame_is_refused_by_its_header_alone():
    decoder = FrameDecoder(1000)
    with pytest.raises(ProtocolError) as caught:
        feed(decoder, bytes(encode(1, messages.Lookup(1, b"x" * 1001)))[:16], 100)
    assert caught.value.details["reason"] == "oversized"
    assert decoder.capacity_bytes <= 16 << 10


def test_the_sender_refuses_an_oversized_message():
    with pytest.raises(LimitExceeded) as caught:
        encode(1, messages.Lookup(1, b"x" * 2000), 1000)
    assert caught.value.details["limit"] == 1000


def test_memory_follows_the_bytes_sent_not_the_bytes_announced():
    decoder = FrameDecoder()
    announced = bytes(encode(1, messages.Lookup(1, b"x" * (8 << 20))))
    feed(decoder, announced[:100], 100)
    assert decoder.capacity_bytes <= 16 << 10
    assert len(feed(decoder, announced[100:], 1 << 16)) == 1
    decoder.writable()
    assert decoder.capacity_bytes <= BUFFER_BYTES_KEPT


def test_a_failure_carries_plain_details_only():
    error = PoolExhausted("full", tier="device", asked=3, free=1, cause=object())
    sent = failure(error)
    assert sent.details == {"tier": "device", "asked": 3, "free": 1}
    rebuilt = error_from_wire(sent.code, sent.message, sent.details)
    assert isinstance(rebuilt, PoolExhausted)
    assert rebuilt.details["asked"] == 3
