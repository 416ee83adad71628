"""The round trip's ceiling: a blocking echo server, compiled on the spot.

Without a C compiler a Python server takes its place, and the reference is called so. One client at
a time: this process, or the C client.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from tierkv.bench.ceilings import nanoseconds, program
from tierkv.bench.harness import F64, Bench, Placement, child_environment, each_call

HEADER_BYTES = 16
REPLY_BYTES_MAX = 16 << 20


class Echo:
    """An echo server whose replies have ``reply_bytes``, on the server's CPU."""

    def __init__(self, bench: Bench, placement: Placement, reply_bytes: int) -> None:
        self._bench = bench
        self._placement = placement
        self._reply_bytes = reply_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="tierkv-echo-"))
        self._path = str(self._folder / "echo.sock")
        self._program = program(bench.folder, "echo")
        self.name = "C echo" if self._program else "Python echo"

    def __enter__(self) -> Self:
        server = [self._program] if self._program else [sys.executable, "-m", "tierkv.bench.echo"]
        command = [*server, "serve", self._path, str(self._reply_bytes)]
        self._process = self._bench.spawn(self._placement.server, command, env=child_environment())
        try:
            self._sock = self._connect()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._bench.reap(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def exchange(self, request: bytes | bytearray) -> None:
        """One round trip from this process."""
        self._sock.sendall(request)
        receive(self._sock, self._buffer)

    def ping(self, request_bytes: int, count: int) -> F64:
        """Seconds of each of ``count`` round trips of the C client, shape [count].

        This process's own where there is no compiler.
        """
        request = frame(request_bytes)
        if self._program is None:
            return each_call(lambda: self.exchange(request), count)
        self._sock.close()  # one client at a time
        command = [self._program, "ping", self._path, str(request_bytes), str(count)]
        try:
            return nanoseconds(self._bench, self._placement.client, command)
        finally:
            self._sock = self._connect()

    def _connect(self) -> socket.socket:
        self._buffer = memoryview(bytearray(self._reply_bytes))
        deadline = time.monotonic() + 10
        while True:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._path)
                return sock
            except OSError:
                sock.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)


def frame(size_bytes: int) -> bytes:
    """A frame of zeroes that is this long, header included."""
    return (size_bytes - HEADER_BYTES).to_bytes(4, "little") + bytes(size_bytes - 4)


def receive(sock: socket.socket, buffer: memoryview) -> int:
    """Receive one frame; returns how long it is."""
    got = sock.recv_into(buffer)
    while got < HEADER_BYTES or got < HEADER_BYTES + int.from_bytes(buffer[:4], "little"):
        received = sock.recv_into(buffer[got:])
        if not received:
            raise ConnectionError("the server hung up")
        got += received
    return got


def _serve(path: str, reply_bytes: int) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    reply, buffer = frame(reply_bytes), memoryview(bytearray(REPLY_BYTES_MAX))
    while True:
        peer, _ = listening.accept()
        got = 0
        while received := peer.recv_into(buffer[got:]):
            got += received
            if got >= HEADER_BYTES + int.from_bytes(buffer[:4], "little"):
                peer.sendall(reply)
                got = 0
        peer.close()


if __name__ == "__main__":
    _serve(sys.argv[2], int(sys.argv[3]))
