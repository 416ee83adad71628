"""Test support: a real Listener on its own event loop in a thread, and raw sockets to it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from tierkv.rpc.connection import Connection, ConnectionLimits
from tierkv.rpc.listener import Listener, bind_socket
from tierkv.rpc.messages import PROTOCOL_VERSION, Greeting, Hello, Message, Request, Welcome
from tierkv.rpc.wire import FrameDecoder, decode_opening, decode_reply, encode

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
WAIT_S = 10.0
"""Longest wait for something that must happen; only a failing test reaches it."""


class Serving:
    """Runs a Listener for ``handler`` in a thread; use as a context manager."""

    def __init__(self, handler, path: Path, loop_factory, uids=None, limits=None) -> None:
        self.handler = handler
        self.path = path
        self._loop_factory = loop_factory
        self._uids = uids
        self._limits = limits or ConnectionLimits()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        return self

    def __exit__(self, *exc) -> None:
        self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def call(self, function: Callable, *args):
        """Run ``function`` on the server's loop and return what it returns."""

        async def on_loop():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(WAIT_S)

    def until(self, condition: Callable[[], bool]) -> None:
        """Let the server's loop turn until ``condition`` holds, evaluated on it."""
        deadline = time.monotonic() + WAIT_S
        while not self.call(condition):
            assert time.monotonic() < deadline

    def _bind(self) -> socket.socket:
        return bind_socket(self.path)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.listener = Listener(self._bind(), self.handler, uids=self._uids, limits=self._limits)
        self._ready.set()
        try:
            await self.listener.serve()
        except asyncio.CancelledError:
            await self.listener.close()


class RecordingHandler:
    """Records what it is told; answers Hello, and the rest as ``answer`` says (or not at all)."""

    def __init__(self, arena_fd: int = -1, arena_bytes: int = 0, scratch_bytes: int = 4096):
        self.arena_fd = arena_fd
        self.table_fd = arena_fd
        self.state = "serving"
        self.arena_bytes = arena_bytes
        self.scratch_bytes = scratch_bytes
        self.requests: list[tuple[int, Request]] = []
        self.gone: list[Connection] = []
        self.live: list[Connection] = []
        self.changed = threading.Condition()
        self.answer: Callable[[Connection, int, Request], None] = lambda *_: None

    def greeting(self) -> Greeting:
        return Greeting(
            PROTOCOL_VERSION, 1, b"A" * 16, self.arena_bytes, self.scratch_bytes, self.state
        )

    def connected(self, connection: Connection) -> None:
        with self.changed:
            self.live.append(connection)
            self.changed.notify_all()

    def request(self, connection: Connection, request_id: int, message: Request) -> None:
        with self.changed:
            self.requests.append((request_id, message))
            self.changed.notify_all()
        if isinstance(message, Hello):
            connection.reply(request_id, Welcome(1, b"T" * 16, 1, False, []))
        else:
            self.answer(connection, request_id, message)

    def disconnected(self, connection: Connection) -> None:
        with self.changed:
            self.live.remove(connection)
            self.gone.append(connection)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


class RawPeer:
    """A worker that says exactly what the test tells it to."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(os.fspath(path))
        self.decoder = FrameDecoder()
        data, self.fds, _, _ = socket.recv_fds(self.sock, 4096, 3)
        room = self.decoder.writable()
        room[: len(data)] = data
        self.decoder.received(len(data))
        frame = self.decoder.next()
        self.opening_id, self.opening = frame.request_id, decode_opening(frame.payload)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def send(self, request_id: int, message: Message) -> None:
        self.sock.sendall(encode(request_id, message))

    def hello(self) -> None:
        self.send(1, Hello(PROTOCOL_VERSION))
        request_id, reply = self.receive()
        assert request_id == 1
        assert isinstance(reply, Welcome)

    def receive(self) -> tuple[int, Message] | None:
        """The next message, None at end of file."""
        while (frame := self.decoder.next()) is None:
            count = self.sock.recv_into(self.decoder.writable())
            if count == 0:
                return None
            self.decoder.received(count)
        return frame.request_id, decode_reply(frame.payload)
