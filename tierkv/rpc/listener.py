"""The daemon's Unix socket: admits workers and hands them the descriptors of the arena."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable
from pathlib import Path

from tierkv.config.paths import SOCKET_PATH_BYTES_MAX
from tierkv.errors import ConfigError, LimitExceeded, NotOwner, TierkvError
from tierkv.rpc.connection import Connection, ConnectionLimits, RequestHandler
from tierkv.rpc.hangup import HangupWatcher
from tierkv.rpc.wire import encode, failure

log = logging.getLogger(__name__)

BACKLOG = 512
ACCEPT_PAUSE_S = 0.1
_CREDENTIALS = struct.Struct("3i")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def bind_socket(path: Path, mode: int = 0o660) -> socket.socket:
    """A listening socket at ``path``, which a dead daemon may have left behind.

    Call before there are threads that create files: the mode comes from the process's umask.
    Raises ConfigError when the path is too long, is no socket, or another daemon answers on it.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"{path}: a socket path may have {SOCKET_PATH_BYTES_MAX} bytes")
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket: remove it or choose another")
        if _answers(path):
            raise ConfigError(f"{path}: another process listens here; stop it first")
        path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o777 & ~mode)
    try:
        listening.bind(os.fspath(path))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{path}: cannot listen here: {error.strerror}") from error
    finally:
        os.umask(umask)
    return listening


class Listener:
    """Accepts on one listening socket, its own or an inherited one, until ``serve`` is cancelled.

    ``uids`` are the users who may connect; None leaves that to the socket's file mode. Works on
    asyncio and on uvloop.
    """

    def __init__(
        self,
        listening: socket.socket,
        handler: RequestHandler,
        *,
        uids: Collection[int] | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._listening = listening
        self._handler = handler
        self.admit(uids, limits or ConnectionLimits())
        self._connections: set[Connection] = set()
        self._attaching: set[asyncio.Task[object]] = set()
        self._watcher: HangupWatcher | None = None

    @property
    def connections(self) -> frozenset[Connection]:
        """Connections that hold descriptors, among them those that are just closing."""
        return frozenset(self._connections)

    def admit(self, uids: Collection[int] | None, limits: ConnectionLimits) -> None:
        """Who may connect, and what they are granted, from the next connection on."""
        self._uids = None if uids is None else frozenset(uids)
        self._limits = limits

    async def serve(self) -> None:
        """Accept workers for ever. Cancel to stop accepting; connections stay until ``close``."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        self._watcher = self._watcher or HangupWatcher(loop)
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                log.warning("cannot accept: %s; raise LimitNOFILE", error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                self._admit(sock, self._watcher)
            except OSError as error:
                sock.close()
                log.info("worker lost while it connected: %s", error)

    async def close(self) -> None:
        """Drop all connections and the listening socket; returns when all have ended."""
        self._listening.close()
        await asyncio.gather(*self._attaching, return_exceptions=True)
        ending = list(self._connections)
        for connection in ending:
            connection.abort()
        await asyncio.gather(*(connection.ended for connection in ending))
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _admit(self, sock: socket.socket, watcher: HangupWatcher) -> None:
        pid, uid = _peer(sock)
        refusal = self._refusal(uid)
        if refusal is not None:
            extra = {"pid": pid, "uid": uid}
            log.warning("refused a worker: %s", refusal.message, extra=extra)
            _say_and_close(sock, encode(0, failure(refusal)))
            return
        greeting = self._handler.greeting()
        frame = encode(0, greeting)
        if greeting.state != "serving":
            _say_and_close(sock, frame)
            return
        scratch_fd = _sealed_memory(greeting.scratch_bytes)
        try:
            shown = [self._handler.arena_fd, self._handler.table_fd, scratch_fd]
            _send_descriptors(sock, frame, shown)
        except OSError:
            os.close(scratch_fd)
            raise
        connection = Connection(
            self._handler,
            watcher,
            self._limits,
            pid=pid,
            uid=uid,
            scratch_fd=scratch_fd,
            scratch_bytes=greeting.scratch_bytes,
        )
        self._connections.add(connection)
        connection.ended.add_done_callback(lambda _: self._connections.discard(connection))
        self._attach(connection, sock)

    def _attach(self, connection: Connection, sock: socket.socket) -> None:
        """Give the socket to the loop, in a task of its own that no cancelled ``serve`` tears."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(lambda: connection, sock))
        self._attaching.add(task)

        def attached(task: asyncio.Task[object]) -> None:
            self._attaching.discard(task)
            if (task.cancelled() or task.exception()) and not connection.ended.done():
                sock.close()
                connection.connection_lost(None)

        task.add_done_callback(attached)

    def _refusal(self, uid: int) -> TierkvError | None:
        if self._uids is not None and uid not in self._uids:
            return NotOwner(
                f"user {uid} may not use this daemon: server.allowed_uids lists who may"
            )
        if len(self._connections) >= self._limits.connections:
            return LimitExceeded(
                f"the daemon has {self._limits.connections} connections, its limit",
                limit=self._limits.connections,
                asked=len(self._connections) + 1,
            )
        return None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, by the kernel's word."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _say_and_close(sock: socket.socket, frame: bytearray) -> None:
    with sock:
        sock.send(frame)


def _send_descriptors(sock: socket.socket, frame: bytearray, fds: Iterable[int]) -> None:
    # A new socket's buffer takes these few bytes whole; anything else is a broken peer.
    if socket.send_fds(sock, [frame], list(fds)) != len(frame):
        raise OSError(errno.ENOBUFS, "greeting did not fit the socket's buffer")


def _sealed_memory(size_bytes: int) -> int:
    """Sparse shared memory that no holder can shrink or grow under another."""
    fd = os.memfd_create("tierkv-scratch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd
