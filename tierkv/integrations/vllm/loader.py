"""Brings blocks from tierkv into the engine's memory, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tierkv.errors import TierkvError
from tierkv.integrations.attachment import LOST, Attachment
from tierkv.integrations.vllm.logs import log
from tierkv.integrations.vllm.memory import EngineMemory
from tierkv.integrations.vllm.messages import Load
from tierkv.integrations.vllm.stats import Counts

ATTACH_S = 0.05
"""How long a load waits for its connection: the scheduler's may be back a moment earlier. It counts
from when the load was asked for, so that many of them do not wait one after another."""


@dataclass
class LoadResults:
    """``done``: requests whose loads are over, ``failed``: those of them that lack blocks.

    ``missing``: the engine's ids of these blocks.
    """

    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)


class _Asked(NamedTuple):
    """A load, the device's point before it, and when it was asked for."""

    load: Load
    ready: Any
    at_s: float


class Loader:
    """Loads in the order they were asked for. Every load ends up in ``take``'s results."""

    def __init__(
        self,
        attachment: Attachment,
        memory: EngineMemory,
        counts: Counts,
    ) -> None:
        self._attachment = attachment
        self._memory = memory
        self._counts = counts
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._results = LoadResults()
        self._open = 0
        self._thread = threading.Thread(target=self._work, name="tierkv-load", daemon=True)
        self._thread.start()

    def submit(self, load: Load, ready: Any) -> None:
        """Start a load; does not wait.

        It writes when the device has got to ``ready``: before that, work for whoever had these
        blocks earlier may still write into them.
        """
        with self._change:
            self._open += 1
        self._asked.put(_Asked(load, ready, time.monotonic()))

    def take(self, wait_s: float = 0.0) -> LoadResults:
        """What has ended since the last call; waits up to ``wait_s`` for something that will."""
        with self._change:
            self._change.wait_for(lambda: self._results.done or not self._open, wait_s)
            taken, self._results = self._results, LoadResults()
            return taken

    def close(self) -> None:
        """End the thread, after what was asked for."""
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            load, loaded = asked.load, self._load(asked)
            rows = load.rows[loaded:]
            with self._change:
                self._open -= 1
                self._results.done.add(load.request_id)
                if len(rows):
                    self._results.failed.add(load.request_id)
                    self._results.missing.update(rows[rows >= 0].tolist())
                self._change.notify_all()

    def _load(self, asked: _Asked) -> int:
        """How many leading blocks of those asked for are in the engine now."""
        load, started_s = asked.load, time.monotonic()
        namespaces = self._attachment.wait(max(asked.at_s + ATTACH_S - started_s, 0.0))
        loaded = 0
        try:
            if namespaces is not None:
                self._memory.wait(asked.ready)
                loaded = self._memory.load(namespaces[0], load.chain, load.first, load.rows)
        except LOST as error:
            self._attachment.lost(error)
        except TierkvError as error:
            log.warning("blocks of request %s are recomputed: %s", load.request_id, error)
        except Exception:
            log.exception("blocks of request %s are recomputed", load.request_id)
        self._counts.add(
            loaded_blocks=loaded,
            loaded_bytes=loaded * self._memory.block_bytes,
            load_seconds=time.monotonic() - started_s,
            failed_load_blocks=len(load.rows) - loaded,
        )
        return loaded
