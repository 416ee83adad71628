"""The connector's counts on their way to vLLM's log and its Prometheus metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tierkv.integrations.vllm.counters import COUNTERS, METRIC_PREFIX

_NAMES = frozenset(counted.name for counted in COUNTERS)


@dataclass
class ConnectorStats(KVConnectorStats):
    """Counts since the last report: ``data`` has those that are not 0, by name."""

    def reset(self) -> None:
        """Count from 0."""
        self.data: dict[str, Any] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Count. Raises KeyError for a name that is not in ``COUNTERS``."""
        if name not in _NAMES:
            raise KeyError(name)
        if value:
            self.data[name] = self.data.get(name, 0) + value

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """The sum of both, in this one."""
        for name, value in other.data.items():
            self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Counts:
    """Where the threads of one side count, until vLLM takes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ConnectorStats()

    def add(self, **counts: float) -> None:
        """Count several things at once. Raises KeyError for a name that is not in ``COUNTERS``."""
        with self._lock:
            for name, value in counts.items():
                self._stats.add(name, value)

    def take(self) -> ConnectorStats | None:
        """The counts since the last call; None if nothing was counted."""
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, ConnectorStats()
            return taken


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """The counts as Prometheus counters, ``vllm:tierkv_<name>_total``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            counted.name: self._counter_cls(
                name=f"{METRIC_PREFIX}{counted.name}_total",
                documentation=counted.help,
                labelnames=labelnames,
            )
            for counted in COUNTERS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what a step reports."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(value)
