"""Asks a running daemon to do something, for an operator."""

from __future__ import annotations

from typing import TypeVar

from tierkv.cli.ask import Daemon
from tierkv.errors import ProtocolError, Unavailable
from tierkv.rpc.ask import ask
from tierkv.rpc.messages import Message, OperatorRequest

M = TypeVar("M", bound=Message)

TIMEOUT_S = 10.0


def operate(
    socket: str | None, request: OperatorRequest, kind: type[M], timeout_s: float = TIMEOUT_S
) -> M:
    """The answer of the daemon that ``--socket`` names, or that this user's workers would find.

    Raises Unavailable, NotReady, NotPermitted, and what the verb raises.
    """
    try:
        reply = ask(Daemon.find(socket).socket_path, request, timeout_s)
    except Unavailable as error:
        raise Unavailable(f"{error.message}; name another daemon's by --socket") from error
    if not isinstance(reply, kind):
        raise ProtocolError(f"the daemon answered {type(reply).__name__} to a question")
    return reply
