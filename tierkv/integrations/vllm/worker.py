"""The connector's side in the engine's workers: copies blocks as the scheduler's side says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tierkv.core.spec import KVSpec
from tierkv.integrations.attachment import Attachment
from tierkv.integrations.vllm.attaching import attachment
from tierkv.integrations.vllm.geometry import Geometry
from tierkv.integrations.vllm.identity import spec_of
from tierkv.integrations.vllm.loader import Loader, LoadResults
from tierkv.integrations.vllm.memory import EngineMemory
from tierkv.integrations.vllm.messages import Saved, Step
from tierkv.integrations.vllm.saver import Saver
from tierkv.integrations.vllm.settings import Settings
from tierkv.integrations.vllm.stats import ConnectorStats, Counts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

IDLE_WAIT_S = 0.01
"""A step that computes nothing waits so long for a load, rather than spin."""

CLOSE_S = 5.0
"""An engine that shuts down waits so long for its last saves."""


class WorkerSide:
    """One for each rank. Two threads copy; each has a connection, so neither waits for the other.

    Both end with the engine's KV memory: ``unregister``, or ``close``.
    """

    def __init__(
        self,
        config: VllmConfig,
        caches: KVCacheConfig,
        settings: Settings,
        ranks: tuple[int, int],
    ) -> None:
        self._config = config
        self._caches = caches
        self._settings = settings
        self._ranks = ranks
        self._geometry = Geometry.of(caches)
        self._counts = Counts()
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._memory: EngineMemory | None = None
        self._attachments: list[Attachment] = []
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._step = Step()
        self._before_step: Any = None
        self.spec: KVSpec | None = None
        self.failed_blocks: set[int] = set()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV memory, and connect. Raises InvalidArgument if it is none we know.

        ``tensors``: each layer's, by name.
        """
        self.unregister()
        self._tensors = tensors
        memory = self._memory = EngineMemory(self._geometry, tensors, self._caches.num_blocks)
        if self.spec is None:
            self.spec = spec_of(
                self._config,
                self._caches,
                self._geometry,
                memory.pages,
                self._settings,
                self._ranks,
            )
        timeout_s = self._settings.transfer_timeout_s
        for name in ("load", "save"):
            self._attachments.append(attachment(self._settings, [self.spec], name, timeout_s))
        to_load, to_save = self._attachments
        self._loader = Loader(to_load, memory, self._counts)
        self._saver = Saver(to_save, memory, self._counts)

    def restore(self) -> None:
        """Take the same memory again, after ``unregister``."""
        if self._loader is None and self._tensors:
            self.register(self._tensors)

    def unregister(self) -> None:
        """Touch the engine's KV memory no more."""
        if self._saver is not None:
            self._saver.close(CLOSE_S)
        if self._loader is not None:
            self._loader.close()
        self._loader = self._saver = None
        for one in self._attachments:
            one.close()
        self._attachments.clear()

    # --- the steps of the engine ------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Before anything is written: no save may be reading the blocks that will be."""
        self._step = step
        if self._saver is not None:
            self._saver.let_be(step.written)
        if step.loads and self._memory is not None:
            self._before_step = self._memory.mark()

    def start_loads(self) -> None:
        """Start this step's loads."""
        loads, self._step.loads = self._step.loads, []
        for load in loads:
            if self._loader is not None:
                self._loader.submit(load, self._before_step)

    def start_saves(self) -> None:
        """Start this step's saves: what it computes has been computed, or given to the device."""
        saves, self._step.saves = self._step.saves, []
        for save in saves:
            if self._saver is not None:
                self._saver.submit(save)

    def results(self) -> LoadResults:
        """Loads that have ended. ``failed_blocks`` has what they lack, until the next call."""
        if self._loader is None:
            return LoadResults()
        taken = self._loader.take(IDLE_WAIT_S if self._step.idle else 0.0)
        self.failed_blocks = taken.missing
        return taken

    def saved(self) -> Saved | None:
        """Saves that have ended."""
        ended = self._saver.take() if self._saver is not None else {}
        if not ended:
            return None
        return Saved({number: (1, blocks) for number, blocks in ended.items()})

    def stats(self) -> ConnectorStats | None:
        """What was counted since the last call."""
        return self._counts.take()

    @property
    def several_groups(self) -> bool:
        """Whether block ids alone do not tell the scheduler what failed."""
        return self._geometry.groups > 1
