"""The asyncio client: the same names as the blocking one; calls of several tasks are pipelined."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tierkv.client.attach import (
    ConnectionLost,
    Opening,
    backoff_delays_s,
    connect_failure,
    default_socket_path,
    hangup_poll,
    nobody_serves,
)
from tierkv.client.core import SENDS_MAX, Ask, ClientCore, Steps
from tierkv.client.namespaces import NamespaceCore, open_namespace
from tierkv.client.patience import Limits, Patience
from tierkv.client.sequences import ExtraKeys, FoundPrefix, SequenceCore
from tierkv.client.tokens import TokenIds
from tierkv.client.views import NamespaceViews, SequenceViews, Where
from tierkv.core.ids import U8
from tierkv.core.spec import KVSpec
from tierkv.errors import InvalidArgument, NotReady, ProtocolError, TierkvError, Unavailable
from tierkv.native.pages import Pages, Rows
from tierkv.rpc.messages import (
    Attend,
    Done,
    Draining,
    Failure,
    Message,
    OperatorRequest,
    Reloaded,
    Reply,
    Request,
)
from tierkv.rpc.wire import FrameDecoder, decode_reply, encode, error_of, unknown_reply

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    import torch

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def connect(
    socket_path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 5.0,
    call_timeout_s: float = 30.0,
    reconnect_s: float = 30.0,
    name: str = "",
    populate: bool = True,
    lease: bool = True,
) -> Connecting:
    """Connect a worker: ``async with aio.connect() as cache``, or ``cache = await aio.connect()``.

    Arguments and errors are those of ``tierkv.connect``.
    """
    path = default_socket_path() if socket_path is None else Path(socket_path)
    limits = Limits(timeout_s, call_timeout_s, reconnect_s)
    return Connecting(Client(path, limits, name=name, populate=populate, lease=lease))


class Connecting:
    """A client about to connect: await it, or enter it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        return await self._open()

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def _open(self) -> Client:
        await self._client._open()
        return self._client


class Client:
    """One worker's connection and lease, for the tasks of one event loop.

    When the daemon goes away, the calls under way wait for it, take the lease up again and go on;
    if that does not succeed in time they raise Unavailable, and the next call tries again.
    """

    def __init__(
        self, path: Path, limits: Limits, *, name: str, populate: bool, lease: bool
    ) -> None:
        self._path = path
        self._populate = populate
        self._limits = limits
        self._core = ClientCore(name, with_lease=lease)
        self._link: Link | None = None
        self._attaching = asyncio.Lock()
        self._scratch = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client of {self._path}, lease {self._core.lease}, epoch {self._core.epoch}>"

    @property
    def lease(self) -> int:
        """The daemon's number for all that this client holds."""
        return self._core.lease

    @property
    def epoch(self) -> int:
        """Which incarnation of the daemon answered last; grows with its restarts."""
        return self._core.epoch

    @property
    def populating(self) -> bool:
        """Whether pools are still being mapped in the background."""
        return self._core.populating

    async def namespace(self, spec: KVSpec) -> Namespace:
        """Open a model shard's blocks. See the blocking client."""
        return Namespace(self, await self._run(open_namespace(self._core, spec)))

    async def release(self, sequences: Iterable[Sequence]) -> None:
        """End many sequences in one request. Does not raise when the daemon is away."""
        ending = self._core.end([sequence._core for sequence in sequences])
        if ending and not self._closed and os.getpid() == self._core.pid:
            await self._release_orphans()

    async def stat(self) -> dict[str, Any]:
        """The daemon's status document."""
        return await self._run(self._core.stat())

    async def ping(self) -> bool:
        """Whether the daemon answers. See the blocking client."""
        self._check_open()
        try:
            await self._run(self._core.ping())
        except Unavailable:
            self._check_open()
            return False
        return True

    async def flush(self, *, timeout_s: float = 600.0) -> None:
        """Return when all that was sealed is on disk. Raises TierFailed if that takes none."""
        await self._run(self._core.flush(), self._limits.patience(timeout_s))

    async def drain(self, *, undo: bool = False) -> Draining:
        """Let the daemon take no new leases. See the blocking client."""
        return await self._run(self._core.drain(undo=undo))

    async def operate(
        self, request: OperatorRequest, kind: type[M], *, timeout_s: float = 600.0
    ) -> M:
        """Carry out an operator's verb. See the blocking client."""
        steps = self._core.operate(request, kind)
        return await self._run(steps, self._limits.patience(timeout_s))

    async def reload(self) -> Reloaded:
        """Have the daemon read its configuration anew. See the blocking client."""
        return await self._run(self._core.reload())

    async def close(self) -> None:
        """End the lease, and with it all sequences. Never raises; calling it again does nothing."""
        if not self._closed and os.getpid() == self._core.pid:
            for namespace in self._core.namespaces_with_uses():
                self._tell_uses(namespace)
        self._closed = True
        if self._link is not None:
            self._link.close()
        self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- driving verbs ----------------------------------------------------------------------------

    async def _run(
        self, steps: Steps[T], patience: Patience | None = None, *, by_scratch: bool = False
    ) -> T:
        """Run a verb to its end, attaching again as often as needed until the time is up."""
        self._core.check_process()
        patience = self._limits.patience() if patience is None else patience
        exchange = self._exchange_by_scratch if by_scratch else self._exchange
        return await _drive(steps, partial(exchange, patience))

    async def _run_and_release(self, steps: Steps[T]) -> T:
        """The same for a verb that ends sequences of its own, in the same time."""
        patience = self._limits.patience()
        try:
            return await self._run(steps, patience)
        finally:
            await self._release_orphans(patience.answer_by_s)

    async def _open(self) -> None:
        await self._attached(self._limits.opening())

    async def _answer(self, work: Awaitable[T], by_s: float) -> T:
        """What the daemon answers. Raises Unavailable if the time is up before."""
        try:
            async with asyncio.timeout(by_s - time.monotonic()):
                return await work
        except TimeoutError as error:
            raise Unavailable(f"{self._path}: the daemon did not answer in time") from error

    async def _release_orphans(self, by_s: float = math.inf) -> None:
        """Best effort: what is not released now is, with the lease or before the next begin.

        It waits until ``by_s``, or as long as for any call.
        """
        link = self._link
        if link is None or not link.alive:
            return
        by_s = min(by_s, time.monotonic() + self._limits.attempt_s)
        released = _drive(self._core.release_orphans(), lambda ask: link.call(ask()))
        with suppress(TierkvError, ConnectionLost):
            await self._answer(released, by_s)

    def _check_open(self) -> None:
        """Raise InvalidArgument in a forked child, Unavailable after ``close``."""
        self._core.check_process()
        if self._closed:
            raise Unavailable("this client is closed")

    def _tell_uses(self, namespace: NamespaceCore) -> None:
        """Best effort, and waits for nothing."""
        if self._link is not None and self._link.alive:
            self._link.offer(namespace.tell_uses())

    async def _exchange(self, patience: Patience, ask: Ask) -> Reply:
        for _ in range(SENDS_MAX):
            link = await self._attached(patience)
            try:
                return await self._answer(link.call(ask()), patience.answer_by_s)
            except ConnectionLost:
                continue
        raise Unavailable(f"the daemon was lost {SENDS_MAX} times over the same request")

    async def _exchange_by_scratch(self, patience: Patience, ask: Ask) -> Reply:
        """The same for what is asked by way of the scratch memory, which the ask writes into."""
        if self._link is not None:
            await self._answer(self._link.settle(), patience.answer_by_s)
        return await self._exchange(patience, ask)

    async def _attached(self, patience: Patience) -> Link:
        if self._link is not None and self._link.alive:
            return self._link
        asked_s = time.monotonic()
        await self._answer(self._attaching.acquire(), asked_s + patience.longest_s)
        try:
            patience.was_away(time.monotonic() - asked_s)
            return await self._attach(patience)
        finally:
            self._attaching.release()

    async def _attach(self, patience: Patience) -> Link:
        delays_s = backoff_delays_s()
        while self._link is None or not self._link.alive:
            if self._closed:
                raise Unavailable("this client is closed")
            by_s = patience.attempt_by_s(self._limits.timeout_s)
            try:
                async with asyncio.timeout(by_s - time.monotonic()):
                    self._link = await self._attempt(patience.greeting_by_s(by_s))
            except (ConnectionLost, NotReady, TimeoutError) as error:
                delay_s = next(delays_s)
                if not patience.may_wait(delay_s):
                    raise nobody_serves(self._path, error) from error
                await asyncio.sleep(delay_s)
        if self._closed:  # by another task, which did not see this link
            self._link.close()
        return self._link

    async def _attempt(self, greeting_by_s: float) -> Link:
        loop = asyncio.get_running_loop()
        self._core.let_go()
        opening = Opening()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(greeting_by_s - time.monotonic()):
                await loop.sock_connect(sock, os.fspath(self._path))
                while opening.greeting is None:
                    await _readable(sock)
                    opening.receive(sock)
            arena, scratch = opening.memory(self._core.arena, populate=self._populate)
            link = Link(opening.decoder)
            await loop.create_unix_connection(lambda: link, sock=sock)
        except BaseException as error:
            opening.close()
            sock.close()
            if isinstance(error, OSError):
                raise connect_failure(self._path, error) from error
            raise
        try:
            await _drive(self._core.attach(arena, scratch), lambda ask: link.call(ask()))
        except BaseException:
            link.close()
            raise
        return link


class Link(asyncio.BufferedProtocol):
    """One connection; replies find their requests by id. Frames are read as they come."""

    def __init__(self, decoder: FrameDecoder) -> None:
        self.alive = True
        self._decoder = decoder
        self._transport: asyncio.Transport | None = None
        self._last_id = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._offered: asyncio.Future[Reply] | None = None
        self._attending: asyncio.Future[Reply] | None = None

    async def call(self, request: Request | None) -> Reply:
        """Send, and wait for the answer; without a request, only see whether the daemon is there.

        Raises ConnectionLost when the daemon has gone, and the daemon's typed error when it
        refuses. A cancelled call's reply is dropped when it comes.
        """
        if self._transport is None or not self.alive:
            raise ConnectionLost("the daemon closed the connection")
        if request is None:
            if self._hangup.poll(0):
                self.close()
                raise ConnectionLost("the daemon closed the connection")
            return Done()
        sent = self._send(self._transport, request)
        if isinstance(request, Attend):
            self._attending, sent = sent, asyncio.shield(sent)
        reply = await sent
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    async def settle(self) -> None:
        """Return when the daemon is done with the scratch memory, whoever was cancelled."""
        if self._attending is not None:
            await asyncio.wait([self._attending])

    def offer(self, steps: Steps[None]) -> None:
        """Send a verb's one request, if it has one, unless the last one offered is unanswered."""
        if self._transport is None or (self._offered is not None and not self._offered.done()):
            return
        ask = next(steps, None)
        request = ask() if ask else None
        if request is not None:
            self._offered = self._send(self._transport, request)
            # Whatever comes of it.
            self._offered.add_done_callback(lambda answered: answered.exception())

    def _send(self, transport: asyncio.Transport, request: Request) -> asyncio.Future[Reply]:
        request_id = self._last_id + 1
        frame = encode(request_id, request)
        self._last_id = request_id
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiting
        transport.write(frame)
        return waiting

    def close(self) -> None:
        """The daemon sees end-of-file."""
        self._end(ConnectionLost("the client closed the connection"))
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._hangup = hangup_poll(transport.get_extra_info("socket").fileno())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.writable()

    def buffer_updated(self, nbytes: int) -> None:
        self._decoder.received(nbytes)
        try:
            while (frame := self._decoder.next()) is not None:
                self._answer(frame.request_id, decode_reply(frame.payload))
        except ProtocolError as error:
            self._end(error)
            self.close()

    def eof_received(self) -> None:
        self._end(ConnectionLost("the daemon closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionLost(str(exc or "the daemon closed the connection")))

    def _answer(self, request_id: int, reply: Reply) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            if not waiting.done():
                waiting.set_result(reply)
        elif isinstance(reply, Failure):
            self._end(error_of(reply))
            self.close()
        else:
            raise unknown_reply(request_id)

    def _end(self, reason: Exception) -> None:
        self.alive = False
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(reason)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def _drive(steps: Steps[T], exchange: Callable[[Ask], Awaitable[Reply]]) -> T:
    """Run a verb: every ask it yields goes through ``exchange``, whose errors it gets too."""
    try:
        ask = next(steps)
        while True:
            try:
                reply = await exchange(ask)
            except Exception as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(reply)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        steps.close()


class Sequence(SequenceViews):
    """A worker's block table. Ends with its ``async with`` block, by ``end``, or with the client.

    One that is merely dropped keeps its blocks in the device tier until the client closes. Calls on
    one sequence take turns.
    """

    def __init__(self, client: Client, core: SequenceCore) -> None:
        super().__init__(core)
        self._client = client
        self._turn = asyncio.Lock()

    async def reserve(self, n_tokens: int) -> None:
        """Room for ``n_tokens`` beyond ``num_tokens``; asks the daemon only when there is none."""
        async with self._turn:
            await self._client._run(self._core.reserve(n_tokens))

    async def wait(self, n_tokens: int | None = None) -> int:
        """Return when these cached tokens may be used. See the blocking client."""
        return await self._client._run(self._core.wait(n_tokens))

    async def append(self, token_ids: TokenIds) -> None:
        """The K and V of these tokens lie in the slots: record them, seal the blocks they fill."""
        async with self._turn:
            await self._client._run(self._core.append(token_ids))

    async def truncate(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` tokens. Reserve again before writing."""
        async with self._turn:
            await self._client._run(self._core.truncate(n_tokens))

    async def fork(self) -> Sequence:
        """A second sequence on the same blocks. Both must reserve again before they write."""
        async with self._turn:
            return Sequence(self._client, await self._client._run(self._core.fork()))

    async def suspend(self) -> None:
        """Let the blocks spill. The worker must not touch them until ``resume``."""
        async with self._turn:
            await self._client._run(self._core.suspend())

    async def resume(self) -> None:
        """Bring the blocks back. Raises CorruptionError as the blocking client does."""
        async with self._turn:
            await self._client._run(self._core.resume())

    async def end(self) -> None:
        """Release the sequence; full blocks stay cached. Never raises for a daemon that is away."""
        await self._client.release([self])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.end()


class Namespace(NamespaceViews):
    """One model shard's blocks: find prefixes, begin sequences, compute on the pool."""

    def __init__(self, client: Client, core: NamespaceCore) -> None:
        super().__init__(core)
        self._client = client

    async def lookup(
        self,
        token_ids: TokenIds,
        *,
        keep: int = 0,
        extra_keys: ExtraKeys | None = None,
        prefetch: bool = False,
    ) -> FoundPrefix:
        """How many leading tokens are cached, ``keep`` last ones left aside.

        Touches nothing; with ``prefetch`` it starts bringing them up for the ``begin`` to come.
        """
        steps = self._core.lookup(token_ids, keep, extra_keys, prefetch)
        return await self._client._run(steps)

    async def exists(self, hashes: U8) -> U8:
        """Which blocks are cached. See the blocking client."""
        return await self._client._run(self._core.exists(hashes))

    async def begin(
        self,
        token_ids: TokenIds,
        *,
        keep: int = 1,
        extra_keys: ExtraKeys | None = None,
        reserve: int | None = None,
        wait: bool = True,
    ) -> Sequence:
        """A sequence on the longest cached prefix, pinned and in the device tier.

        See the blocking client.
        """
        steps = self._core.begin(token_ids, keep, extra_keys, reserve, wait)
        return Sequence(self._client, await self._client._run(steps))

    async def read(
        self,
        token_ids: TokenIds,
        out: U8,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Copy the cached blocks from ``first`` on into ``out``. See the blocking client."""
        return await self._read(token_ids, self._core.rows_to_fill(out), first, extra_keys)

    async def read_pages(
        self,
        token_ids: TokenIds,
        pages: Pages,
        ids: Any,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Copy cached blocks into an engine's pages. See the blocking client."""
        rows = self._core.paged(pages, ids, writable=True)
        return await self._read(token_ids, rows, first, extra_keys)

    async def _read(
        self, token_ids: TokenIds, rows: Rows, first: int, extra_keys: ExtraKeys | None
    ) -> int:
        self._client._check_open()
        reading = self._core.read_here(token_ids, rows, extra_keys, first)
        copied = reading.copied
        if not reading.done:
            copied = await self._client._run_and_release(self._core.read_on(reading, extra_keys))
        if self._core.uses.due:
            self._client._tell_uses(self._core)
        return copied

    async def write(
        self,
        token_ids: TokenIds,
        data: Any,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Cache whole blocks by copy; returns how many are cached. See the blocking client.

        The copy is made on the event loop: write a long prompt in pieces.
        """
        return await self._client._run_and_release(
            self._core.write(token_ids, data, first, extra_keys)
        )

    async def write_pages(
        self,
        token_ids: TokenIds,
        pages: Pages,
        ids: Any,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """``write`` out of an engine's pages, part by part. See the blocking client."""
        rows = self._core.paged(pages, ids, writable=False)
        return await self._client._run_and_release(
            self._core.write_pages(token_ids, rows, first, extra_keys)
        )

    async def attention(
        self,
        layer: int,
        q: torch.Tensor,
        sequences: Iterable[SequenceViews],
        *,
        seq_lens: Items[int] | torch.Tensor | None = None,
        q_indptr: Items[int] | torch.Tensor | None = None,
        scale: float | None = None,
        causal: bool = True,
        window: int = -1,
        softcap: float = 0.0,
        where: Where = "worker",
    ) -> torch.Tensor:
        """Paged attention of ``q`` [T, q_heads, head_dim]; see the blocking client.

        Computes in a thread here, or in the daemon.
        """
        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
        plan = self._plan(layer, q, sequences, seq_lens, q_indptr, **options)
        if where == "worker":
            return await asyncio.to_thread(self._paged.attend, layer, q, plan)
        if where != "daemon":
            raise InvalidArgument(f"where is {where!r}; it must be worker or daemon")
        async with self._client._scratch:
            steps = self._paged.attend_in_daemon(q, plan)
            return await self._client._run(steps, by_scratch=True)
