"""What happened between two looks at the daemon, per second. No I/O here."""

from __future__ import annotations

import msgspec

from tierkv.obs.status import StatusDocument


class Rates(msgspec.Struct, kw_only=True, frozen=True):
    """Per second of ``interval_s``. ``hit_ratio`` is -1 if nothing was looked up.

    ``dropped_blocks`` of the ``evicted_blocks`` have no copy left in any tier.
    """

    interval_s: float
    lookup_tokens: float
    hit_tokens: dict[str, float]
    hit_ratio: float
    evicted_blocks: float
    dropped_blocks: float
    log_records: float
    log_bytes: float


def between(before: StatusDocument, after: StatusDocument) -> Rates:
    """How the counters grew. Those of a daemon that started in between began at zero."""
    if (before.pid, before.epoch) != (after.pid, after.epoch):
        before = StatusDocument(version=after.version, state="starting")
        before.wal.appended_lsn = after.wal.appended_lsn
    interval_s = max(after.uptime_s - before.uptime_s, 1e-3)
    hits = {
        tier: tokens - before.prefix.hit_tokens_by_tier.get(tier, 0)
        for tier, tokens in after.prefix.hit_tokens_by_tier.items()
    }
    looked_up = after.prefix.lookup_tokens - before.prefix.lookup_tokens
    return Rates(
        interval_s=interval_s,
        lookup_tokens=looked_up / interval_s,
        hit_tokens={tier: tokens / interval_s for tier, tokens in hits.items()},
        hit_ratio=sum(hits.values()) / looked_up if looked_up else -1.0,
        evicted_blocks=(_evicted(after) - _evicted(before)) / interval_s,
        dropped_blocks=(_dropped(after) - _dropped(before)) / interval_s,
        log_records=(after.wal.appended_lsn - before.wal.appended_lsn) / interval_s,
        log_bytes=(after.wal.bytes - before.wal.bytes) / interval_s,
    )


def _evicted(document: StatusDocument) -> int:
    return sum(one.blocks for one in document.evicted)


def _dropped(document: StatusDocument) -> int:
    return sum(one.blocks for one in document.evicted if one.to_tier == "none")
