"""vLLM's connector interface (``KVConnectorBase_V1``), handed on to the two sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.errors import InvalidArgument
from tierkv.integrations.vllm.guard import require_fit
from tierkv.integrations.vllm.identity import refuse_what_cannot_be_told
from tierkv.integrations.vllm.messages import Saved, Step, WorkerSpec
from tierkv.integrations.vllm.scheduler import Roles, SchedulerSide
from tierkv.integrations.vllm.settings import Settings
from tierkv.integrations.vllm.stats import ConnectorPromMetrics, ConnectorStats
from tierkv.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads prefixes that tierkv has, and saves every block that fills, in the background.

    vLLM makes one in its scheduler and one in each worker. Without a daemon it does nothing, and
    looks for one in the background.
    """

    OPTIONAL: ClassVar[frozenset[str]] = frozenset(
        {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches", "reset_cache"}
    )
    """Methods that not every version of vLLM calls, and that nothing goes wrong without."""

    def __new__(cls, *args: Any, **kwargs: Any) -> TierKVConnector:
        """Refuse a vLLM that this connector does not fit, by name of what is different."""
        require_fit(cls, (KVConnectorBase_V1, SupportsHMA), str(vllm.__version__))
        new: TierKVConnector = super().__new__(cls)
        return new

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        settings = Settings.of(transfer.kv_connector_extra_config or {})
        _require_recompute(transfer)
        hears_of_sleep = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
        refuse_what_cannot_be_told(vllm_config, kv_cache_config, hears_of_sleep=hears_of_sleep)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            events = vllm_config.kv_events_config
            roles = Roles(
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                tells=bool(events and events.enable_kv_cache_events),
                knows_media=_media_are_named_by_content(vllm_config),
            )
            self._scheduler = SchedulerSide(
                kv_cache_config, settings, generate_block_hash_extra_keys, roles
            )
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, settings, _ranks())

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is dropped is a miss later."""
        return False

    @property
    def _schedules(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a method of the scheduler's connector was called on a worker's")
        return self._scheduler

    @property
    def _works(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a method of a worker's connector was called on the scheduler's")
        return self._worker

    # --- in the workers ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._works.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._works.unregister()

    def restore_kv_caches(self) -> None:
        self._works.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        spec = self._works.spec
        return None if spec is None else WorkerSpec(spec)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._works.begin(_step(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._works.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is scheduled only when all of its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """A block is saved when it is full, with all its layers."""

    def wait_for_save(self) -> None:
        self._works.start_saves()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._works.results()
        failed = results.failed if self._works.several_groups else set()
        return KVConnectorTransferResults(finished_recving=results.done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._works.several_groups else self._works.failed_blocks

    def build_connector_worker_meta(self) -> Saved | None:
        return self._works.saved()

    # --- in the scheduler -------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = [metadata[ranks] for ranks in sorted(metadata)]
        self._schedules.attach(
            [worker.spec for worker in workers if isinstance(worker, WorkerSpec)]
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._schedules.match(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._schedules.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        host, disk = self._schedules.sources(request, num_external_tokens)
        found = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._schedules.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        output = connector_output
        self._schedules.loaded(
            output.finished_recving or (), output.invalid_block_ids, output.failed_recving
        )
        if isinstance(output.kv_connector_worker_meta, Saved):
            self._schedules.saved(output.kv_connector_worker_meta)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may go at once: a save that still wants them is told before they are used."""
        self._schedules.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self._schedules.take_events()

    def reset_cache(self) -> bool | None:
        self._schedules.forget()
        return True

    # --- in both ----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            return self._scheduler.take_stats()
        return self._works.stats()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.unregister()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _step(metadata: KVConnectorMetadata) -> Step:
    if not isinstance(metadata, Step):
        raise TypeError(f"the step has {type(metadata).__name__} for the connector, not tierkv's")
    return metadata


def _require_recompute(transfer: Any) -> None:
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise InvalidArgument(
            f"kv_load_failure_policy is {policy!r}: a block that tierkv lost would fail its "
            'request; set kv_load_failure_policy="recompute" in the KVTransferConfig'
        )


def _media_are_named_by_content(config: VllmConfig) -> bool:
    """vLLM hashes images only if it has a use for that itself; else it numbers them."""
    media = config.model_config.multimodal_config
    hashed = media is None or media.mm_processor_cache_gb
    return bool(hashed or config.cache_config.enable_prefix_caching)


def _ranks() -> tuple[int, int]:
    """This worker's (pipeline, tensor) ranks."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group
