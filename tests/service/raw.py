"""Test support: a peer that says to the daemon exactly what the test tells it to."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

from tests.rpc.serving import RawPeer
from tests.service.running import Daemon
from tierkv.rpc import messages as m

M = TypeVar("M", bound=m.Message)


class Peer(RawPeer):
    """A raw connection to a daemon; numbers its requests and knows its lease."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.socket)
        self.lease = 0
        self._last_id = 0

    def ask(self, message: m.Message) -> Any:
        """Send, and return the reply."""
        self._last_id += 1
        self.send(self._last_id, message)
        found = self.receive()
        assert found is not None
        request_id, reply = found
        assert request_id == self._last_id
        return reply

    def want(self, message: m.Message, kind: type[M]) -> M:
        """Send, and return the reply of this kind."""
        reply = self.ask(message)
        assert isinstance(reply, kind), reply
        return reply

    def refused(self, message: m.Message, code: str) -> m.Failure:
        """Send, and return the failure with this code."""
        reply = self.want(message, m.Failure)
        assert reply.code == code, reply
        assert reply.message
        return reply

    def hello(self) -> Peer:
        self.lease = self.want(m.Hello(m.PROTOCOL_VERSION, "raw"), m.Welcome).lease
        return self

    def closing_reason(self) -> m.Failure:
        """The failure with which the daemon closes this connection, and nothing after it."""
        found = self.receive()
        assert found is not None
        request_id, reply = found
        assert isinstance(reply, m.Failure), reply
        assert request_id in (0, self._last_id)
        with suppress(ConnectionResetError):  # it may close with bytes of ours unread
            assert self.receive() is None
        return reply
