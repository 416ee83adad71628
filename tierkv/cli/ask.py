"""Asks the daemon for its status, by the quickest way that it answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from tierkv.config.paths import SYSTEM_SOCKET, own_socket, own_state_dir
from tierkv.errors import ConfigError, NotReady, ProtocolError, Unavailable
from tierkv.obs.status import SERVING, StatusDocument, from_plain
from tierkv.rpc.ask import ask
from tierkv.rpc.messages import Stat, Status

Command = TypeVar("Command", bound=Callable[..., Any])

TIMEOUT_S = 2.0
GREETING_S = 0.3
"""How long a daemon that has a page may take to greet, before it is looked up there."""

PAGE_BYTES_MAX = 64 << 20

socket_option = click.option(
    "--socket",
    metavar="PATH",
    help="The daemon's socket; else $TIERKV_SOCKET, that of the configuration, or the system's.",
)
"""Which daemon a command asks; arrives as ``socket``, for ``Daemon.find``."""


class Daemon:
    """The daemon behind a worker socket, and behind the socket of its pages if it has one."""

    def __init__(self, socket_path: str, page_socket: str) -> None:
        self.socket_path = socket_path
        self._page_socket = page_socket

    @classmethod
    def find(cls, named: str | None) -> Daemon:
        """The one that ``--socket`` names, or that workers of this user would find."""
        told = named or os.environ.get("TIERKV_SOCKET")
        if told:
            return cls(told, _beside(told))
        # Imported late: it takes as long as the question itself.
        from tierkv.cli.options import load_paths

        try:
            config = load_paths()
        except ConfigError:
            # The daemon that runs has read another one, and can say what is wrong with this.
            own = own_socket(os.getuid(), os.environ, own_state_dir(os.getuid(), os.environ))
            return cls(own, _beside(own))
        if not Path(config.server.socket).exists() and Path(SYSTEM_SOCKET).exists():
            return cls(SYSTEM_SOCKET, _beside(SYSTEM_SOCKET))
        return cls(config.server.socket, config.metrics.socket)

    def status(self) -> dict[str, Any]:
        """The status document, as it came.

        A daemon that is recovering greets nobody yet, but its page tells how far it is. Raises
        Unavailable, NotReady if it does not answer at all, ProtocolError.
        """
        has_page = bool(self._page_socket) and Path(self._page_socket).exists()
        try:
            reply = ask(self.socket_path, Stat(), GREETING_S if has_page else TIMEOUT_S)
        except NotReady as not_ready:
            if not has_page:
                raise
            try:
                return _from_page(self._page_socket)
            except OSError:
                raise not_ready from None
        except Unavailable as error:
            raise Unavailable(f"{error.message}; name another daemon's by --socket") from error
        if not isinstance(reply, Status):
            raise ProtocolError(f"the daemon answered {type(reply).__name__} to a question")
        return reply.document

    def require(self) -> str:
        """Its worker socket, for a command that is a worker itself.

        Raises as ``status``, and NotReady if it takes no workers now.
        """
        state = self.status().get("state")
        if state != SERVING:
            raise NotReady(
                f"the daemon is {state}, so it takes no workers, and this command is one; "
                "see `tierkv status`"
            )
        return self.socket_path

    def document(self) -> StatusDocument:
        """The status document. Raises as ``status`` and ``understood``."""
        return understood(self.status())


def understood(plain: dict[str, Any]) -> StatusDocument:
    """Raises ProtocolError if a key has another type than it should have."""
    try:
        return from_plain(plain)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the daemon's status is not understood: {error}") from error


def _beside(socket_path: str) -> str:
    """Where the pages are served unless the configuration says otherwise."""
    return str(Path(socket_path).with_name("metrics.sock"))


def _from_page(page_socket: str) -> dict[str, Any]:
    """Raises OSError, also for a page that is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.connect(page_socket)
        sock.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
        with sock.makefile("rb") as answer:
            header, _, body = answer.read(PAGE_BYTES_MAX).partition(b"\r\n\r\n")
    if b" 200 " not in header.partition(b"\r\n")[0]:
        raise ConnectionError("it answers with an error")
    try:
        plain: dict[str, Any] = msgspec.json.decode(body, type=dict)
    except msgspec.DecodeError as error:
        raise ConnectionError("its answer is no JSON") from error
    return plain
