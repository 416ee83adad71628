"""A daemon to measure: its own process on the server's CPU, in folders of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Self

import numpy as np

import tierkv
from tierkv.bench.echo import receive
from tierkv.bench.harness import Bench, Placement, child_environment
from tierkv.client.attach import Opening
from tierkv.client.sync import Client
from tierkv.core.ids import U32
from tierkv.core.spec import KVSpec
from tierkv.rpc.messages import (
    PROTOCOL_VERSION,
    Hello,
    NamespaceOpened,
    OpenNamespace,
    Reply,
    Request,
)
from tierkv.rpc.wire import HEADER_BYTES, decode_reply, encode

SHM = Path("/dev/shm")
START_TIMEOUT_S = 120.0


class Daemon:
    """``tierkv serve`` with small settings; ``settings`` override them ("disk.bytes": "64 MiB").

    A context manager: it is killed at the end and its folders are removed. With ``bench.profile``
    it runs under cProfile and is told to stop instead.
    """

    def __init__(
        self, bench: Bench, placement: Placement, name: str, settings: dict[str, str]
    ) -> None:
        self._bench = bench
        self._placement = placement
        self._name = name
        self.state = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=bench.folder))
        # A socket's path is short, whatever folder is measured.
        self._run = Path(tempfile.mkdtemp(prefix="tierkv-bench-"))
        self.socket = str(self._run / "tierkv.sock")
        own = f"tierkv-bench-{os.getpid()}-"
        self.arenas = Path(tempfile.mkdtemp(prefix=own, dir=_shared_folder()))
        self._log = self._run / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = {
            "server.socket": self.socket,
            "server.state_dir": str(self.state),
            "arena.dir": str(self.arenas),
            "device.bytes": "16 MiB",
            "host.bytes": "0",
            "disk.bytes": "0",
            "wal.segment_bytes": "16 MiB",
            "metrics.tcp": "",
            "metrics.socket": str(self._run / "metrics.sock"),
            **settings,
        }

    @property
    def settings(self) -> dict[str, str]:
        """All that it is started with."""
        return dict(self._settings)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid if self._process else 0

    def start(self) -> float:
        """Start and wait until it serves; returns the seconds from process start to greeting."""
        Path(self.socket).unlink(missing_ok=True)
        runner = ["-m", "tierkv"]
        if self._bench.profile:
            stats = self._bench.profile / f"{self._name}.prof"
            runner = ["-m", "cProfile", "-o", str(stats), *runner]
        command = [sys.executable, *runner, "serve"]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        with self._log.open("ab") as log:
            began = time.perf_counter()
            self._process = self._bench.spawn(
                self._placement.server, command, stderr=log, env=child_environment()
            )
            self._await_greeting()
            return time.perf_counter() - began

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Let it drain."""
        self._end(signal.SIGTERM)

    def connect(self) -> Client:
        """A worker."""
        return tierkv.connect(self.socket)

    def metrics(self) -> str:
        """The page /metrics."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self._run / "metrics.sock"))
            sock.sendall(b"GET /metrics HTTP/1.0\r\nHost: bench\r\n\r\n")
            received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        return received.decode().partition("\r\n\r\n")[2]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # an interrupt, too: nothing may stay
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end(signal.SIGTERM if self._bench.profile else signal.SIGKILL)
        for folder in (self.state, self._run, self.arenas):
            shutil.rmtree(folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._bench.reap(self._process)
            self._process = None

    def _await_greeting(self) -> None:
        """The socket takes connections before recovery, and greets when it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                Link(self.socket).close()
                return
            except OSError:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    words = self._log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the daemon does not serve:\n{words}") from None
                time.sleep(0.002)


def shared_file() -> IO[bytes]:
    """An unnamed file where daemons that are measured have their arenas."""
    return tempfile.TemporaryFile(dir=_shared_folder())


def _shared_folder() -> Path | None:
    return SHM if SHM.is_dir() and os.access(SHM, os.W_OK) else None


class Link:
    """A bare connection with a lease, for requests that are encoded beforehand."""

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            self._sock.connect(path)
            opening = Opening()
            while opening.greeting is None:
                opening.receive(self._sock)
        except BaseException:
            self._sock.close()
            raise
        opening.close()
        self._last_id = 0
        self._buffer = memoryview(bytearray(1 << 20))
        self.call(Hello(PROTOCOL_VERSION, "bench"))

    def open(self, spec: KVSpec) -> int:
        """Open a namespace; returns its number."""
        opened = self.call(OpenNamespace(spec, spec.digest))
        if not isinstance(opened, NamespaceOpened):
            raise TypeError(f"the daemon answered {opened}")
        return opened.namespace

    def call(self, request: Request) -> Reply:
        """Encode, send, receive, decode."""
        return self.decode(self.exchange(encode(0, request)))

    def decode(self, size: int) -> Reply:
        """The reply of ``size`` bytes that came last."""
        return decode_reply(self._buffer[HEADER_BYTES:size])

    def exchange(self, frame: bytearray) -> int:
        """Send a frame under the next id and take its reply, undecoded; returns its bytes."""
        self.send(frame)
        return self.receive()

    def send(self, frame: bytearray) -> None:
        """Send a frame under the next id."""
        self._last_id += 1
        frame[8:16] = self._last_id.to_bytes(8, "little")
        self._sock.sendall(frame)

    def receive(self) -> int:
        """Take a reply, undecoded; returns its bytes."""
        return receive(self._sock, self._buffer)

    def close(self) -> None:
        """End the lease."""
        self._sock.close()


def spec_of(block_bytes: int, block_tokens: int = 16) -> KVSpec:
    """A geometry with blocks of this size: one layer, one head, as wide as needed."""
    return KVSpec(
        model=f"bench-{block_bytes}",
        layers=1,
        kv_heads=1,
        head_dim=block_bytes // (2 * block_tokens),
        dtype="uint8",
        block_tokens=block_tokens,
    )


def some_tokens(seed: int, count: int) -> U32:
    """Token ids that no other seed shares (u32 [count])."""
    return np.random.default_rng(seed).integers(0, 1 << 31, count, np.uint32)
