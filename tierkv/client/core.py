"""What a worker knows, and how it talks, without a socket: shared by the sync and asyncio clients.

A verb is a generator. It yields *asks* (functions that build a request from the state as it is
now) and receives replies. The driver may ask twice: when the connection breaks, it attaches again
and builds the request anew, for ids may have changed or the sequence may be lost by then. An ask
that builds no request is answered ``Done`` if the connection stands.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tierkv.client.attach import MappedArena
from tierkv.core.ids import U8
from tierkv.errors import InvalidArgument, ProtocolError
from tierkv.gpu import GpuFailed
from tierkv.native.loops import loops
from tierkv.rpc.messages import (
    PROTOCOL_VERSION,
    Done,
    Drain,
    Draining,
    Flush,
    Hello,
    Message,
    NamespaceOpened,
    OperatorRequest,
    Release,
    Reload,
    Reloaded,
    Reply,
    Request,
    SequenceState,
    Stat,
    Status,
    Welcome,
)

if TYPE_CHECKING:
    from tierkv.client.namespaces import NamespaceCore
    from tierkv.client.sequences import SequenceCore

SENDS_MAX = 5
"""How often a request is sent when each time the daemon goes away over it: it may be the cause."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)

Ask = Callable[[], Request | None]
Steps = Generator[Ask, Reply, T]


def expect(reply: Reply, kind: type[M]) -> M:
    """The reply, if it is of the kind that the verb promises; else ProtocolError."""
    if not isinstance(reply, kind):
        raise ProtocolError(
            f"the daemon answered {type(reply).__name__} where {kind.__name__} belongs",
            reason="out_of_order",
        )
    return reply


class ClientCore:
    """One worker's lease: its namespaces and sequences, and what the daemon acknowledged of them.

    ``orphans`` are numbers of sequences that the daemon may hold and nobody here uses. Of these,
    ``releasing`` are those that the daemon has been told of and has not answered. ``unaware``
    are those of lost sequences whose user has not been told yet: a thread may be writing into
    their blocks, so the daemon shall keep what it holds of them.
    """

    def __init__(self, name: str = "", *, with_lease: bool = True) -> None:
        self.name = name
        self.with_lease = with_lease
        self.pid = os.getpid()
        self.loops = loops()
        self.lease = 0
        self.epoch = 0
        self.arena: MappedArena | None = None
        self.scratch: U8 = np.empty(0, np.uint8)
        self.namespaces: dict[bytes, NamespaceCore] = {}
        self.sequences: dict[int, SequenceCore] = {}
        self.opening: set[int] = set()
        self.orphans: set[int] = set()
        self.releasing: set[int] = set()
        self.unaware: set[int] = set()
        self._token = b""
        self._numbers = itertools.count(1)
        self._lease_arena: MappedArena | None = None

    def check_process(self) -> None:
        """Raise InvalidArgument in a forked child: two processes cannot share one lease."""
        if os.getpid() != self.pid:
            raise InvalidArgument(
                f"this client belongs to process {self.pid} and was forked into {os.getpid()}: "
                "connect again in the new process"
            )

    @contextmanager
    def opening_sequence(self) -> Iterator[int]:
        """A number for a new sequence; if it does not come to be, the daemon is told to end it."""
        number = self.next_number()
        self.opening.add(number)
        try:
            yield number
        except BaseException:
            self.orphans.add(number)
            raise
        finally:
            self.opening.discard(number)

    def next_number(self) -> int:
        """A name for a sequence, never used before under this client."""
        return next(self._numbers)

    # --- attaching --------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Before connecting anew: keep no memory of a GPU from the next daemon, if that is one.

        It would be another daemon's memory then, or it costs the sequences of this one.
        """
        if self.arena is None or self.arena.gpu is None:
            return
        for namespace in list(self.namespaces.values()):
            namespace.let_go()
        self.arena.forget()
        self.arena = self._lease_arena = None

    def attach(self, arena: MappedArena, scratch: U8) -> Steps[None]:
        """Open a lease or take the old one up again; run on a new connection before all else.

        Sequences that the daemon does not hold as acknowledged are lost; those it holds and
        nobody here knows are released.
        """
        if self.arena is not None and self.arena is not arena:
            self.arena.forget()
        self.arena, self.scratch = arena, scratch
        self.releasing.clear()
        hello = Hello(PROTOCOL_VERSION, self.name, self._token, self.with_lease)
        welcome = expect((yield lambda: hello), Welcome)
        resumed = welcome.resumed and arena is self._lease_arena
        self.lease, self._token, self.epoch = welcome.lease, welcome.token, welcome.epoch
        self._lease_arena = arena
        if not resumed:
            for sequence in list(self.sequences.values()):  # another thread may end some meanwhile
                sequence.lose()
            self.sequences.clear()
            self.orphans.clear()
            self.unaware.clear()
        for namespace in list(self.namespaces.values()):
            ask = namespace.ask_open
            if namespace.adopt(expect((yield ask), NamespaceOpened)):
                for sequence in list(self.sequences.values()):
                    if sequence.namespace is namespace:
                        sequence.lose()
        unknown = self._reconcile(welcome.sequences)
        if unknown:
            expect((yield lambda: Release(unknown)), Done)
            self.orphans.difference_update(unknown)

    def _reconcile(self, states: list[SequenceState]) -> list[int]:
        """Adopt the daemon's view of every sequence; the numbers that nobody here uses."""
        held = {state.sequence: state for state in states}
        for number, sequence in list(self.sequences.items()):
            state = held.get(number)
            if state is None or not sequence.take_up(state):
                sequence.lose()
                self.sequences.pop(number, None)
                self.unaware.add(number)
        used = self.sequences.keys() | self.opening | self.unaware
        return [number for number in held if number not in used]

    @property
    def populating(self) -> bool:
        """Whether pools are still being mapped in the background."""
        populator = self.arena.populator if self.arena is not None else None
        return populator is not None and populator.busy

    def namespaces_with_uses(self) -> list[NamespaceCore]:
        """Those of which the daemon should still hear what was read."""
        return [namespace for namespace in self.namespaces.values() if namespace.uses.any]

    def close(self) -> None:
        """The lease ends: so do all sequences, and the background mapping."""
        self.end(list(self.sequences.values()))
        if self.arena is not None:
            self.arena.forget()

    def told(self, number: int) -> None:
        """Whoever uses this sequence knows that it is lost, and writes into it no more."""
        if number in self.unaware:
            self.unaware.discard(number)
            self.orphans.add(number)

    # --- verbs ------------------------------------------------------------------------------------

    def end(self, sequences: Iterable[SequenceCore]) -> list[SequenceCore]:
        """Forget sequences here, at once and for good; those the daemon must still release."""
        ending: list[SequenceCore] = []
        for sequence in sequences:
            if sequence.client is not self:
                raise InvalidArgument(f"sequence {sequence.number} belongs to another client")
            if not sequence.ended:
                sequence.ended = True
                self.told(sequence.number)
                if self.sequences.pop(sequence.number, None) is not None:
                    self.orphans.add(sequence.number)
                    ending.append(sequence)
        for memory in {id(ended.namespace): ended.namespace.memory for ended in ending}.values():
            # A GPU that has failed writes no more.
            with suppress(GpuFailed):
                memory.settle()
        return ending

    def release_orphans(self) -> Steps[None]:
        """Tell the daemon of all sequences that nobody here uses, unless it has been told."""
        released = sorted(self.orphans - self.releasing)
        if released:
            self.releasing.update(released)
            try:
                expect((yield lambda: Release(released)), Done)
                self.orphans.difference_update(released)
            finally:
                self.releasing.difference_update(released)

    def stat(self) -> Steps[dict[str, Any]]:
        """The daemon's status document."""
        return expect((yield Stat), Status).document

    def ping(self) -> Steps[None]:
        """A round trip that changes nothing."""
        expect((yield lambda: Release([])), Done)

    def drain(self, *, undo: bool) -> Steps[Draining]:
        """What the drain still waits for."""
        return expect((yield lambda: Drain(undo)), Draining)

    def reload(self) -> Steps[Reloaded]:
        """What a new configuration changed."""
        return expect((yield Reload), Reloaded)

    def operate(self, request: OperatorRequest, kind: type[M]) -> Steps[M]:
        """The answer to an operator's verb, which is of this kind."""
        return expect((yield lambda: request), kind)

    def flush(self) -> Steps[None]:
        """Returns when all that was sealed is on disk."""
        expect((yield Flush), Done)
