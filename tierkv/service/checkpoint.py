"""Checkpoints: everything that changed goes into the index, then old log segments go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tierkv_wal import WalError, WalWriter

from tierkv.core.state import State
from tierkv.errors import TierFailed, TierFull
from tierkv.service.journal import Journal
from tierkv.service.machine import CheckpointIndex
from tierkv.service.snapshot import index_changes
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.index import IndexChanges

log = logging.getLogger(__name__)
T = TypeVar("T")

DIRTY_ROWS_MAX = 16_000
"""Changed rows that ask for a checkpoint: bounds the copy on the loop, to a millisecond or so, and
the commit."""

FRAMES_MAX = 32_000
"""Log frames that ask for a checkpoint: bounds the reading of the log after a crash, which takes
its time per frame rather than per record, to a fraction of a second."""


class Checkpointer:
    """Makes checkpoints, one at a time, on its own thread.

    Crash: the index holds the previous checkpoint and the log everything since, or the new one.
    """

    def __init__(
        self,
        state: State,
        specs: Mapping[int, bytes],
        journal: Journal,
        writer: WalWriter,
        disk: DiskTier | None,
        index: CheckpointIndex,
        last_lsn: int,
    ) -> None:
        self._state = state
        self._specs = specs
        self._journal = journal
        self._writer = writer
        self._disk = disk
        self._index = index
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "tierkv-checkpoint")
        self._bytes_at_last = writer.bytes_written
        self._frames_at_last = writer.frames_written
        self._clock_at_last = time.monotonic()
        self.last_lsn = last_lsn
        self.last_duration_s = 0.0
        self.last_unix_s = time.time()
        self.on_done: Callable[[float], None] = lambda _seconds: None
        self.on_sync: Callable[[int, float], None] = lambda _lsn, _seconds: None

    @property
    def age_s(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self._clock_at_last

    @property
    def bytes_since(self) -> int:
        """Bytes of the log behind the last checkpoint."""
        return self._writer.bytes_written - self._bytes_at_last

    def due(self, checkpoint_bytes: int, checkpoint_s: float) -> bool:
        """Whether enough has gathered since the last one."""
        if self._writer.appended_lsn == self.last_lsn:
            return False
        return (
            self.bytes_since >= checkpoint_bytes
            or self.age_s >= checkpoint_s
            or self._state.changed_rows >= DIRTY_ROWS_MAX
            or self._writer.frames_written - self._frames_at_last >= FRAMES_MAX
        )

    async def run(self, *, last: bool = False) -> None:
        """Make a checkpoint of the state as it is now.

        ``last``: no worker is served any more, so from here on the log lacks nothing that one was
        told. Raises TierFull, TierFailed: then the last one stays valid and nothing is forgotten.
        """
        async with self._lock:
            started = time.monotonic()
            lsn = self._journal.flush()
            meta = {"checkpoint_lsn": lsn} | ({"replies_ahead": 0} if last else {})
            written, frames = self._writer.bytes_written, self._writer.frames_written
            changes = self._state.take_changes()
            try:
                content = index_changes(self._state, changes, self._specs, meta)
                await self._store(content, lsn)
            except BaseException:
                # Also when cancelled: the next one must not count on what the thread does now.
                self._state.put_back(changes)
                raise
            self.last_lsn = lsn
            self._bytes_at_last = written
            self._frames_at_last = frames
            self._clock_at_last = time.monotonic()
            self.last_unix_s = time.time()
            self.last_duration_s = self._clock_at_last - started
            self.on_done(self.last_duration_s)

    def close(self) -> None:
        """Wait for the thread to end."""
        self._thread.shutdown()

    async def _store(self, content: IndexChanges, lsn: int) -> None:
        started = time.monotonic()
        try:
            durable_lsn = await self._in_thread(self._writer.sync)
        except (OSError, WalError) as error:
            self._journal.die(error)
            raise
        self.on_sync(durable_lsn, time.monotonic() - started)
        if self._disk is not None:
            try:
                await self._in_thread(self._disk.sync)
            except (TierFull, TierFailed) as error:
                # Waiting would bring nothing back: such copies are found out when they are read.
                extra = {"tier": "disk", "lsn": lsn}
                log.error("copies on disk may not survive power loss: %s", error, extra=extra)
        await self._in_thread(lambda: self._index.commit(content))
        try:
            await self._in_thread(lambda: self._writer.forget(lsn))
        except OSError as error:
            log.warning("cannot remove old log segments: %s", error, extra={"lsn": lsn})

    async def _in_thread(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)
