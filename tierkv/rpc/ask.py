"""One question to the daemon and its answer, for tools: no lease, no memory mapped, few imports."""

from __future__ import annotations

import errno
import os
import socket
import time

from tierkv.config.paths import SYSTEM_SOCKET
from tierkv.errors import NotReady, Unavailable
from tierkv.rpc.messages import PROTOCOL_VERSION, Failure, Hello, Reply, Request
from tierkv.rpc.wire import (
    Frame,
    FrameDecoder,
    decode_opening,
    decode_reply,
    encode,
    error_of,
    require_service,
)

GREETING_S = 5.0
"""Longest wait for a greeting, however long the answer may take: a daemon that hangs gives none."""

_HELLO_ID, _REQUEST_ID = 1, 2
_NAME = "tierkv command"
_FORBIDDEN = (errno.EACCES, errno.EPERM)


def ask(path: str, request: Request, timeout_s: float) -> Reply:
    """Connect, ask, and return the answer; all of it within ``timeout_s``.

    The descriptors of the greeting are left to the kernel, which closes them.

    Raises Unavailable when nobody listens or this user may not connect, NotReady when whoever
    listens greets or answers nobody in time or is starting, VersionMismatch, and the daemon's own
    error.
    """
    began_s, greeted = time.monotonic(), False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(min(timeout_s, GREETING_S))
            sock.connect(path)
            frames = _Frames(sock)
            opening = frames.next(began_s + min(timeout_s, GREETING_S))
            require_service(decode_opening(opening.payload), "tierkv")
            greeted = True
            hello = Hello(PROTOCOL_VERSION, _NAME, lease=False)
            sock.sendall(encode(_HELLO_ID, hello) + encode(_REQUEST_ID, request))
            return _answer(frames, began_s + timeout_s)
        except (TimeoutError, BlockingIOError) as error:
            raise _not_ready(path, greeted, timeout_s) from error
        except OSError as error:
            raise _unavailable(path, error) from error


def _answer(frames: _Frames, by_s: float) -> Reply:
    """The reply to the request, or the error that either of both got."""
    while True:
        frame = frames.next(by_s)
        reply = decode_reply(frame.payload)
        if isinstance(reply, Failure):
            raise error_of(reply)
        if frame.request_id == _REQUEST_ID:
            return reply


class _Frames:
    """The frames that come, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder()

    def next(self, by_s: float) -> Frame:
        """Raises OSError, TimeoutError."""
        while (frame := self._decoder.next()) is None:
            left_s = by_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            count = self._sock.recv_into(self._decoder.writable())
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
            self._decoder.received(count)
        return frame


def _not_ready(path: str, greeted: bool, timeout_s: float) -> NotReady:
    if greeted:
        return NotReady(
            f"the daemon has not answered within {timeout_s:g} s ({path}); it may be done all the "
            "same, see `tierkv status`"
        )
    return NotReady(f"the daemon does not answer yet, it may be recovering ({path}); try again")


def _unavailable(path: str, error: OSError) -> Unavailable:
    why = error.strerror or os.strerror(error.errno or errno.EIO)
    if error.errno in _FORBIDDEN:
        return Unavailable(
            f"{path}: {why}; this user must belong to the socket's group, and be in "
            "server.allowed_uids"
        )
    start = "systemctl start tierkv" if path == SYSTEM_SOCKET else "tierkv serve"
    return Unavailable(f"no daemon serves on {path}: {why}; start one by `{start}`")
