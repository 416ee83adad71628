"""One session per connection: turns its messages into flows, and their results into replies."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from tierkv.core.coming import Coming
from tierkv.core.effects import Flow
from tierkv.core.ids import U32, U64, Tier
from tierkv.core.matching import Chain, TierCounts
from tierkv.core.sequences import TableView
from tierkv.core.storing import ToStore
from tierkv.errors import (
    InvalidArgument,
    NotReady,
    TierFailed,
    TierkvError,
    UnknownNamespace,
)
from tierkv.obs.slow import Slow
from tierkv.obs.status import WorkerStatus
from tierkv.rpc import messages as m
from tierkv.rpc.connection import Connection
from tierkv.service.assembly import Parts
from tierkv.service.call import Call, Observer
from tierkv.service.lifecycle import DaemonState, Lifecycle
from tierkv.service.operations import Operations
from tierkv.tiers.entry import split_hashes

WITHOUT_LEASE = (
    m.OpenNamespace,
    m.Lookup,
    m.Exists,
    m.Release,
    m.Stat,
    m.Flush,
    *get_args(m.OperatorRequest),
)
"""What may be asked without a lease: all that takes hold of nothing."""

PREFETCHES_MAX = 2
"""Chains that come up before somebody waits for them; for more there is no time."""

SCRATCH_BYTES = 64 << 20
"""Query and output memory of one connection; only touched pages exist."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A sequence of ``namespace`` that comes up on the leading blocks of ``chain``."""

    namespace: int
    chain: Chain
    coming: Coming[TableView]


@dataclass
class Session:
    """What one connection holds."""

    lease: int = 0
    name: str = ""
    pid: int = 0
    namespaces: set[int] = field(default_factory=set)
    scratch: mmap.mmap | None = None
    coming: dict[int, _Arrival] = field(default_factory=dict)
    """Sequences that come up while the worker looks on."""


class Sessions:
    """The daemon's ``RequestHandler``."""

    def __init__(
        self,
        parts: Parts,
        lifecycle: Lifecycle,
        status: Callable[[], dict[str, Any]],
        observer: Observer,
        slow: Slow,
        operations: Operations,
    ) -> None:
        self._engine = parts.engine
        self._planner = parts.planner
        self._leases = parts.leases
        self._namespaces = parts.namespaces
        self._attention = parts.attention
        self._checkpointer = parts.checkpointer
        self._arena = parts.arenas[Tier.DEVICE]
        self._lifecycle = lifecycle
        self._status = status
        self._observer = observer
        self._slow = slow
        self._operations = operations
        self._sessions: dict[Connection, Session] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._prefetching = 0
        self._flows: dict[type[m.Message], Callable[[Session, Any], Flow[m.Message]]] = {
            m.OpenNamespace: self._open_namespace,
            m.Lookup: self._lookup,
            m.Exists: self._exists,
            m.Used: self._used,
            m.Acquire: self._acquire,
            m.Await: self._await,
            m.Reserve: self._reserve,
            m.Seal: self._seal,
            m.Store: self._store,
            m.Truncate: self._truncate,
            m.Fork: self._fork,
            m.Suspend: self._suspend,
            m.Resume: self._resume,
            m.Release: self._release,
            m.Stat: self._stat,
        }

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def in_flight(self) -> int:
        """Requests that wait for their answer."""
        return sum(connection.in_flight for connection in self._sessions)

    def workers(self) -> list[WorkerStatus]:
        """The connected workers, for the status document."""
        return [
            WorkerStatus(
                lease=session.lease,
                pid=session.pid,
                name=session.name,
                sequences=len(self._planner.sequences_of(session.lease)),
            )
            for session in self._sessions.values()
            if session.lease
        ]

    # --- RequestHandler ---------------------------------------------------------------------------

    @property
    def arena_fd(self) -> int:
        """See RequestHandler."""
        return self._arena.fd

    @property
    def table_fd(self) -> int:
        """See RequestHandler."""
        return self._arena.shown_table_fd

    def greeting(self) -> m.Greeting:
        """See RequestHandler."""
        gpu = self._arena.on_gpu
        return m.Greeting(
            version=m.PROTOCOL_VERSION,
            epoch=self._planner.state.epoch,
            arena=self._arena.identity,
            arena_bytes=self._arena.size_bytes,
            scratch_bytes=SCRATCH_BYTES,
            # While it drains, those that hold a lease may still come back, and operators come.
            state=DaemonState.SERVING.value,
            gpu=gpu.identity if gpu is not None else b"",
        )

    def connected(self, connection: Connection) -> None:
        """See RequestHandler."""
        self._sessions[connection] = Session()

    def disconnected(self, connection: Connection) -> None:
        """See RequestHandler."""
        session = self._sessions.pop(connection)
        self._attention.drop(connection)
        if session.lease:
            self._engine.start(self._end_lease(session.lease, connection), _unheard)

    def request(self, connection: Connection, request_id: int, message: m.Request) -> None:
        """See RequestHandler."""
        session = self._sessions[connection]
        if not session.lease and not isinstance(message, (m.Hello, *WITHOUT_LEASE)):
            raise InvalidArgument("this connection was opened without a lease, so it holds nothing")
        journal = self._engine.journal
        call = Call(self._observer, self._slow, journal, session, connection, request_id, message)
        flow = self._flows.get(type(message))
        if flow is not None:
            carried_out = flow(session, message)
            if self._attention.reading and (sequences := _let_go(message)):
                carried_out = self._after_attention(session.lease, sequences, carried_out)
            self._engine.start(carried_out, call.done, call.note)
        elif isinstance(message, m.Hello):
            self._engine.start(self._hello(session, connection, message), call.done, call.note)
        elif isinstance(message, m.Attend):
            self._start_attend(session, connection, message, call.done)
        elif isinstance(message, m.OperatorRequest):
            self._in_background(self._operate(connection, message, call.done))
        else:
            self._in_background(self._flush(call))

    # --- verbs ------------------------------------------------------------------------------------

    def _hello(self, session: Session, connection: Connection, message: m.Hello) -> Flow[m.Message]:
        yield from ()
        session.name, session.pid = message.name, connection.pid
        if not message.lease:
            return m.Welcome(0, b"", self._planner.state.epoch, resumed=False, sequences=[])
        lease = self._leases.resume(connection, message.token) if message.token else None
        resumed = lease is not None
        session.lease = lease if lease is not None else self._new_lease(connection)
        self._leases.names[session.lease] = message.name
        state = self._planner.state
        return m.Welcome(
            lease=session.lease,
            token=state.leases[session.lease].token,
            epoch=state.epoch,
            resumed=resumed,
            sequences=[
                m.SequenceState(
                    sequence=sequence.id & 0xFFFFFFFF,
                    namespace=sequence.namespace,
                    slots=_blob((view := self._planner.table(sequence)).slots),
                    sealed=view.sealed,
                    suspended=sequence.suspended,
                )
                for sequence in self._planner.sequences_of(session.lease)
            ],
        )

    def _new_lease(self, connection: Connection) -> int:
        state = self._lifecycle.state
        if state is not DaemonState.SERVING:
            raise NotReady(
                f"the daemon is {state}: it takes no new leases until `tierkv drain --undo`",
                state=state.value,
            )
        return self._leases.open(connection)

    def _open_namespace(self, session: Session, message: m.OpenNamespace) -> Flow[m.Message]:
        yield from ()
        opened = self._namespaces.open(message.spec, message.digest)
        session.namespaces.add(opened.namespace)
        return opened

    def _lookup(self, session: Session, message: m.Lookup) -> Flow[m.Message]:
        yield from ()
        self._check_open(session, message.namespace)
        hi, lo = split_hashes(message.hashes)
        by_tier = self._planner.lookup(message.namespace, hi, lo)
        lower = sum(by_tier) - by_tier[Tier.DEVICE]
        if message.prefetch and lower:
            self._prefetch(message.namespace, hi, lo, lower)
        return m.Found(sum(by_tier), *by_tier, self._load_us(message.namespace, by_tier))

    def _prefetch(self, namespace: int, hi: U64, lo: U64, blocks: int) -> None:
        """Start bringing blocks up, unless others are on their way ahead of need already."""
        if self._prefetching == PREFETCHES_MAX:
            self._planner.placement.counters.optional_copies_dropped += blocks
            return
        self._prefetching += 1

        def done(_result: int | TierkvError) -> None:
            self._prefetching -= 1

        self._engine.start(self._planner.prefetch(namespace, hi, lo), done)

    def _exists(self, session: Session, message: m.Exists) -> Flow[m.Message]:
        yield from ()
        self._check_open(session, message.namespace)
        hi, lo = split_hashes(message.hashes)
        return m.Existing(self._planner.exists(message.namespace, hi, lo).tobytes())

    def _used(self, session: Session, message: m.Used) -> Flow[m.Message]:
        yield from ()
        self._check_open(session, message.namespace)
        if message.missed < 0:
            raise InvalidArgument("used: missed must not be negative")
        hi, lo = split_hashes(message.hashes)
        self._planner.used(message.namespace, hi, lo, message.missed)
        if message.damaged:
            self._planner.doubt(message.namespace, *split_hashes(message.damaged))
        return m.Done()

    def _acquire(self, session: Session, message: m.Acquire) -> Flow[m.Message]:
        self._check_open(session, message.namespace)
        chain = self._chain(message.namespace, message.hashes, message.tokens, message.extras)
        name = (session.lease, message.namespace, message.sequence)
        coming = None if message.wait else Coming[TableView]()
        if message.room_tokens:
            flow = self._planner.acquire_with_room(*name, chain, message.room_tokens, coming)
        else:
            flow = self._planner.acquire(*name, chain, coming)
        if coming is None:
            return _table(message.sequence, (yield from flow))
        session.coming[message.sequence] = _Arrival(message.namespace, chain, coming)
        self._engine.start(flow, coming.end)
        yield from coming.until(lambda: self._planner.has_sequence(session.lease, message.sequence))
        return self._progress(session, message.sequence, session.coming[message.sequence])

    def _await(self, session: Session, message: m.Await) -> Flow[m.Message]:
        arrival = session.coming.get(message.sequence)
        if arrival is None:  # it is up, or the connection that it was begun on has gone
            view = yield from self._planner.resume(session.lease, message.sequence)
            return _table(message.sequence, view)

        def enough() -> bool:
            view, _ = self._planner.progress(session.lease, message.sequence, arrival.chain)
            return (view.ready or 0) >= message.blocks

        yield from arrival.coming.until(enough)
        return self._progress(session, message.sequence, arrival)

    def _progress(self, session: Session, number: int, arrival: _Arrival) -> m.Message:
        """The table of a sequence that was begun without waiting, as far as it has come up."""
        if arrival.coming.ended:
            session.coming.pop(number, None)
            return _table(number, arrival.coming.result())
        view, left = self._planner.progress(session.lease, number, arrival.chain)
        return _table(number, view, self._load_us(arrival.namespace, left))

    def _load_us(self, namespace: int, by_tier: TierCounts) -> int:
        """How long blocks in these tiers should take to come up."""
        state = self._planner.state
        block_bytes = state.pools[state.namespaces[namespace].pool].block_bytes
        return round(1e6 * self._engine.speeds.load_s(by_tier, block_bytes))

    def _reserve(self, session: Session, message: m.Reserve) -> Flow[m.Message]:
        view = yield from self._planner.reserve(
            session.lease, message.sequence, message.written_tokens, message.total_tokens
        )
        return _table(message.sequence, view)

    def _seal(self, session: Session, message: m.Seal) -> Flow[m.Message]:
        sequence = self._planner.sequence(session.lease, message.sequence)
        chain = self._chain(sequence.namespace, message.hashes, message.tokens, message.extras)
        sum_hi, sum_lo = split_hashes(message.checksums)
        if len(sum_hi) != len(chain):
            raise InvalidArgument(f"seal: {len(chain)} hashes but {len(sum_hi)} checksums")
        if message.first < 0:
            raise InvalidArgument("seal: first must not be negative")
        flow = self._planner.seal(
            session.lease, message.sequence, message.first, chain, sum_hi, sum_lo
        )
        view = yield from self._engine.sealing(sequence, flow)
        return _table(message.sequence, view)

    def _store(self, session: Session, message: m.Store) -> Flow[m.Message]:
        self._check_open(session, message.namespace)
        chain = self._chain(message.namespace, message.hashes, message.tokens, message.extras)
        sum_hi, sum_lo = split_hashes(message.checksums)
        if not 0 <= message.first <= len(chain) or len(sum_hi) != len(chain) - message.first:
            raise InvalidArgument(
                f"store: {len(chain)} hashes, of which the first {message.first} are cached, but "
                f"{len(sum_hi)} checksums"
            )
        if message.room_blocks < 0:
            raise InvalidArgument("store: room_blocks must not be negative")
        wanted = ToStore(
            *(message.stock, message.new_stock, chain, message.first),
            *(sum_hi, sum_lo, message.room_blocks),
        )
        stored = yield from self._planner.store(session.lease, message.namespace, wanted)
        yield from self._engine.on_disk(stored.rows, stored.ids)
        yield from self._planner.fill_stock(session.lease, wanted)
        blocks = max(len(stored.rows) - message.first, 0)
        if not self._planner.has_sequence(session.lease, message.new_stock):
            return m.Stored(blocks, b"")
        stock = self._planner.sequence(session.lease, message.new_stock)
        return m.Stored(blocks, _blob(self._planner.table(stock).slots))

    def _truncate(self, session: Session, message: m.Truncate) -> Flow[m.Message]:
        yield from ()
        view = self._planner.truncate(session.lease, message.sequence, message.tokens)
        return _table(message.sequence, view)

    def _fork(self, session: Session, message: m.Fork) -> Flow[m.Message]:
        yield from ()
        view = self._planner.fork(
            session.lease, message.sequence, message.new_sequence, message.tokens
        )
        return _table(message.new_sequence, view)

    def _suspend(self, session: Session, message: m.Suspend) -> Flow[m.Message]:
        yield from ()
        self._planner.suspend(session.lease, message.sequence)
        return m.Done()

    def _resume(self, session: Session, message: m.Resume) -> Flow[m.Message]:
        view = yield from self._planner.resume(session.lease, message.sequence)
        return _table(message.sequence, view)

    def _release(self, session: Session, message: m.Release) -> Flow[m.Message]:
        yield from ()
        for number in message.sequences:
            session.coming.pop(number, None)
        self._planner.release(session.lease, message.sequences)
        return m.Done()

    def _stat(self, session: Session, message: m.Stat) -> Flow[m.Message]:
        yield from ()
        return m.Status(self._status())

    # --- verbs that are no flows ------------------------------------------------------------------

    def _start_attend(
        self,
        session: Session,
        connection: Connection,
        message: m.Attend,
        done: Callable[[m.Message | TierkvError], None],
    ) -> None:
        try:
            self._check_open(session, message.namespace)
            if session.scratch is None:
                session.scratch = mmap.mmap(connection.scratch_fd, connection.scratch_bytes)
            self._attention.start(connection, session.lease, message, session.scratch, done)
        except TierkvError as error:
            done(error)

    def _after_attention(
        self, lease: int, sequences: Collection[int], flow: Flow[m.Message]
    ) -> Flow[m.Message]:
        """A verb that may let go of blocks: not while attention reads them."""
        yield from self._attention.finished(lease, sequences)
        return (yield from flow)

    def _end_lease(self, lease: int, connection: Connection) -> Flow[None]:
        """The same for all that a lease holds, once its worker has gone."""
        yield from self._attention.finished(lease)
        self._leases.end(lease, connection)

    async def _operate(
        self,
        connection: Connection,
        message: m.OperatorRequest,
        done: Callable[[m.Message | TierkvError], None],
    ) -> None:
        try:
            done(await self._operations.carry_out(connection, message))
        except TierkvError as error:
            done(error)

    async def _flush(self, call: Call) -> None:
        began_s = time.monotonic()
        try:
            await self._engine.everything_written()
            call.note("write_behind", began_s)
            began_s = time.monotonic()
            await self._checkpointer.run()
            call.note("checkpoint", began_s)
        except TierkvError as error:
            call.done(error)
        except OSError as error:
            call.done(TierFailed(f"flush: the checkpoint failed: {error}", tier=Tier.DISK.label))
        else:
            call.done(m.Done())

    async def give_up(self) -> None:
        """End what goes on for connections that are closed: nobody is told of it any more.

        Deletions and checkpoints may be given up anywhere; what is left of them is as after a kill.
        """
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- parts ------------------------------------------------------------------------------------

    def _check_open(self, session: Session, namespace: int) -> None:
        if namespace not in session.namespaces:
            raise UnknownNamespace(
                f"namespace {namespace} is not open on this connection; open it first"
            )

    def _chain(self, namespace: int, hashes: bytes, tokens: bytes, extras: bytes) -> Chain:
        state = self._planner.state
        entry = state.namespaces.get(namespace)
        if entry is None:
            raise UnknownNamespace(f"there is no namespace {namespace}")
        block_tokens = state.pools[entry.pool].block_tokens
        hi, lo = split_hashes(hashes)
        if len(tokens) != len(hi) * block_tokens * 4:
            raise InvalidArgument(
                f"{len(hi)} hashes want {len(hi) * block_tokens} token ids of 4 bytes, got "
                f"{len(tokens)} bytes"
            )
        if extras and len(extras) != len(hi) * 8:
            raise InvalidArgument(f"{len(hi)} hashes want {len(hi)} extras of 8 bytes or none")
        ids = np.frombuffer(tokens, "<u4").reshape(len(hi), block_tokens)
        spec = self._namespaces.spec(namespace)
        if spec is not None and spec.vocab_size and len(ids) and ids.max() >= spec.vocab_size:
            raise InvalidArgument(
                f"token id {int(ids.max())} is out of range: the vocabulary has "
                f"{spec.vocab_size} ids"
            )
        return Chain(hi, lo, ids, _extras(extras, len(hi)))


def _let_go(message: m.Message) -> Collection[int]:
    """The sequences of which a verb may give blocks away, or replace them by others."""
    if isinstance(message, m.Release):
        return message.sequences
    if isinstance(message, m.Acquire | m.Reserve | m.Seal | m.Truncate | m.Suspend):
        return (message.sequence,)
    return (message.stock,) if isinstance(message, m.Store) else ()


def _unheard(_result: object) -> None:
    """Nobody waits for the answer."""


def _extras(blob: bytes, count: int) -> U64:
    return np.frombuffer(blob, "<u8") if blob else np.zeros(count, np.uint64)


def _table(sequence: int, view: TableView, load_us: int = 0) -> m.Table:
    by_tier = view.by_tier
    return m.Table(
        sequence=sequence,
        slots=_blob(view.slots),
        sealed=view.sealed,
        device=by_tier[Tier.DEVICE],
        host=by_tier[Tier.HOST],
        disk=by_tier[Tier.DISK],
        ready=-1 if view.ready is None else view.ready,
        load_us=load_us,
    )


def _blob(slots: U32) -> bytes:
    return slots.astype("<u4").tobytes()
