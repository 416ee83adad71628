"""Core records become log frames, and replies wait until they are as durable as promised.

All requests of one loop turn share one frame and one write. With durability

- ``kill``: the frame is written (so the kernel has it) before any reply of the turn goes out;
- ``power``: the same, but for lasting replies. A thread syncs the log, they follow; the next turn
  gathers meanwhile, no timer;
- ``none``: replies go out at once, the frame is written some milliseconds later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tierkv_wal import WalDead, WalWriter

from tierkv.core.records import Kind, Records
from tierkv.core.state import State
from tierkv.errors import LimitExceeded
from tierkv.service.watchdog import Pulse

_INDEPENDENT = (Kind.DROP, Kind.PLACE, Kind.DELETE, Kind.SEQ_CLOSE)
"""Records that mean the same whether or not their neighbours survive a crash with them."""


class Journal:
    """Logs and applies records; releases replies.

    ``on_death`` is called once if the log cannot be written or synced, or the state refuses
    records: the daemon must exit, for nobody knows what the disk holds now, or whether the state
    is what the log says. No reply is released any more. ``on_sync`` hears up to which LSN a sync
    went, ``on_write`` how many records a write had, and both how long it took.
    """

    def __init__(
        self,
        state: State,
        writer: WalWriter,
        durability: str,
        none_flush_s: float,
        on_death: Callable[[Exception], None],
        on_sync: Callable[[int, float], None] = lambda _lsn, _seconds: None,
        on_write: Callable[[int, float], None] = lambda _records, _seconds: None,
    ) -> None:
        self._state = state
        self._writer = writer
        self._durability = durability
        self._none_flush_s = none_flush_s
        self._on_death = on_death
        self._on_sync = on_sync
        self._on_write = on_write
        self._unwritten: deque[tuple[int, Callable[[], None]]] = deque()
        self._unsynced: deque[tuple[int, Callable[[], None]]] = deque()
        """Replies by the LSN they wait for, in its order."""
        self._freed_lsn = 0
        """LSN of the last record that freed a slot."""
        self._seen_freed = state.slots_freed
        self._scheduled_flush: asyncio.Handle | None = None
        self._syncing = False
        self._dead = False
        self._sync_thread = ThreadPoolExecutor(1, "tierkv-wal-sync")
        self.pulse = Pulse()
        """Of the thread that syncs."""

    def commit(self, records: Records, *, applied: bool = False) -> None:
        """Apply records and put them into the turn's frame. Mutates the state.

        ``applied``: the state is as they say already.

        All of them or none survive a crash, but for those that stand each for itself. Raises
        LimitExceeded, with nothing changed, for more than one frame of a log segment can hold (if
        they are applied, having died); InvariantViolation, having died, if they contradict the
        state.
        """
        try:
            parts = list(self._in_frames(records))
        except LimitExceeded as error:
            if applied:
                self.die(error)
            raise
        try:
            for part in parts:
                if not applied:
                    self._state.apply(part)
                lsn = self._writer.append(part.view(np.uint8).data)
        except (OSError, WalDead) as error:
            self.die(error)
            return
        except BaseException as error:
            self.die(error)
            raise
        if self._state.slots_freed != self._seen_freed:
            self._seen_freed = self._state.slots_freed
            self._freed_lsn = lsn
        self._schedule_flush()

    def release(self, reply: Callable[[], None], *, lasting: bool = True) -> None:
        """Call ``reply`` when all that is committed by now is durable enough.

        A reply that is not ``lasting`` promises nothing that could outlive the machine's memory,
        as leases and sequences cannot. So it waits for no sync, whatever the mode.
        """
        if self._dead:
            return
        synced = lasting and self._durability == "power"
        lsn = self._writer.appended_lsn
        if self._durability == "none" or lsn <= self._acked_lsn(synced):
            reply()
            return
        (self._unsynced if synced else self._unwritten).append((lsn, reply))
        if synced and self._scheduled_flush is None:
            # Written already, in a turn in which nobody waited.
            self._start_sync()

    async def settle(self) -> None:
        """Return when freed slots may be overwritten: their records are as durable as replies.

        Even with durability ``none`` they are written first, in the order of the log. What is
        committed meanwhile, or frees nothing, is not waited for.
        """
        lsn = self._freed_lsn
        self.write_freed()
        if self._durability == "power" and self._writer.durable_lsn < lsn:
            synced = asyncio.Event()
            self._unsynced.append((lsn, synced.set))
            self._start_sync()
            await synced.wait()

    def flush(self) -> int:
        """Write the turn's frame now; returns the LSN up to which the log is written.

        Raises WalDead: the state may then hold what the log does not.
        """
        self._flush()
        if self._dead:
            raise WalDead("the log failed; the daemon is about to exit")
        return self._writer.written_lsn

    def write_freed(self) -> None:
        """Write the turn's frame now if it frees slots: their entries are about to change.

        A crash before the frame is written must find the entries of the slots' old owners, whom
        the log then still knows. Replies go out at the end of the turn all the same: this is
        called from the midst of a request. Raises WalDead.
        """
        if self._freed_lsn > self._writer.written_lsn:
            self._write()
        if self._dead:
            raise WalDead("the log failed; the daemon is about to exit")

    def close(self) -> None:
        """Write and sync what is left."""
        if not self._dead:
            self._flush()
        self._sync_thread.shutdown()

    def _acked_lsn(self, synced: bool) -> int:
        if synced:
            return self._writer.durable_lsn
        return self._writer.written_lsn

    def _schedule_flush(self) -> None:
        if self._scheduled_flush is not None or self._dead:
            return
        loop = asyncio.get_running_loop()
        if self._durability == "none":
            self._scheduled_flush = loop.call_later(self._none_flush_s, self._flush)
        else:
            self._scheduled_flush = loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._scheduled_flush is not None:
            self._scheduled_flush.cancel()
            self._scheduled_flush = None
        self._write()
        if self._dead:
            return
        if self._durability == "power":
            self._start_sync()
        self._release_waiting()

    def _write(self) -> None:
        if self._dead:
            return
        slots = self._writer.appended_lsn - self._writer.written_lsn
        started = time.monotonic()
        try:
            self._writer.write()
        except (OSError, WalDead) as error:
            self.die(error)
            return
        if slots:
            # One of them is the frame's header.
            self._on_write(slots - 1, time.monotonic() - started)

    def _release_waiting(self) -> None:
        for waiting, synced in ((self._unwritten, False), (self._unsynced, True)):
            acked = self._acked_lsn(synced)
            while waiting and waiting[0][0] <= acked:
                waiting.popleft()[1]()

    def _start_sync(self) -> None:
        if self._syncing or self._dead or not self._unsynced:
            return
        self._syncing = True
        loop = asyncio.get_running_loop()
        started = loop.time()
        future = loop.run_in_executor(self._sync_thread, self.pulse.watched(self._writer.sync))
        future.add_done_callback(lambda done: self._synced(done, loop.time() - started))

    def _synced(self, done: asyncio.Future[int], seconds: float) -> None:
        self._syncing = False
        error = done.exception()
        if error is not None:
            self.die(error)
            return
        self._on_sync(done.result(), seconds)
        self._release_waiting()
        self._start_sync()

    def _in_frames(self, records: Records) -> Iterator[Records]:
        most = self._writer.append_records_max
        if len(records) <= most:
            yield records
            return
        if not np.isin(records["type"], _INDEPENDENT).all():
            raise LimitExceeded(
                f"the request makes {len(records)} log records, a log segment holds {most} in one "
                "piece; ask for fewer blocks at once, or raise wal.segment_bytes",
                limit=most,
                asked=len(records),
            )
        for at in range(0, len(records), most):
            yield records[at : at + most]

    def die(self, error: BaseException) -> None:
        """The log failed: release no reply any more, and call ``on_death`` (the first time)."""
        if self._dead:
            return
        self._dead = True
        self._unwritten.clear()
        self._unsynced.clear()
        self._on_death(error if isinstance(error, Exception) else RuntimeError(repr(error)))
