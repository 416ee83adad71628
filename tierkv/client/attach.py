"""Finding the daemon, and mapping the memory whose descriptors ride on its greeting."""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tierkv_kernels.errors import KernelError

from tierkv.client.populate import Populator
from tierkv.config.paths import SYSTEM_SOCKET, own_socket, own_state_dir
from tierkv.core.ids import U8
from tierkv.errors import (
    NotReady,
    ProtocolError,
    Unavailable,
)
from tierkv.gpu import Gpu, GpuMemory
from tierkv.pages import ask_for_huge_pages
from tierkv.rpc.messages import Greeting
from tierkv.rpc.wire import FrameDecoder, decode_opening, require_service

GREETING_BYTES = 4096
DESCRIPTORS = 3
_MAY_PASS = (
    errno.ENOENT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EPIPE,
    errno.EAGAIN,
    errno.ETIMEDOUT,
)


class ConnectionLost(Exception):
    """The daemon has gone, or is not there yet: worth another try. Never leaves the client."""


def default_socket_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """TIERKV_SOCKET, or the user's own daemon, or the system's if only that is there."""
    if configured := environ.get("TIERKV_SOCKET"):
        return Path(configured)
    uid = os.getuid() if uid is None else uid
    own = Path(own_socket(uid, environ, own_state_dir(uid, environ)))
    system = Path(SYSTEM_SOCKET)
    return system if system.exists() and not own.exists() else own


def map_shared(fd: int, size_bytes: int, offset: int = 0, *, writable: bool = True) -> U8:
    """Shared memory behind ``fd`` (u8 [size_bytes]); unmapped when no view is left.

    Raises ProtocolError when the descriptor has less memory than the daemon says.
    """
    if size_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection, offset=offset)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"cannot map {size_bytes} bytes of the daemon: {error}") from error
    return np.frombuffer(mapping, np.uint8)


@dataclass(eq=False)
class MappedArena:
    """The device arena as this process maps it: ``data`` (u8 [arena_bytes]), or on a ``gpu``.

    ``table_fd``: its own descriptor of the arena's table file. ``populator`` maps parts of the
    data in the background, if that is wanted.
    """

    identity: bytes
    data: U8
    table_fd: int
    populator: Populator | None = None
    gpu: GpuMemory | None = None

    def __post_init__(self) -> None:
        self._close_table = weakref.finalize(self, os.close, self.table_fd)
        self._close_table.atexit = False

    @classmethod
    def map(cls, greeting: Greeting, fd: int, table_fd: int, *, populate: bool) -> MappedArena:
        """Map what the daemon greets with. Raises ProtocolError, Unavailable."""
        if greeting.gpu:
            gpu = _map_gpu(greeting, fd)
            return cls(greeting.arena, np.empty(0, np.uint8), os.dup(table_fd), gpu=gpu)
        data = map_shared(fd, greeting.arena_bytes)
        # For pages that the worker is the first to write: the kernel looks at the writer's mapping.
        ask_for_huge_pages(data)
        populator = Populator(fd, data) if populate else None
        return cls(greeting.arena, data, os.dup(table_fd), populator)

    @property
    def size_bytes(self) -> int:
        """How much is mapped for slots."""
        return len(self.data) if self.gpu is None else self.gpu.size_bytes

    def map_table(self, offset: int, size_bytes: int) -> U8:
        """A part of the table file (u8 [size_bytes]), for reading. Raises ProtocolError."""
        if not self._close_table.alive:
            raise ProtocolError("this arena is not used any more")
        return map_shared(self.table_fd, size_bytes, offset, writable=False)

    def populate(self, start: int, stop: int) -> None:
        """Map bytes ``start`` to ``stop`` in the background, if that is wanted."""
        if self.populator is not None:
            self.populator.start(start, stop)

    def forget(self) -> None:
        """No more of it is mapped: stop the background mapping. What is mapped stays."""
        self._close_table()
        if self.populator is not None:
            self.populator.stop()


def _map_gpu(greeting: Greeting, fd: int) -> GpuMemory:
    try:
        return GpuMemory.attach(Gpu.find(greeting.gpu), fd, greeting.arena_bytes)
    except KernelError as error:
        raise Unavailable(
            f"the daemon's device tier is memory of a GPU that cannot be mapped here: {error}"
        ) from error


@dataclass
class Opening:
    """Collects the daemon's first frame and its descriptors. Feed it until ``greeting`` is set.

    The decoder goes on to serve the connection.
    """

    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    greeting: Greeting | None = None
    fds: list[int] = field(default_factory=list)

    def receive(self, sock: socket.socket) -> None:
        """One receive on a socket that is blocking, or readable.

        Raises ConnectionLost on end of file, NotReady(state) when the daemon does not serve, and
        the daemon's own error when it refuses this worker.
        """
        data, fds, _, _ = socket.recv_fds(
            sock, GREETING_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        self.fds += fds
        if not data:
            raise ConnectionLost("closed before its greeting")
        self.decoder.writable()[: len(data)] = data
        self.decoder.received(len(data))
        frame = self.decoder.next()
        if frame is None:
            return
        opening = require_service(decode_opening(frame.payload), "worker")
        if len(self.fds) != DESCRIPTORS:
            raise ProtocolError(
                f"the greeting brought {len(self.fds)} of {DESCRIPTORS} descriptors: "
                "raise the limit of open files (ulimit -n)"
            )
        self.greeting = opening

    def memory(self, known: MappedArena | None, *, populate: bool) -> tuple[MappedArena, U8]:
        """The arena (the ``known`` one if it is the same) and this connection's scratch memory.

        ``populate``: whether a new one maps its pools in the background.
        """
        greeting = self.greeting
        if greeting is None:
            raise ProtocolError("no greeting yet")
        try:
            arena_fd, table_fd, scratch_fd = self.fds
            if known is None or known.identity != greeting.arena:
                known = MappedArena.map(greeting, arena_fd, table_fd, populate=populate)
            return known, map_shared(scratch_fd, greeting.scratch_bytes)
        finally:
            self.close()

    def close(self) -> None:
        """Close the descriptors; mappings made of them stay."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def connect_failure(path: Path, error: OSError) -> Exception:
    """ConnectionLost if waiting may help (no daemon yet), else Unavailable."""
    text = error.strerror or str(error)
    if error.errno in _MAY_PASS or isinstance(error, TimeoutError):
        return ConnectionLost(text)
    if error.errno in (errno.EACCES, errno.EPERM):
        text += "; this user must belong to the socket's group, and be in server.allowed_uids"
    return Unavailable(f"{path}: {text}")


def nobody_serves(path: Path, error: Exception) -> Unavailable:
    """What a worker hears that has waited long enough."""
    why = str(error)
    if not why:
        return Unavailable(f"{path}: the daemon did not answer in time; it recovers, or it hangs")
    if isinstance(error, NotReady):
        return Unavailable(f"{path}: {why}")
    return Unavailable(f"no daemon serves on {path}: {why}; start a daemon by `tierkv serve`")


def hangup_poll(fd: int) -> select.poll:
    """Its ``poll(0)`` is true when the daemon has closed its end, even if nobody read that far."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return poll


def backoff_delays_s() -> Iterator[float]:
    """Pauses between attempts to connect: short first, then four a second."""
    delay_s = 0.01
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, 0.25)
