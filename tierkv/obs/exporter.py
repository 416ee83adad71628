"""A small HTTP server for a status page, /metrics, /healthz, /readyz and the pages' JSON.

Enough of HTTP/1.1 for Prometheus, curl and probes: GET and HEAD, one request per connection, no
body. It listens on loopback TCP, on a Unix socket, or on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket  # "socket" is a path here
from typing import Any, NamedTuple

import msgspec

from tierkv.config.check import parse_address
from tierkv.errors import ConfigError
from tierkv.obs.page import load_status_page
from tierkv.obs.status import SERVING

HEADER_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64
SOCKET_MODE = 0o660

_KEEP_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""Later versions of Python remove the socket's file when the server closes."""

_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_log = logging.getLogger(__name__)


class _Page(NamedTuple):
    status: HTTPStatus
    content_type: str
    body: bytes
    policy: str = "default-src 'none'"
    """Content-Security-Policy: what of other origins a browser may bring in."""


class Exporter:
    """Serves what four callables tell, each called on the event loop at every request.

    ``exposition(accept)`` returns the metrics page and its content type, ``status()`` the status
    document, ``history()`` that of ``obs.history``, ``state()`` one word of ``obs.status.STATES``.
    """

    def __init__(
        self,
        *,
        exposition: Callable[[str], tuple[bytes, str]],
        status: Callable[[], dict[str, Any]],
        history: Callable[[], dict[str, Any]],
        state: Callable[[], str],
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._exposition = exposition
        self._status = status
        self._history = history
        self._status_page = load_status_page()
        self._state = state
        self._request_timeout_s = request_timeout_s
        self._servers: list[asyncio.Server] = []
        self._handlers: set[asyncio.Task[None]] = set()
        self._socket_path: Path | None = None
        self.tcp_port = 0
        """The TCP port in use; 0 = none."""

    async def start(self, *, tcp: str = "", socket: str = "", passed: Socket | None = None) -> None:
        """Listen on a loopback "host:port" and on a Unix socket's path; empty = not there.

        A socket file that a dead daemon left is replaced. ``passed``: a Unix socket that listens
        already takes the place of that path; its file stays. Raises ConfigError if it cannot
        listen.
        """
        limit = HEADER_BYTES_MAX
        try:
            if tcp:
                host, port = parse_address(tcp)
                server = await asyncio.start_server(self._accept, host, port, limit=limit)
                self._servers.append(server)
                self.tcp_port = server.sockets[0].getsockname()[1]
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"metrics.tcp: cannot listen ({tcp}: {os.strerror(error.errno or 0)}); "
                'choose another port, or "" for none'
            ) from error
        try:
            if passed is not None:
                # Its own descriptor, for closing the server closes it.
                server = await asyncio.start_unix_server(
                    self._accept, sock=passed.dup(), limit=limit, **_KEEP_FILE
                )
                self._servers.append(server)
            elif socket:
                if _is_taken(socket):
                    raise OSError(errno.EADDRINUSE, "another process listens here")
                server = await asyncio.start_unix_server(self._accept, socket, limit=limit)
                self._servers.append(server)
                self._socket_path = Path(socket)
                self._socket_path.chmod(SOCKET_MODE)
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"metrics.socket: cannot listen ({socket}: {os.strerror(error.errno or 0)}); "
                'choose another path, or "" for none'
            ) from error

    async def close(self) -> None:
        """Stop listening, drop open connections and remove the socket file."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        for server in servers:
            await server.wait_closed()
        self.tcp_port = 0
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
            self._socket_path = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed = not self._servers  # the loop may have accepted it just before
        if closed or len(self._handlers) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        handler = asyncio.create_task(self._handle(reader, writer))
        self._handlers.add(handler)

        def end(_: asyncio.Task[None]) -> None:
            # Not in the handler itself: one that is cancelled before its first step never runs.
            self._handlers.discard(handler)
            # asyncio's own transport has no loop any more if it has sent its last bytes after
            # close(), and its abort() trips over that.
            with contextlib.suppress(AttributeError):
                writer.transport.abort()

        handler.add_done_callback(end)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                try:
                    header = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    writer.write(self._answer(header))
                except asyncio.LimitOverrunError:
                    writer.write(_encode(_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, EOFError, ConnectionError):
            pass  # it was too slow, or it is gone: nobody to tell

    def _answer(self, header: str) -> bytes:
        request_line, *fields = header.split("\r\n")
        parts = request_line.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return _encode(_error(HTTPStatus.BAD_REQUEST))
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return _encode(_error(HTTPStatus.METHOD_NOT_ALLOWED))
        accept = ",".join(
            value.strip()
            for name, _, value in (field.partition(":") for field in fields)
            if name.lower() == "accept"
        )
        try:
            page = self._page(target.partition("?")[0], accept)
        except Exception:  # a fault in what is shown must not end the daemon
            _log.exception("cannot answer %s", target)
            page = _error(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _encode(page, with_body=method == "GET")

    def _page(self, path: str, accept: str) -> _Page:
        if path == "/":
            return _Page(HTTPStatus.OK, _HTML, self._status_page.body, self._status_page.policy)
        if path == "/metrics":
            body, content_type = self._exposition(accept)
            return _Page(HTTPStatus.OK, content_type, body)
        if path == "/healthz":
            return _Page(HTTPStatus.OK, _TEXT, b"ok\n")
        if path == "/readyz":
            state = self._state()
            ready = HTTPStatus.OK if state == SERVING else HTTPStatus.SERVICE_UNAVAILABLE
            return _Page(ready, _TEXT, f"{state}\n".encode())
        if path == "/status.json":
            return _json(self._status())
        if path == "/history.json":
            return _json(self._history())
        return _error(HTTPStatus.NOT_FOUND, "try /, /metrics, /healthz, /readyz or /status.json")


def _json(document: dict[str, Any]) -> _Page:
    return _Page(HTTPStatus.OK, "application/json", msgspec.json.encode(document))


def _error(status: HTTPStatus, advice: str = "") -> _Page:
    text = f"{status.value} {status.phrase}" + (f"; {advice}" if advice else "")
    return _Page(status, _TEXT, f"{text}\n".encode())


def _encode(page: _Page, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\n"
        "Cache-Control: no-store\r\n"
        f"Content-Security-Policy: {page.policy}\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Referrer-Policy: no-referrer\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (page.body if with_body else b"")


def _is_taken(path: str) -> bool:
    """Whether somebody listens there; asyncio itself would take the path away from them."""
    with Socket(AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)
