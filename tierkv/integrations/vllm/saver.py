"""Copies the engine's finished blocks into tierkv, on a thread of its own.

The engine goes on meanwhile, and may free a block and give it to another request before it is
copied. So before each step the engine says which blocks the step will write into: they are marked,
so that a save from before lets them be, and one that is copying just now is waited for. What was
copied waits in this process's memory for the daemon, so a slow daemon keeps no block from the
engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from tierkv.client.sync import Namespace
from tierkv.core.ids import I32
from tierkv.errors import PoolExhausted, TierkvError
from tierkv.integrations.attachment import LOST, Attachment
from tierkv.integrations.vllm.logs import log
from tierkv.integrations.vllm.memory import EngineMemory
from tierkv.integrations.vllm.messages import Save
from tierkv.integrations.vllm.stats import Counts

QUEUED_MAX = 4096
"""Saves that wait; more only pile up when the daemon is much slower than the engine."""

QUEUED_TOKENS_MAX = 32 << 20
"""Tokens of their chains together, each of which takes 4 bytes here."""


class Saver:
    """Saves in the order they were asked for. Every save ends up in ``take``'s results."""

    def __init__(
        self,
        attachment: Attachment,
        memory: EngineMemory,
        counts: Counts,
    ) -> None:
        self._attachment = attachment
        self._memory = memory
        self._counts = counts
        self._change = threading.Condition()
        self._queued: deque[_Queued] = deque()
        self._queued_tokens = 0
        self._busy = False
        self._copying: I32 | None = None
        self._step = 0
        self._written_in = np.zeros(memory.blocks, np.int64)
        self._ended: dict[int, int] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="tierkv-save", daemon=True)
        self._thread.start()

    def submit(self, save: Save) -> None:
        """Store blocks that the work given to the device so far has computed; does not wait."""
        ready = self._memory.mark()
        with self._change:
            self._queued.append(_Queued(save, ready, self._step))
            self._queued_tokens += len(save.chain.tokens)
            while len(self._queued) > QUEUED_MAX or self._queued_tokens > QUEUED_TOKENS_MAX:
                dropped = self._next().save
                self._end(dropped, 0)
                self._counts.add(dropped_save_blocks=len(dropped.rows) - dropped.first)
            self._change.notify_all()

    def let_be(self, written: list[int]) -> None:
        """Return when no save will read these blocks any more: the engine writes into them."""
        with self._change:
            self._step += 1
            self._written_in[written] = self._step
            self._change.wait_for(
                lambda: self._copying is None or not np.isin(self._copying, written).any()
            )

    def take(self) -> dict[int, int]:
        """Saves that have ended since the last call, and how many leading blocks are stored."""
        with self._change:
            taken, self._ended = self._ended, {}
            return taken

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was asked for is stored, or the time is up."""
        with self._change:
            self._change.wait_for(lambda: not self._queued and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread, after what was asked for if there is time for that."""
        self.settle(timeout_s)
        with self._change:
            self._closed = True
            self._queued.clear()
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queued or self._closed)
                if not self._queued:
                    return
                queued = self._next()
                self._busy = True
            stored = self._save(queued)
            with self._change:
                self._busy = False
                self._end(queued.save, stored)
                self._change.notify_all()

    def _next(self) -> _Queued:
        queued = self._queued.popleft()
        self._queued_tokens -= len(queued.save.chain.tokens)
        return queued

    def _end(self, save: Save, stored: int) -> None:
        self._ended[save.number] = stored

    def _save(self, queued: _Queued) -> int:
        """How many leading blocks of the chain tierkv has now."""
        save = queued.save
        started_s = time.monotonic()
        progress = _Progress()
        namespaces = self._attachment.namespaces
        try:
            if namespaces is not None:
                self._memory.wait(queued.ready)
                self._store(namespaces[0], queued, progress)
        except LOST as error:
            self._attachment.lost(error)
        except PoolExhausted as error:
            log.debug("%d blocks are not saved: %s", len(save.rows), error)
        except TierkvError as error:
            log.warning("%d blocks are not saved: %s", len(save.rows), error)
        except Exception:
            log.exception("%d blocks are not saved", len(save.rows))
        there = progress.known + progress.stored
        self._counts.add(
            known_blocks=progress.known,
            saved_blocks=progress.stored,
            saved_bytes=progress.stored * self._memory.block_bytes,
            save_seconds=time.monotonic() - started_s,
            dropped_save_blocks=len(save.rows) - max(there, save.first),
        )
        return there

    def _store(self, namespace: Namespace, queued: _Queued, progress: _Progress) -> None:
        save = queued.save
        chain, keys = save.chain, save.chain.extra_keys
        block_tokens = namespace.spec.block_tokens
        found = namespace.lookup(chain.tokens, keep=0, extra_keys=keys)
        progress.known = found.tokens // block_tokens
        at, end = progress.known, len(save.rows)
        while at < end:
            rows = save.rows[at : at + self._memory.staged_blocks]
            copied = self._copy_out(rows, queued.step)
            if not len(copied):
                return
            piece = chain.first(at + len(copied), block_tokens)
            stored = namespace.write(piece.tokens, copied, first=at, extra_keys=piece.extra_keys)
            progress.stored += stored
            if stored < len(copied):
                return
            at += stored

    def _copy_out(self, rows: I32, step: int) -> Any:
        """The leading blocks that no step after ``step`` has written into (u8 [blocks, bytes])."""
        with self._change:
            lost = (rows < 0) | (self._written_in[rows] > step)
            gone = np.flatnonzero(lost.any(axis=1))
            held = rows[: gone[0]] if len(gone) else rows
            self._copying = held.copy()
        try:
            return self._memory.copy_out(self._copying)
        finally:
            with self._change:
                self._copying = None
                self._change.notify_all()


class _Queued(NamedTuple):
    """A save of what is in the engine's blocks in ``step``, once the device is at ``ready``."""

    save: Save
    ready: Any
    step: int


class _Progress:
    """Blocks of a save that tierkv had, and that it has got."""

    def __init__(self) -> None:
        self.known = 0
        self.stored = 0
