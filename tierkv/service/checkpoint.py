"""Checkpoints: everything that changed goes into the index, then old log segments go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tierkv_wal import WalWriter

from tierkv.core.state import State
from tierkv.service.journal import Journal
from tierkv.service.snapshot import index_changes
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.index import Index, IndexChanges

DIRTY_ROWS_MAX = 50_000
"""Changed rows that ask for a checkpoint: bounds the copy on the loop and the commit."""


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
        index: Index,
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
        self._clock_at_last = time.monotonic()
        self.last_lsn = last_lsn
        self.last_duration_s = 0.0
        self.last_unix_s = time.time()
        self.on_done: Callable[[float], None] = lambda _seconds: None

    @property
    def age_s(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self._clock_at_last

    def due(self, checkpoint_bytes: int, checkpoint_s: float) -> bool:
        """Whether enough has gathered since the last one."""
        if self._writer.appended_lsn == self.last_lsn:
            return False
        return (
            self._writer.bytes_written - self._bytes_at_last >= checkpoint_bytes
            or self.age_s >= checkpoint_s
            or self._state.changed_rows >= DIRTY_ROWS_MAX
        )

    async def run(self) -> None:
        """Make a checkpoint of the state as it is now.

        Raises TierFull, TierFailed: then the last one stays valid and nothing is forgotten.
        """
        async with self._lock:
            started = time.monotonic()
            lsn = self._journal.flush()
            written = self._writer.bytes_written
            changes = self._state.take_changes()
            content = index_changes(self._state, changes, self._specs, {"checkpoint_lsn": lsn})
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._thread, self._write, content, lsn)
            except BaseException:
                # Also when cancelled: whether the thread got to it is not known.
                self._state.put_back(changes)
                raise
            self.last_lsn = lsn
            self._bytes_at_last = written
            self._clock_at_last = time.monotonic()
            self.last_unix_s = time.time()
            self.last_duration_s = self._clock_at_last - started
            self.on_done(self.last_duration_s)

    def close(self) -> None:
        """Wait for the thread to end."""
        self._thread.shutdown()

    def _write(self, content: IndexChanges, lsn: int) -> None:
        self._writer.sync()
        if self._disk is not None:
            self._disk.sync()
        self._index.commit(content)
        self._writer.forget(lsn)
