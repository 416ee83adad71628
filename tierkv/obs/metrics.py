"""The Prometheus side of observation: a collector that reads when scraped.

Histograms are observed as things happen. All else is read at scrape time from ``Counters`` and from
the status document. So the hot path only adds to plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tierkv.core.counters import Counters
from tierkv.obs.declared import Declared, Type
from tierkv.obs.histogram import Histogram, Histograms
from tierkv.obs.status import StatusDocument
from tierkv.obs.table import METRICS

Snapshot = Callable[[], StatusDocument]


class Metrics:
    """All metrics of one daemon, in a registry of their own.

    Count on ``counters``; observe seconds on the histograms, on the event loop:
    ``block_alloc_duration["ok"]`` (or "exhausted"), ``transfer_duration["device", "host"]``,
    ``rpc_duration["acquire"]``, ``block_idle_before_evict["host"]``, and others without labels.
    ``attend_batch`` counts requests, ``wal_batch_records`` records. ``snapshot`` is called at each
    scrape.

    Switches off the creation timestamps of prometheus_client, which they only offer for the whole
    process: they double the number of series and say nothing that the process' start does not.
    """

    def __init__(self, snapshot: Snapshot, counters: Counters | None = None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
        self.counters = counters or Counters()
        self.registry = CollectorRegistry()
        self._histograms = {
            metric.name: Histograms(metric.buckets)
            for metric in METRICS
            if metric.type is Type.HISTOGRAM
        }
        self.block_alloc_duration = self._histograms["tierkv_block_alloc_duration_seconds"]
        self.transfer_duration = self._histograms["tierkv_transfer_duration_seconds"]
        self.rpc_duration = self._histograms["tierkv_rpc_duration_seconds"]
        self.wal_fsync_duration = self._only("tierkv_wal_fsync_duration_seconds")
        self.checkpoint_duration = self._only("tierkv_checkpoint_duration_seconds")
        self.wal_append_duration = self._only("tierkv_wal_append_duration_seconds")
        self.wal_batch_records = self._only("tierkv_wal_batch_records")
        self.block_lifetime = self._only("tierkv_block_lifetime_seconds")
        self.block_idle_before_evict = self._histograms["tierkv_block_idle_before_evict_seconds"]
        self.block_reuse_gap = self._only("tierkv_block_reuse_gap_seconds")
        self.loop_turn = self._only("tierkv_loop_turn_seconds")
        self.loop_delay = self._only("tierkv_loop_delay_seconds")
        self.gc_pause = self._only("tierkv_gc_pause_seconds")
        self.attend_batch = self._only("tierkv_attend_batch_requests")
        self.attend_wait = self._only("tierkv_attend_wait_seconds")
        self.registry.register(_AtScrape(snapshot, self.counters, self._histograms))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page for an Accept header (OpenMetrics if asked for), and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _only(self, name: str) -> Histogram:
        """The histogram of a metric without labels."""
        return self._histograms[name][()]


class _AtScrape(Collector):
    """Reads all metrics."""

    def __init__(
        self, snapshot: Snapshot, counters: Counters, histograms: Mapping[str, Histograms]
    ) -> None:
        self._snapshot = snapshot
        self._counters = counters
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        status = self._snapshot()
        for metric in METRICS:
            if metric.type is Type.HISTOGRAM:
                yield self._histogram(metric)
            elif metric.read is not None:
                counter = metric.type is Type.COUNTER
                family_type = CounterMetricFamily if counter else GaugeMetricFamily
                family = family_type(metric.name, metric.help, labels=metric.labels)
                for labels, value in metric.read(self._counters, status):
                    family.add_metric(labels, value)
                yield family

    def _histogram(self, metric: Declared) -> Metric:
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, one in self._histograms[metric.name].items():
            values = labels if isinstance(labels, tuple) else (labels,)
            family.add_metric(values, one.cumulative(), one.total)
        return family
