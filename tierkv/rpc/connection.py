"""The daemon's end of one worker's connection: frames in, requests out, replies back."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Protocol, cast

from tierkv.errors import InvariantViolation, ProtocolError, TierkvError, VersionMismatch
from tierkv.rpc.hangup import HangupWatcher
from tierkv.rpc.messages import PROTOCOL_VERSION, Greeting, Hello, Message, Request
from tierkv.rpc.wire import PAYLOAD_BYTES_MAX, FrameDecoder, decode_request, encode, failure

LINGER_S = 1.0
"""How long a connection that is closed for a reason waits for its peer to read the reason."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What the daemon grants its peers. ``in_flight`` and both sizes are per connection."""

    connections: int = 256
    in_flight: int = 64
    payload_bytes: int = PAYLOAD_BYTES_MAX
    write_buffer_bytes: int = 256 << 10


class RequestHandler(Protocol):
    """What the daemon does with connections. All methods are called on the event loop."""

    @property
    def arena_fd(self) -> int:
        """The device arena's descriptor, handed to every worker."""

    @property
    def table_fd(self) -> int:
        """That of the arena's table file, for reading; handed to every worker."""

    def greeting(self) -> Greeting:
        """The greeting for a new connection. Unless its state is "serving", none is kept."""

    def connected(self, connection: Connection) -> None:
        """A worker has connected; its Hello will be the first request."""

    def request(self, connection: Connection, request_id: int, message: Request) -> None:
        """Answer now or later by ``connection.reply(request_id, ...)``, in any order.

        A TierkvError raised here becomes the reply; InvariantViolation and others go to the loop.
        """

    def disconnected(self, connection: Connection) -> None:
        """The worker has gone: called exactly once for every ``connected``, at once."""


class Connection(asyncio.BufferedProtocol):
    """One worker. ``pid`` (0 from another pid namespace) and ``uid`` are the kernel's word.

    ``received_s``: when bytes came last, monotonic.
    ``refused``: it was closed by us, for a reason that the worker may not have read yet.

    ``scratch_fd`` is memory of ``scratch_bytes`` shared with this worker alone, sealed in size; it
    is closed after ``disconnected``, so whoever needs it longer maps it.
    """

    def __init__(
        self,
        handler: RequestHandler,
        watcher: HangupWatcher,
        limits: ConnectionLimits,
        *,
        pid: int,
        uid: int,
        scratch_fd: int,
        scratch_bytes: int,
    ) -> None:
        self.pid = pid
        self.uid = uid
        self.scratch_fd = scratch_fd
        self.scratch_bytes = scratch_bytes
        self.received_s = 0.0
        self.refused = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handler = handler
        self._watcher = watcher
        self._limits = limits
        self._decoder = FrameDecoder(limits.payload_bytes)
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._open = False
        self._greeted = False
        self._writable = True
        self._reading = True
        self._pumping = False
        self._lingering: asyncio.TimerHandle | None = None
        self._last_id = 0
        self._in_flight: set[int] = set()

    @property
    def open(self) -> bool:
        """False once the worker has gone or was refused."""
        return self._open

    @property
    def in_flight(self) -> int:
        """Requests handed to the handler and not answered yet."""
        return len(self._in_flight)

    def reply(self, request_id: int, message: Message) -> None:
        """Answer a request, once. Does nothing when the worker has gone meanwhile."""
        if not self._open or self._transport is None:
            return
        if request_id not in self._in_flight:
            raise InvariantViolation(f"reply to request {request_id}, not in flight")
        frame = encode(request_id, message)
        self._in_flight.remove(request_id)
        self._transport.write(frame)
        if not self._reading and not self._pumping:
            # In its own turn: an error in the next request is no business of whoever replies now.
            asyncio.get_running_loop().call_soon(self._pump)

    def fail(self, error: TierkvError, request_id: int = 0) -> None:
        """Tell the worker why, and close this connection. Nothing else is affected."""
        if not self._open or self._transport is None:
            return
        self._transport.write(encode(request_id, failure(error)))
        transport = self._transport
        self.refused = True
        self._end()
        transport.close()
        self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Close at once; the worker sees end-of-file."""
        if self._transport is not None and not self.ended.done():
            self._end()
            self._transport.abort()

    # --- called by the event loop -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)
        stream.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._transport = stream
        self._fd = stream.get_extra_info("socket").fileno()
        self._open = True
        self._handler.connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.writable()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_s = time.monotonic()
        self._decoder.received(nbytes)
        self._pump()

    def eof_received(self) -> None:
        self.abort()

    def pause_writing(self) -> None:
        self._writable = False
        if not self._pumping:
            self._read_or_pause()

    def resume_writing(self) -> None:
        self._writable = True
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        if self._lingering is not None:
            self._lingering.cancel()
        os.close(self.scratch_fd)
        self.ended.set_result(None)

    # --- frames -----------------------------------------------------------------------------------

    def _may_proceed(self) -> bool:
        return self._open and self._writable and len(self._in_flight) < self._limits.in_flight

    def _pump(self) -> None:
        """Hand out the frames at hand, then read on or stop reading."""
        self._pumping = True
        try:
            while self._may_proceed():
                frame = self._decoder.next()
                if frame is None:
                    break
                self._receive(frame.request_id, decode_request(frame.payload))
        except ProtocolError as error:
            self.fail(error)
        finally:
            self._pumping = False
        self._read_or_pause()

    def _receive(self, request_id: int, message: Request) -> None:
        self._check_order(request_id, message)
        self._last_id = request_id
        if not self._greeted:
            self._greeted = self._is_greeting(request_id, message)
            if not self._greeted:
                return
        self._in_flight.add(request_id)
        try:
            self._handler.request(self, request_id, message)
        except InvariantViolation:
            raise
        except TierkvError as error:
            self.reply(request_id, failure(error))

    def _is_greeting(self, request_id: int, message: Request) -> bool:
        """Whether the first request speaks our protocol; else the worker hears why, and is gone."""
        if isinstance(message, Hello) and message.version != PROTOCOL_VERSION:
            error = VersionMismatch(
                f"worker speaks protocol {message.version}, this daemon {PROTOCOL_VERSION}: "
                "install the same tierkv on both sides",
                ours=PROTOCOL_VERSION,
                theirs=message.version,
            )
            self.fail(error, request_id)
            return False
        return True

    def _check_order(self, request_id: int, message: Request) -> None:
        if request_id <= self._last_id:
            raise ProtocolError(
                f"request id {request_id} after {self._last_id}; ids must grow",
                reason="out_of_order",
            )
        if isinstance(message, Hello) == self._greeted:
            expected = "one hello only" if self._greeted else "hello first"
            raise ProtocolError(
                f"{type(message).__name__} out of order: {expected}", reason="out_of_order"
            )

    def _read_or_pause(self) -> None:
        proceed = self._may_proceed()
        if proceed is self._reading or not self._open or self._transport is None:
            return
        if proceed and not self._reading:
            self._watcher.forget(self._fd)
            self._transport.resume_reading()
        elif not proceed and self._reading:
            self._transport.pause_reading()
            self._watcher.watch(self._fd, self.abort)
        self._reading = proceed

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._in_flight.clear()
        self._watcher.forget(self._fd)
        self._handler.disconnected(self)
