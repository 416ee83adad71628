"""Frames: a 16-byte header and a msgpack payload. No I/O here.

Header, little-endian: u32 payload bytes, u8 magic, u8 and u16 zero, u64 request id. A request id
is chosen by the worker, greater than all it used before on the connection; the reply repeats it.
Id 0 is the daemon's own: the greeting, and the failure that closes a connection.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeVar

import msgspec

from tierkv.errors import (
    LimitExceeded,
    NotReady,
    ProtocolError,
    TierkvError,
    VersionMismatch,
    error_from_wire,
)
from tierkv.rpc.messages import PROTOCOL_VERSION, Failure, Greeting, Message, Reply, Request

HEADER = struct.Struct("<IBBHQ")
HEADER_BYTES = HEADER.size
MAGIC = 0xA1
"""High half: this is tierkv. Low half: version of the frame, not of the messages."""

PAYLOAD_BYTES_MAX = 16 << 20
"""Largest payload unless configured otherwise: an ``acquire`` of about 3 million tokens."""

BUFFER_BYTES = 16 << 10
BUFFER_BYTES_KEPT = 256 << 10

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_openings: msgspec.msgpack.Decoder[Greeting | Failure] = msgspec.msgpack.Decoder(Greeting | Failure)

T = TypeVar("T")


class Frame(NamedTuple):
    """One frame. ``payload`` lies in the decoder's buffer, until more bytes are received."""

    request_id: int
    payload: memoryview


class FrameDecoder:
    """Cuts a stream into frames inside one reusable buffer.

    Receive into ``writable()``, say how much with ``received()``, then take frames with ``next()``
    until it returns None. The buffer grows with the bytes that came, never on a header's word
    alone, to at most twice the largest frame; it shrinks when it is empty again.
    """

    def __init__(self, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self._payload_bytes_max = payload_bytes_max
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = 0
        self._end = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes received and not yet taken."""
        return self._end - self._start

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory the buffer holds."""
        return len(self._view)

    def writable(self) -> memoryview:
        """Where to receive next; never empty. Ends the life of payloads taken before."""
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) > BUFFER_BYTES_KEPT:
                self._view = memoryview(bytearray(BUFFER_BYTES))
        elif self._end == len(self._view):
            self._make_room()
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """``count`` bytes were written to ``writable()``."""
        self._end += count

    def next(self) -> Frame | None:
        """The next whole frame, or None.

        Raises ProtocolError with ``reason`` ``bad_magic`` or ``oversized``; the stream is then
        useless.
        """
        if self._end - self._start < HEADER_BYTES:
            return None
        payload_bytes, magic, zero, zeros, request_id = HEADER.unpack_from(self._view, self._start)
        if magic != MAGIC or zero or zeros:
            raise ProtocolError(
                f"frame header starts a protocol that is not tierkv's (byte 4 is {magic:#04x}, "
                f"expected {MAGIC:#04x}, then three zeros)",
                reason="bad_magic",
            )
        if payload_bytes > self._payload_bytes_max:
            raise ProtocolError(
                f"frame of {payload_bytes} payload bytes; the limit is {self._payload_bytes_max}",
                reason="oversized",
                limit=self._payload_bytes_max,
                asked=payload_bytes,
            )
        begin = self._start + HEADER_BYTES
        end = begin + payload_bytes
        if self._end < end:
            return None
        self._start = end
        return Frame(request_id, self._view[begin:end])

    def _make_room(self) -> None:
        used = self._end - self._start
        target = self._view
        if used > len(self._view) // 2:
            target = memoryview(bytearray(2 * len(self._view)))
        target[:used] = self._view[self._start : self._end]
        self._view, self._start, self._end = target, 0, used


def encode(
    request_id: int, message: Message, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> bytearray:
    """The frame of one message; blobs are copied once.

    Raises LimitExceeded when the payload passes the limit.
    """
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    payload_bytes = len(frame) - HEADER_BYTES
    if payload_bytes > payload_bytes_max:
        raise LimitExceeded(
            f"{type(message).__name__} takes {payload_bytes} bytes; a message may have "
            f"{payload_bytes_max}: ask for fewer blocks at a time",
            limit=payload_bytes_max,
            asked=payload_bytes,
        )
    HEADER.pack_into(frame, 0, payload_bytes, MAGIC, 0, 0, request_id)
    return frame


def decode_request(payload: memoryview | bytes) -> Request:
    """Raises ProtocolError with ``reason`` ``undecodable``."""
    return _decode(_requests, payload)


def decode_reply(payload: memoryview | bytes) -> Reply:
    """Raises ProtocolError with ``reason`` ``undecodable``."""
    return _decode(_replies, payload)


def decode_opening(payload: memoryview | bytes) -> Greeting | Failure:
    """The first frame of a connection: a greeting, or why there is none.

    Raises ProtocolError with ``reason`` ``undecodable``.
    """
    return _decode(_openings, payload)


def failure(error: TierkvError) -> Failure:
    """The message that carries a typed error; only plain details travel."""
    plain: dict[str, Any] = {
        key: value
        for key, value in error.details.items()
        if isinstance(value, (str, int, float, bool))
    }
    return Failure(error.code, error.message, plain)


def unknown_reply(request_id: int) -> ProtocolError:
    """A reply came to a request that nobody sent."""
    return ProtocolError(f"reply to unknown request {request_id}", reason="unknown_reply")


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: memoryview | bytes) -> T:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"undecodable message: {error}", reason="undecodable") from error


def error_of(failed: Failure) -> TierkvError:
    """The typed error that a Failure stands for."""
    return error_from_wire(failed.code, failed.message, failed.details)


def require_service(opening: Greeting | Failure, ours: str) -> Greeting:
    """The first frame of a connection, if it greets whoever ``ours`` is, and is ready to serve.

    Raises VersionMismatch, NotReady(state) when the daemon does not serve, and the daemon's own
    error when it refuses.
    """
    if isinstance(opening, Failure):
        raise error_of(opening)
    if opening.version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the daemon speaks protocol {opening.version}, this {ours} {PROTOCOL_VERSION}: "
            "install the same tierkv on both sides",
            ours=PROTOCOL_VERSION,
            theirs=opening.version,
        )
    if opening.state != "serving":
        raise NotReady(f"the daemon is {opening.state}", state=opening.state)
    return opening
