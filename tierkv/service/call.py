"""One request on its way: holds its reply back until the journal releases it."""

from __future__ import annotations

import time
from typing import Protocol, get_args

from tierkv.errors import LimitExceeded, TierkvError
from tierkv.obs.slow import Slow
from tierkv.obs.timeline import Phase, Timeline
from tierkv.rpc import messages as m
from tierkv.rpc.connection import Connection
from tierkv.rpc.wire import failure
from tierkv.service.journal import Journal

LASTING = (m.Seal, m.Store, m.Flush, m.Pin, m.Delete)
"""What is promised by the reply to these is on disk. Any other is about memory, or a lease on it:
a worker that could hold us to it ends with the machine."""

VERB_NAMES: dict[type[m.Message], str] = {
    verb: str(verb.__struct_config__.tag) for verb in get_args(m.Request)
}

PATIENT = (m.Flush, m.Await, *get_args(m.OperatorRequest))
"""Who asks one of these wants to wait until something is done, however long that takes."""

_IDS = ("namespace", "sequence", "new_sequence", "stock", "new_stock")
"""Fields of requests that name what they are about."""


class Observer(Protocol):
    """Who wants to know how requests went."""

    def answered(self, verb: str, code: str, seconds: float) -> None: ...


class Worker(Protocol):
    """Who asks: what it calls itself, and the lease it holds (0: none)."""

    lease: int
    name: str


class Call:
    """One request. Whoever carries it out calls ``done``, and may call ``note`` before."""

    __slots__ = (
        "_begun_s",
        "_code",
        "_connection",
        "_done_s",
        "_id",
        "_journal",
        "_message",
        "_observer",
        "_phases",
        "_received_s",
        "_reply",
        "_slow",
        "_worker",
    )

    def __init__(
        self,
        observer: Observer,
        slow: Slow,
        journal: Journal,
        worker: Worker,
        connection: Connection,
        request_id: int,
        message: m.Request,
    ) -> None:
        self._observer = observer
        self._slow = slow
        self._journal = journal
        self._worker = worker
        self._connection = connection
        self._id = request_id
        self._message = message
        self._received_s = connection.received_s
        self._begun_s = time.monotonic()
        self._done_s = 0.0
        self._phases: list[Phase] = []
        self._code = "ok"
        self._reply: m.Message

    def note(self, name: str, began_s: float, blocks: int = 0) -> None:
        """A phase ends now. ``began_s``: monotonic. Mutates."""
        self._phases.append(Phase(name, began_s, time.monotonic() - began_s, blocks))

    def done(self, result: m.Message | TierkvError) -> None:
        """The request has been carried out, or has failed."""
        if isinstance(result, TierkvError):
            self._code = result.code
            result = failure(result)
        self._reply = result
        self._done_s = time.monotonic()
        self._journal.release(self._send, lasting=type(self._message) in LASTING)

    def _send(self) -> None:
        now_s = time.monotonic()
        seconds = now_s - self._received_s
        self._observer.answered(VERB_NAMES[type(self._message)], self._code, seconds)
        try:
            self._connection.reply(self._id, self._reply)
        except LimitExceeded as error:  # of the reply's own size
            self._connection.fail(error, self._id)
        if self._slow.wants(seconds):
            self._slow.tell(self._timeline(now_s))

    def _timeline(self, released_s: float) -> Timeline:
        now_s = time.monotonic()
        message = self._message
        return Timeline(
            verb=VERB_NAMES[type(message)],
            code=self._code,
            began_s=self._received_s,
            seconds=now_s - self._received_s,
            phases=[
                Phase("queued", self._received_s, self._begun_s - self._received_s),
                *self._phases,
                Phase("log", self._done_s, released_s - self._done_s),
                Phase("reply", released_s, now_s - released_s),
            ],
            patient=isinstance(message, PATIENT),
            ids={
                "request": self._id,
                "lease": self._worker.lease,
                "pid": self._connection.pid,
                "worker": self._worker.name,
                **{name: getattr(message, name) for name in _IDS if hasattr(message, name)},
            },
        )
