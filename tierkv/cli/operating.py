"""Asks a running daemon to do something, for an operator."""

from __future__ import annotations

from tierkv.cli.ask import Daemon
from tierkv.errors import Unavailable
from tierkv.rpc.ask import ask
from tierkv.rpc.messages import OperatorRequest, Reply

TIMEOUT_S = 10.0


def operate(socket: str | None, request: OperatorRequest) -> Reply:
    """The answer of the daemon that ``--socket`` names, or that this user's workers would find.

    Raises Unavailable, NotReady, NotPermitted, and what the verb raises.
    """
    try:
        return ask(Daemon.find(socket).socket_path, request, TIMEOUT_S)
    except Unavailable as error:
        raise Unavailable(f"{error.message}; name another daemon's by --socket") from error
