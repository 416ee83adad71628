"""One session per connection: turns its messages into flows, and their results into replies."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tierkv.core.effects import Flow
from tierkv.core.ids import U32, U64, Tier
from tierkv.core.matching import Chain
from tierkv.core.sequences import TableView
from tierkv.errors import InvalidArgument, LimitExceeded, TierFailed, TierkvError, UnknownNamespace
from tierkv.obs.status import WorkerStatus
from tierkv.rpc import messages as m
from tierkv.rpc.connection import Connection
from tierkv.rpc.wire import failure
from tierkv.service.assembly import Parts
from tierkv.service.attend import compute
from tierkv.service.lifecycle import Lifecycle
from tierkv.tiers.entry import split_hashes

log = logging.getLogger(__name__)

LASTING = (m.Seal, m.Flush)
"""What is promised by the reply to these is on disk. Any other is about memory, or a lease on it:
a worker that could hold us to it ends with the machine."""

SCRATCH_BYTES = 64 << 20
"""Query and output memory of one connection; only touched pages exist."""


class Observer(Protocol):
    """Who wants to know how requests went."""

    def answered(self, verb: str, code: str, seconds: float) -> None: ...


@dataclass
class Session:
    """What one connection holds."""

    lease: int = 0
    name: str = ""
    pid: int = 0
    namespaces: set[int] = field(default_factory=set)
    scratch: mmap.mmap | None = None


class Sessions:
    """The daemon's ``RequestHandler``."""

    def __init__(
        self,
        parts: Parts,
        lifecycle: Lifecycle,
        status: Callable[[], dict[str, Any]],
        observer: Observer,
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
        self._sessions: dict[Connection, Session] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._verbs: dict[type[m.Message], Callable[[Session, Any], Flow[m.Message]]] = {
            m.OpenNamespace: self._open_namespace,
            m.Lookup: self._lookup,
            m.Acquire: self._acquire,
            m.Reserve: self._reserve,
            m.Seal: self._seal,
            m.Truncate: self._truncate,
            m.Fork: self._fork,
            m.Suspend: self._suspend,
            m.Resume: self._resume,
            m.Release: self._release,
            m.Stat: self._stat,
        }

    def __len__(self) -> int:
        return len(self._sessions)

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

    def greeting(self) -> m.Greeting:
        """See RequestHandler."""
        return m.Greeting(
            version=m.PROTOCOL_VERSION,
            epoch=self._planner.state.epoch,
            arena=self._arena.identity,
            arena_bytes=self._arena.size_bytes,
            scratch_bytes=SCRATCH_BYTES,
            state=self._lifecycle.state.value,
        )

    def connected(self, connection: Connection) -> None:
        """See RequestHandler."""
        self._sessions[connection] = Session()

    def disconnected(self, connection: Connection) -> None:
        """See RequestHandler."""
        session = self._sessions.pop(connection)
        if session.lease:
            self._leases.end(session.lease, connection)

    def request(self, connection: Connection, request_id: int, message: m.Request) -> None:
        """See RequestHandler."""
        session = self._sessions[connection]
        started = time.monotonic()

        def done(result: m.Message | TierkvError) -> None:
            code = "ok"
            if isinstance(result, TierkvError):
                code = result.code
                result = failure(result)
            reply = result

            def send() -> None:
                self._observer.answered(_verb_name(message), code, time.monotonic() - started)
                try:
                    connection.reply(request_id, reply)
                except LimitExceeded as error:  # of the reply's own size
                    connection.fail(error, request_id)

            self._engine.journal.release(send, lasting=isinstance(message, LASTING))

        if isinstance(message, m.Hello):
            self._engine.start(self._hello(session, connection, message), done)
        elif isinstance(message, m.Attend):
            self._start_attend(session, connection, message, done)
        elif isinstance(message, m.Flush):
            self._in_background(self._flush(done))
        else:
            self._engine.start(self._verbs[type(message)](session, message), done)

    # --- verbs ------------------------------------------------------------------------------------

    def _hello(self, session: Session, connection: Connection, message: m.Hello) -> Flow[m.Message]:
        yield from ()
        lease = self._leases.resume(connection, message.token) if message.token else None
        resumed = lease is not None
        session.name, session.pid = message.name, connection.pid
        session.lease = lease if lease is not None else self._leases.open(connection)
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

    def _open_namespace(self, session: Session, message: m.OpenNamespace) -> Flow[m.Message]:
        yield from ()
        opened = self._namespaces.open(message.spec, message.digest)
        session.namespaces.add(opened.namespace)
        return opened

    def _lookup(self, session: Session, message: m.Lookup) -> Flow[m.Message]:
        yield from ()
        self._check_open(session, message.namespace)
        hi, lo = split_hashes(message.hashes)
        device, host, disk = self._planner.lookup(message.namespace, hi, lo)
        return m.Found(device + host + disk, device, host, disk)

    def _acquire(self, session: Session, message: m.Acquire) -> Flow[m.Message]:
        self._check_open(session, message.namespace)
        chain = self._chain(message.namespace, message.hashes, message.tokens, message.extras)
        view = yield from self._planner.acquire(
            session.lease, message.namespace, message.sequence, chain
        )
        return _table(message.sequence, view)

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
            job = self._attention.prepare(session.lease, message, session.scratch)
        except TierkvError as error:
            done(error)
            return

        async def attend() -> None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._attention.threads, compute, job)
            except (ValueError, TypeError, RuntimeError) as error:
                done(InvalidArgument(f"attend: {error}"))
            except Exception as error:  # it touches no state, so only this request fails
                log.exception("attend failed")
                done(TierkvError(f"attend: {error!r}"))
            else:
                done(m.Done())

        self._in_background(attend())

    async def _flush(self, done: Callable[[m.Message | TierkvError], None]) -> None:
        try:
            await self._engine.everything_written()
            await self._checkpointer.run()
        except TierkvError as error:
            done(error)
        except OSError as error:
            done(TierFailed(f"flush: the checkpoint failed: {error}", tier=Tier.DISK.label))
        else:
            done(m.Done())

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


def _extras(blob: bytes, count: int) -> U64:
    return np.frombuffer(blob, "<u8") if blob else np.zeros(count, np.uint64)


def _table(sequence: int, view: TableView) -> m.Table:
    by_tier = view.by_tier
    return m.Table(
        sequence=sequence,
        slots=_blob(view.slots),
        sealed=view.sealed,
        device=by_tier[Tier.DEVICE],
        host=by_tier[Tier.HOST],
        disk=by_tier[Tier.DISK],
    )


def _blob(slots: U32) -> bytes:
    return slots.astype("<u4").tobytes()


def _verb_name(message: m.Message) -> str:
    tag = type(message).__struct_config__.tag
    return str(tag)
