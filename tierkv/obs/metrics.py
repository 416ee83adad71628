"""The Prometheus side of observation: histograms, and a collector that reads when scraped.

Only histograms are observed as things happen. All else is read at scrape time from ``Counters``
and from the status document, so that the hot path only adds to plain ints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tierkv.core.counters import Counters
from tierkv.obs.status import StatusDocument
from tierkv.obs.table import METRICS, Type

Snapshot = Callable[[], StatusDocument]


class Timings(dict[str | tuple[str, ...], Histogram]):
    """A histogram's children by label value (or tuple of values), bound at first use."""

    def __init__(self, histogram: Histogram) -> None:
        super().__init__()
        self._histogram = histogram

    def __missing__(self, labels: str | tuple[str, ...]) -> Histogram:
        values = labels if isinstance(labels, tuple) else (labels,)
        self[labels] = child = self._histogram.labels(*values)
        return child


class Metrics:
    """All metrics of one daemon, in a registry of their own.

    Count on ``counters``; observe seconds on the histograms, from any thread:
    ``block_alloc_duration["ok"]`` (or "exhausted"), ``transfer_duration["device", "host"]``,
    ``rpc_duration["acquire"]``, ``wal_fsync_duration``, ``checkpoint_duration``. ``snapshot`` is
    called at each scrape.

    Switches off the creation timestamps of prometheus_client, which they only offer for the whole
    process: they double the number of series and say nothing that the process' start does not.
    """

    def __init__(self, snapshot: Snapshot, counters: Counters | None = None) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs
        self.counters = counters or Counters()
        self.registry = CollectorRegistry()
        histograms = {
            metric.name: Histogram(
                metric.name,
                metric.help,
                metric.labels,
                buckets=metric.buckets,
                registry=self.registry,
            )
            for metric in METRICS
            if metric.type is Type.HISTOGRAM
        }
        self.block_alloc_duration = Timings(histograms["tierkv_block_alloc_duration_seconds"])
        self.transfer_duration = Timings(histograms["tierkv_transfer_duration_seconds"])
        self.rpc_duration = Timings(histograms["tierkv_rpc_duration_seconds"])
        self.wal_fsync_duration = histograms["tierkv_wal_fsync_duration_seconds"]
        self.checkpoint_duration = histograms["tierkv_checkpoint_duration_seconds"]
        self.registry.register(_AtScrape(snapshot, self.counters))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The page for an Accept header (OpenMetrics if asked for), and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _AtScrape(Collector):
    """Reads all metrics but the histograms."""

    def __init__(self, snapshot: Snapshot, counters: Counters) -> None:
        self._snapshot = snapshot
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        status = self._snapshot()
        for metric in METRICS:
            if metric.read is None:
                continue
            family_type = CounterMetricFamily if metric.type is Type.COUNTER else GaugeMetricFamily
            family = family_type(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(self._counters, status):
                family.add_metric(labels, value)
            yield family
