"""What every driver has: start, put, get, exists, forget, stop."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.content import U8, key_of

START_TIMEOUT_S = 120.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """Where a peer may live: a folder on the measured disk, one in RAM, a CPU for its server.

    Sockets belong into ``memory``, whose path is short: theirs is limited to 107 bytes.

    ``capacity`` and ``block_bytes`` say how much it is to hold; ``options`` is what makes this
    variant of the peer.
    """

    folder: Path
    memory: Path
    server_cpu: int
    capacity: int
    block_bytes: int
    options: dict[str, Any] = field(default_factory=dict)


class Driver(ABC):
    """A peer as its user's process sees it. ``keys`` are the peer's own terms, made beforehand."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.servers: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start what there is to start, on what an earlier one left in the place, and connect."""

    @abstractmethod
    def put(self, keys: Any, blocks: U8) -> None:
        """Store the blocks (u8 [n, block_bytes]). Raises if the peer does not acknowledge all."""

    @abstractmethod
    def get(self, keys: Any, out: U8) -> list[bool]:
        """Copy the blocks into the user's buffer (u8 [n, block_bytes]); which were there."""

    @abstractmethod
    def exists(self, keys: Any) -> int:
        """How many of the keys there are."""

    @property
    @abstractmethod
    def version(self) -> str:
        """What was measured."""

    def keys(self, numbers: Sequence[int]) -> Any:
        """The keys of these blocks, as the peer wants them. Blocks are put and got in one order."""
        return [key_of(number) for number in numbers]

    def forget(self, keys: Any) -> None:  # noqa: B027 -- most peers make room by themselves
        """Make room, where the peer does not do so by itself while it puts. Not timed."""

    def memory(self, rows: int, columns: int) -> U8:
        """Memory that blocks are put from and got into (u8 [rows, columns]), touched."""
        return np.ones((rows, columns), np.uint8)  # zeros would be touched only later

    def stop(self) -> None:
        """Leave nothing behind."""
        self.kill()

    def kill(self) -> None:
        """kill -9 of the servers."""
        for server in self.servers:
            server.send_signal(signal.SIGKILL)
            server.wait()
        self.servers.clear()

    def spawn(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """A server on its CPU, that ends with this process; its words are in ``server.log``."""
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.place.server_cpu})
        try:
            with (self.place.folder / "server.log").open("ab") as log:
                server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    preexec_fn=_end_with_parent,
                )
        finally:
            os.sched_setaffinity(0, own)
        self.servers.append(server)
        return server

    def await_server(self, reach: Callable[[], Any], *errors: type[Exception]) -> Any:
        """What ``reach`` returns as soon as it raises none of the errors.

        Raises RuntimeError with the server's last words if it has ended or takes too long.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return reach()
            except errors as error:
                ended = any(server.poll() is not None for server in self.servers)
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"no server: {error}; {self.last_words()}") from error
                time.sleep(0.002)

    def last_words(self) -> str:
        """The end of the servers' log."""
        log = self.place.folder / "server.log"
        return log.read_text(errors="replace")[-1000:] if log.exists() else ""


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on, for servers that know no Unix sockets."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def knock(port: int) -> None:
    """Raises OSError unless somebody listens."""
    socket.create_connection(("127.0.0.1", port), 1).close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
