"""Counts what the daemon's parts report: for the metrics, and some of it for the log."""

from __future__ import annotations

import logging

from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.obs.metrics import Metrics

log = logging.getLogger(__name__)

SLOW_SYNC_S = 1.0
"""A sync of the log that takes this long is worth a warning."""


class Measured:
    """The ``Hooks`` of the parts, and the ``Observer`` of their requests."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def answered(self, verb: str, code: str, seconds: float) -> None:
        """See call.Observer."""
        self._metrics.counters.answered(verb, code)
        self._metrics.rpc_duration[verb].observe(seconds)
        if verb == "reserve" and code in ("ok", "pool_exhausted"):
            outcome = "ok" if code == "ok" else "exhausted"
            self._metrics.block_alloc_duration[outcome].observe(seconds)

    def written(self, records: int, seconds: float) -> None:
        """See assembly.Hooks."""
        self._metrics.wal_batch_records.observe(records)
        self._metrics.wal_append_duration.observe(seconds)

    def synced(self, lsn: int, seconds: float) -> None:
        """See assembly.Hooks."""
        self._metrics.wal_fsync_duration.observe(seconds)
        if seconds >= SLOW_SYNC_S:
            log.warning("slow sync of the log", extra={"took_s": round(seconds, 3), "lsn": lsn})

    def checkpointed(self, seconds: float) -> None:
        """See assembly.Hooks."""
        self._metrics.checkpoint_duration.observe(seconds)

    def moved(self, move: Move, seconds: float) -> None:
        """See assembly.Hooks."""
        self._metrics.transfer_duration[move.source.label, move.target.label].observe(seconds)

    def attended(self, waited_s: list[float]) -> None:
        """See assembly.Hooks."""
        self._metrics.attend_batch.observe(len(waited_s))
        for seconds in waited_s:
            self._metrics.attend_wait.observe(seconds)

    def block_gone(self, lived_s: float) -> None:
        """See assembly.Hooks."""
        self._metrics.block_lifetime.observe(lived_s)

    def block_left(self, tier: Tier, idle_s: float) -> None:
        """See assembly.Hooks."""
        self._metrics.block_idle_before_evict[tier.label].observe(idle_s)

    def block_reused(self, idle_s: float) -> None:
        """See assembly.Hooks."""
        self._metrics.block_reuse_gap.observe(idle_s)
