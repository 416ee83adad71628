"""The blocking client: for engines that call from threads of their own."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tierkv.client.attach import (
    ConnectionLost,
    MappedArena,
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
from tierkv.errors import InvalidArgument, NotReady, TierkvError, Unavailable
from tierkv.native.pages import Pages, Rows
from tierkv.rpc.messages import (
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

POSTED_MAX = 16
"""Requests whose replies nobody waits for; the daemon stops reading from whom it owes many."""


def connect(
    socket_path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = 5.0,
    call_timeout_s: float = 30.0,
    reconnect_s: float = 30.0,
    name: str = "",
    populate: bool = True,
    lease: bool = True,
) -> Client:
    """Connect a worker to the daemon; use as a context manager.

    ``socket_path`` defaults to TIERKV_SOCKET, the user's own daemon, or the system's. ``timeout_s``
    bounds this call and each later attempt to connect. ``call_timeout_s`` is the longest any later
    call takes with a daemon that is there, and ``reconnect_s`` the longest it waits for one that is
    gone, or starts: 0 means one attempt at once, which is given up if nobody greets within 50 ms (a
    socket that systemd keeps takes connections while there is no daemon). Both together bound a
    call that meets both. ``name`` shows in the daemon's status. ``populate``: map the pools that
    are opened in the background, on a thread that then ends; else each page takes a page fault when
    this process first touches it. Without ``lease`` the client holds nothing and may only look and
    operate; it is let in while the daemon drains.

    Raises Unavailable when no daemon serves in time, VersionMismatch, NotOwner, LimitExceeded.
    """
    path = default_socket_path() if socket_path is None else Path(socket_path)
    limits = Limits(timeout_s, call_timeout_s, reconnect_s)
    client = Client(path, limits, name=name, populate=populate, lease=lease)
    client._open()
    return client


class Client:
    """One worker's connection and lease. Threads may share it: a lock orders their calls.

    When the daemon goes away, the next call waits for it, takes the lease up again and goes on;
    if that does not succeed in time it raises Unavailable, and the call after it tries again.
    """

    def __init__(
        self, path: Path, limits: Limits, *, name: str, populate: bool, lease: bool
    ) -> None:
        self._path = path
        self._populate = populate
        self._limits = limits
        self._core = ClientCore(name, with_lease=lease)
        self._lock = threading.Lock()
        self._link: Link | None = None
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

    def namespace(self, spec: KVSpec) -> Namespace:
        """Open a model shard's blocks.

        Raises InvalidArgument for an impossible spec, NamespaceMismatch if the daemon disagrees.
        """
        return Namespace(self, self._run(open_namespace(self._core, spec)))

    def release(self, sequences: Iterable[Sequence]) -> None:
        """End many sequences in one request, whose answer is not waited for.

        Does not raise when the daemon is away.
        """
        ending = self._core.end([sequence._core for sequence in sequences])
        if ending and not self._closed and os.getpid() == self._core.pid:
            self._release_orphans()

    def stat(self) -> dict[str, Any]:
        """The daemon's status document."""
        return self._run(self._core.stat())

    def ping(self) -> bool:
        """Whether the daemon answers; takes the lease up again if the connection is gone.

        Takes as long as any call, and costs the daemon next to nothing. What does not pass by
        itself is raised: a client that is closed, VersionMismatch, NotOwner, LimitExceeded.
        """
        self._check_open()
        try:
            self._run(self._core.ping())
        except Unavailable:
            self._check_open()
            return False
        return True

    def flush(self, *, timeout_s: float = 600.0) -> None:
        """Return when all that was sealed is on disk. Raises TierFailed if that takes none."""
        self._run(self._core.flush(), self._limits.patience(timeout_s))

    def drain(self, *, undo: bool = False) -> Draining:
        """No new leases from now on, and what is only in RAM goes to disk; ``undo`` ends that.

        Asked again, it tells how far that is. Raises NotPermitted.
        """
        return self._run(self._core.drain(undo=undo))

    def operate(self, request: OperatorRequest, kind: type[M], *, timeout_s: float = 600.0) -> M:
        """Carry out an operator's verb as ``rpc.messages`` has it; the answer is of this kind.

        Raises NotPermitted, NotFound, InvalidArgument, and what the verb names.
        """
        steps = self._core.operate(request, kind)
        return self._run(steps, self._limits.patience(timeout_s))

    def reload(self) -> Reloaded:
        """Have the daemon read its configuration anew; which keys changed or need a restart.

        Raises ConfigError if anything is wrong with it: then nothing has changed. NotPermitted.
        """
        return self._run(self._core.reload())

    def close(self) -> None:
        """End the lease, and with it all sequences. Never raises; calling it again does nothing."""
        if not self._closed and os.getpid() == self._core.pid:
            for namespace in self._core.namespaces_with_uses():
                self._tell_uses(namespace)
        self._closed = True
        if self._link is not None:
            self._link.close()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- driving verbs ----------------------------------------------------------------------------

    def _run(
        self, steps: Steps[T], patience: Patience | None = None, *, by_scratch: bool = False
    ) -> T:
        """Run a verb to its end, attaching again as often as needed until the time is up."""
        self._core.check_process()
        patience = self._limits.patience() if patience is None else patience
        exchange = self._exchange_by_scratch if by_scratch else self._exchange
        self._take_turn(patience)
        try:
            return _drive(steps, partial(exchange, patience))
        finally:
            self._lock.release()

    def _run_and_release(self, steps: Steps[T]) -> T:
        """The same for a verb that ends sequences of its own, in the same time."""
        patience = self._limits.patience()
        try:
            return self._run(steps, patience)
        finally:
            self._release_orphans(patience.answer_by_s)

    def _open(self) -> None:
        self._attach(self._limits.opening())

    def _release_orphans(self, by_s: float = math.inf) -> None:
        """Best effort: what is not released now is, with the lease or before the next begin.

        It waits until ``by_s``, or as long as for any call.
        """
        link = self._link
        if link is None or not link.alive:
            return
        by_s = min(by_s, time.monotonic() + self._limits.attempt_s)
        if not self._lock.acquire(timeout=max(by_s - time.monotonic(), 0)):
            return
        try:
            with suppress(TierkvError, ConnectionLost):
                link.post(self._core.release_orphans(), by_s)
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        """Raise InvalidArgument in a forked child, Unavailable after ``close``."""
        self._core.check_process()
        if self._closed:
            raise Unavailable("this client is closed")

    def _tell_uses(self, namespace: NamespaceCore) -> None:
        """Best effort, and never waits: neither for another thread's call nor for the daemon."""
        link = self._link
        if link is None or not link.alive or not self._lock.acquire(blocking=False):
            return
        try:
            with suppress(TierkvError, ConnectionLost):
                link.offer(namespace.tell_uses(), time.monotonic() + self._limits.attempt_s)
        finally:
            self._lock.release()

    def _take_turn(self, patience: Patience) -> None:
        link, asked_s = self._link, time.monotonic()
        if not self._lock.acquire(timeout=patience.longest_s):
            raise Unavailable(f"{self._path}: another thread's call still waits for the daemon")
        if self._link is not link or link is None or not link.alive:
            patience.was_away(time.monotonic() - asked_s)

    def _exchange(self, patience: Patience, ask: Ask) -> Reply:
        for _ in range(SENDS_MAX):
            link = self._link
            if link is None or not link.alive:
                link = self._attach(patience)
            try:
                return link.exchange(ask, patience.answer_by_s)
            except ConnectionLost:
                continue
        raise Unavailable(f"the daemon was lost {SENDS_MAX} times over the same request")

    def _exchange_by_scratch(self, patience: Patience, ask: Ask) -> Reply:
        """The same for what is asked by way of the scratch memory, which the ask writes into."""
        if self._link is not None and self._link.alive:
            with suppress(ConnectionLost):
                self._link.settle(patience.answer_by_s)
        return self._exchange(patience, ask)

    def _attach(self, patience: Patience) -> Link:
        delays_s = backoff_delays_s()
        while True:
            if self._closed:
                raise Unavailable("this client is closed")
            try:
                self._link = self._attempt(patience)
            except (ConnectionLost, NotReady) as error:
                delay_s = next(delays_s)
                if not patience.may_wait(delay_s):
                    raise nobody_serves(self._path, error) from error
                time.sleep(delay_s)
                continue
            if self._closed:  # by another thread, which did not see this link
                self._link.close()
            return self._link

    def _attempt(self, patience: Patience) -> Link:
        deadline = patience.attempt_by_s(self._limits.timeout_s)
        greeting_by_s = patience.greeting_by_s(deadline)
        self._core.let_go()
        opening = Opening()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(greeting_by_s - time.monotonic(), 0.001))
            sock.connect(os.fspath(self._path))
            while opening.greeting is None:
                sock.settimeout(max(greeting_by_s - time.monotonic(), 0.001))
                opening.receive(sock)
            arena, scratch = opening.memory(self._core.arena, populate=self._populate)
            link = Link(sock, opening.decoder, self._limits.tick_s)
            self._take_up_lease(link, arena, scratch, deadline)
            return link
        except BaseException as error:
            opening.close()
            sock.close()
            if isinstance(error, OSError):
                raise connect_failure(self._path, error) from error
            raise

    def _take_up_lease(self, link: Link, arena: MappedArena, scratch: U8, deadline: float) -> None:
        try:
            _drive(self._core.attach(arena, scratch), lambda ask: link.exchange(ask, deadline))
        except Unavailable as error:  # in this attempt; there may be time for another
            raise ConnectionLost(error.message) from error


class Link:
    """One connection that sends a request and waits for its reply, now or along with the next."""

    def __init__(self, sock: socket.socket, decoder: FrameDecoder, tick_s: float) -> None:
        sock.setblocking(True)
        tick = struct.pack("ll", 0, int(tick_s * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        self.alive = True
        self._sock = sock
        self._hangup = hangup_poll(sock.fileno())
        self._decoder = decoder
        self._last_id = 0
        self._abandoned: set[int] = set()
        self._posted: dict[int, Steps[None]] = {}

    def exchange(self, ask: Ask, deadline: float) -> Reply:
        """Send, and wait for the answer; without a request, only see whether the daemon is there.

        Raises ConnectionLost when the daemon has gone, Unavailable when the time is up, and the
        daemon's typed error when it refuses.
        """
        request = ask()
        if not self.alive:
            raise ConnectionLost("the connection is closed")
        if request is None:
            if self._hangup.poll(0):
                self.close()
                raise ConnectionLost("the daemon closed the connection")
            return Done()
        request_id = self._send_request(request, deadline)
        try:
            reply = self._receive(request_id, deadline)
        except BaseException:
            self._abandoned.add(request_id)
            raise
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    def post(self, steps: Steps[None], deadline: float) -> None:
        """Send a verb's one request, if it has one; its reply is taken when it is met.

        Raises ConnectionLost and Unavailable as ``exchange`` does.
        """
        ask = next(steps, None)
        request = ask() if ask else None
        if request is None:
            return
        if not self.alive:
            raise ConnectionLost("the connection is closed")
        while len(self._posted) >= POSTED_MAX:
            self._receive(next(iter(self._posted)), deadline)
        self._posted[self._send_request(request, deadline)] = steps

    def offer(self, steps: Steps[None], deadline: float) -> None:
        """``post``, unless the daemon owes replies: then it may be behind, and hears nothing.

        So it never waits. Raises ConnectionLost.
        """
        self._take_arrived()
        if not self._posted and not self._abandoned:
            self.post(steps, deadline)

    def settle(self, deadline: float) -> None:
        """Wait until the daemon is done with all requests that were given up.

        Raises ConnectionLost and Unavailable as ``exchange`` does.
        """
        while self._abandoned:
            request_id = next(iter(self._abandoned))
            self._receive(request_id, deadline)
            self._abandoned.discard(request_id)

    def close(self) -> None:
        """The daemon sees end-of-file."""
        self.alive = False
        self._sock.close()

    def _send_request(self, request: Request, deadline: float) -> int:
        """Send a request under the next id, which it returns."""
        request_id = self._last_id + 1
        frame = encode(request_id, request)
        self._last_id = request_id
        try:
            self._send(frame, deadline)
        except BaseException:
            self.close()  # who knows how much of the frame went out
            raise
        return request_id

    def _send(self, frame: bytearray, deadline: float) -> None:
        unsent = memoryview(frame)
        while unsent:
            try:
                unsent = unsent[self._sock.send(unsent) :]
            except BlockingIOError:
                self._check(deadline)
            except OSError as error:
                self._hear_last_words()
                raise ConnectionLost(str(error)) from error

    def _hear_last_words(self) -> None:
        """Raise the reason the daemon gave before it closed, if it gave one."""
        self._sock.setblocking(False)
        with suppress(OSError):
            while count := self._sock.recv_into(self._decoder.writable()):
                self._decoder.received(count)
                while (frame := self._decoder.next()) is not None:
                    reply = decode_reply(frame.payload)
                    if frame.request_id == 0 and isinstance(reply, Failure):
                        raise error_of(reply)

    def _receive(self, request_id: int, deadline: float) -> Reply:
        while True:
            frame = self._decoder.next()
            if frame is None:
                if not self._fill():
                    self._check(deadline)
                continue
            reply = decode_reply(frame.payload)
            posted = self._take_posted(frame.request_id, reply)
            if frame.request_id == request_id:
                return reply
            if not posted:
                self._take_abandoned(frame.request_id, reply)

    def _take_arrived(self) -> None:
        """Take the replies that are there already. Raises ConnectionLost."""
        while self._posted or self._abandoned:
            frame = self._decoder.next()
            if frame is not None:
                reply = decode_reply(frame.payload)
                if not self._take_posted(frame.request_id, reply):
                    self._take_abandoned(frame.request_id, reply)
            elif not self._fill(socket.MSG_DONTWAIT):
                return

    def _take_posted(self, request_id: int, reply: Reply) -> bool:
        """Whether it is the reply to a posted request, which then has it."""
        steps = self._posted.pop(request_id, None)
        if steps is None:
            return False
        with suppress(StopIteration, TierkvError):
            steps.send(reply)
        return True

    def _take_abandoned(self, request_id: int, reply: Reply) -> None:
        """Drop a reply that nobody waits for any more. Raises ProtocolError for any other."""
        if request_id in self._abandoned:
            self._abandoned.discard(request_id)
            return
        self.close()
        raise error_of(reply) if isinstance(reply, Failure) else unknown_reply(request_id)

    def _fill(self, flags: int = 0) -> bool:
        """Receive; False if there is nothing."""
        try:
            count = self._sock.recv_into(self._decoder.writable(), 0, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            raise ConnectionLost(str(error)) from error
        if count == 0:
            self.close()
            raise ConnectionLost("the daemon closed the connection")
        self._decoder.received(count)
        return True

    def _check(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise Unavailable("the daemon did not answer in time")


def _drive(steps: Steps[T], exchange: Callable[[Ask], Reply]) -> T:
    """Run a verb: every ask it yields goes through ``exchange``, whose errors it gets too."""
    try:
        ask = next(steps)
        while True:
            try:
                reply = exchange(ask)
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
    """A worker's block table. Ends with its ``with`` block, by ``end``, or with the client.

    One that is merely dropped keeps its blocks in the device tier until the client closes.
    """

    def __init__(self, client: Client, core: SequenceCore) -> None:
        super().__init__(core)
        self._client = client

    def reserve(self, n_tokens: int) -> None:
        """Room for ``n_tokens`` beyond ``num_tokens``; asks the daemon only when there is none.

        Call it before every write, room or not: it notices that the daemon was restarted without
        this sequence, whose slots may then be another's. Raises PoolExhausted (nothing was
        changed) and LeaseLost.
        """
        self._client._run(self._core.reserve(n_tokens))

    def wait(self, n_tokens: int | None = None) -> int:
        """After ``begin(wait=False)``: return when the first ``n_tokens`` cached tokens may be
        used, or all of them. Every other verb waits for all of them, too.

        Returns ``ready_tokens``; it is less if blocks turned out to be lost, and ``num_tokens``
        with it.
        """
        return self._client._run(self._core.wait(n_tokens))

    def append(self, token_ids: TokenIds) -> None:
        """The K and V of these tokens lie in the slots: record them, seal the blocks they fill.

        The table may change where the daemon had the same block already. If this raises
        Unavailable the tokens are recorded nonetheless; the next append makes up for the seal.
        """
        self._client._run(self._core.append(token_ids))

    def truncate(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` tokens. Reserve again before writing."""
        self._client._run(self._core.truncate(n_tokens))

    def fork(self) -> Sequence:
        """A second sequence on the same blocks. Both must reserve again before they write."""
        return Sequence(self._client, self._client._run(self._core.fork()))

    def suspend(self) -> None:
        """Let the blocks spill. The worker must not touch them until ``resume``."""
        self._client._run(self._core.suspend())

    def resume(self) -> None:
        """Bring the blocks back; the block table is another one.

        Raises CorruptionError if a block is lost: the sequence keeps the tokens before it (see
        ``num_tokens``) and stays suspended. Resume it again and compute the rest anew, or end it.
        """
        self._client._run(self._core.resume())

    def end(self) -> None:
        """Release the sequence; full blocks stay cached. Never raises for a daemon that is away."""
        self._client.release([self])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


class Namespace(NamespaceViews):
    """One model shard's blocks: find prefixes, begin sequences, compute on the pool."""

    def __init__(self, client: Client, core: NamespaceCore) -> None:
        super().__init__(core)
        self._client = client

    def lookup(
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
        return self._client._run(steps)

    def exists(self, hashes: U8) -> U8:
        """Which blocks are cached: u8 [n], a block's fastest tier (0 device, 1 host, 2 disk) or
        255. ``hashes``: u8 [n, 16], chain hashes as ``chain_hashes`` gives them.

        One lookup in the daemon's table each, whatever chains the blocks belong to; their tokens
        are not compared. Touches nothing.
        """
        return self._client._run(self._core.exists(hashes))

    def begin(
        self,
        token_ids: TokenIds,
        *,
        keep: int = 1,
        extra_keys: ExtraKeys | None = None,
        reserve: int | None = None,
        wait: bool = True,
    ) -> Sequence:
        """A sequence on the longest cached prefix, pinned and in the device tier.

        At least ``keep`` of the tokens are left to compute (an engine needs one for its logits).
        ``extra_keys`` has bytes or None for each block, in order. With ``reserve`` there is room
        for all of ``token_ids`` and so many tokens more, as after ``Sequence.reserve``; all in one
        round trip. Raises PoolExhausted if there is not; then no sequence has begun.

        Without ``wait`` the call does not wait for blocks that must come up from slower tiers:
        ``ready_tokens`` may be used now, ``Sequence.wait`` waits for more, and ``load_s`` says how
        long that should take.
        """
        steps = self._core.begin(token_ids, keep, extra_keys, reserve, wait)
        return Sequence(self._client, self._client._run(steps))

    def read(
        self,
        token_ids: TokenIds,
        out: U8,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Copy the cached blocks of ``token_ids`` from ``first`` on into ``out``; returns how many.

        ``out``: u8 [n, spec.block_bytes], C-contiguous; at most n blocks are copied. Those that lie
        in the device tier are copied without asking the daemon, whether it runs or not; every
        copied byte is checked. If there may be more, it is asked, and brings them up.
        """
        return self._read(token_ids, self._core.rows_to_fill(out), first, extra_keys)

    def read_pages(
        self,
        token_ids: TokenIds,
        pages: Pages,
        ids: Any,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Copy cached blocks into an engine's pages; returns how many leading ones are there.

        They are blocks ``first`` .. ``first + n - 1`` of the chain that ``token_ids`` make, and
        come to lie in the engine's blocks ``ids`` (integers [n]) of ``pages``. Those before
        ``first`` are not copied; that they are cached, too, is proven like everything else. As
        ``read``, it asks the daemon only for what does not lie in the device tier. Pages behind
        those that are there may have been written to.
        """
        rows = self._core.paged(pages, ids, writable=True)
        return self._read(token_ids, rows, first, extra_keys)

    def _read(
        self, token_ids: TokenIds, rows: Rows, first: int, extra_keys: ExtraKeys | None
    ) -> int:
        self._client._check_open()
        reading = self._core.read_here(token_ids, rows, extra_keys, first)
        copied = reading.copied
        if not reading.done:
            copied = self._client._run_and_release(self._core.read_on(reading, extra_keys))
        if self._core.uses.due:
            self._client._tell_uses(self._core)
        return copied

    def write(
        self,
        token_ids: TokenIds,
        data: Any,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """Cache whole blocks by copy, in one round trip; returns how many are cached.

        ``data``: as for ``Sequence.write_blocks``, n blocks. They are blocks ``first`` .. ``first +
        n - 1`` of the chain that ``token_ids`` make; those before ``first`` must be cached, so a
        long prompt can be written in pieces. Returns n, or less if blocks are not cached (any
        more): 0 if those before ``first`` are not, then begin again with the first one. Where a
        block is cached already, that one is used. Acknowledged as durably as ``Sequence.append``.

        Keeps room in the device tier for as many blocks, up to 64 MiB and a sixteenth of the tier,
        until the client closes: the next call writes into that. Raises PoolExhausted,
        InvalidArgument, TierFailed.
        """
        return self._client._run_and_release(self._core.write(token_ids, data, first, extra_keys))

    def write_pages(
        self,
        token_ids: TokenIds,
        pages: Pages,
        ids: Any,
        *,
        first: int = 0,
        extra_keys: ExtraKeys | None = None,
    ) -> int:
        """``write`` out of an engine's pages: its blocks ``ids`` (integers [n]) of ``pages``.

        Takes any number of blocks, in parts of up to 64 MiB and a round trip each. Leading blocks
        that lie in the device tier already are neither copied nor sent.
        """
        rows = self._core.paged(pages, ids, writable=False)
        return self._client._run_and_release(
            self._core.write_pages(token_ids, rows, first, extra_keys)
        )

    def attention(
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
        """Paged attention of ``q`` [T, q_heads, head_dim] over the sequences' blocks.

        ``seq_lens``: tokens of K and V to see, the query's own included; by default what was
        appended. ``q_indptr``: whose rows are whose; by default one row per sequence, or all rows
        of one. ``scale`` defaults to head_dim ** -0.5. Returns [T, q_heads, head_dim] in ``q``'s
        dtype.
        """
        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
        plan = self._plan(layer, q, sequences, seq_lens, q_indptr, **options)
        if where == "worker":
            return self._paged.attend(layer, q, plan)
        if where != "daemon":
            raise InvalidArgument(f"where is {where!r}; it must be worker or daemon")
        return self._client._run(self._paged.attend_in_daemon(q, plan), by_scratch=True)
