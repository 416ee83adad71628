"""The table of metrics: name, labels, help, why it exists, and where its numbers come from."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from tierkv.core.counters import Counters
from tierkv.obs.status import STATES, StatusDocument

Sample = tuple[tuple[str, ...], float]
Read = Callable[[Counters, StatusDocument], Iterable[Sample]]


class Type(Enum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Declared(NamedTuple):
    """One metric. ``read`` yields (label values, value) at scrape time.

    A histogram has ``buckets`` (upper bounds) instead, and is observed.
    """

    name: str
    type: Type
    help: str
    why: str
    labels: tuple[str, ...] = ()
    read: Read | None = None
    buckets: tuple[float, ...] = ()


def _value(read: Callable[[Counters, StatusDocument], float]) -> Read:
    return lambda counters, status: [((), read(counters, status))]


def _counted(read: Callable[[Counters], Mapping[Any, int]]) -> Read:
    """Counts by label value, or by tuple of label values."""

    def samples(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
        for key, count in read(counters).items():
            yield (key if isinstance(key, tuple) else (key,)), count

    return samples


def _tier(field: str) -> Read:
    return lambda counters, status: [
        ((name,), getattr(tier, field)) for name, tier in status.tiers.items()
    ]


def _memory(field: str) -> Read:
    return lambda counters, status: [
        ((name,), getattr(memory, field)) for name, memory in status.memory.items()
    ]


def _recovered(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    for name, tier in status.recovery.tiers.items():
        yield (name, "kept"), tier.kept
        yield (name, "dropped"), tier.dropped


def _adopted(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    for name, size_bytes in status.recovery.adopted_bytes.items():
        yield (name,), size_bytes


def _state(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    for state in STATES:
        yield (state,), float(state == status.state)


def _checkpoint_timestamp(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    if counters.checkpoint_timestamp_s:
        yield (), counters.checkpoint_timestamp_s


def _build(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    yield (status.version, platform.python_version()), 1.0


def _decades(first: int, last: int) -> tuple[float, ...]:
    """1, 2, 5 times each power of ten from 10**first up to 10**last, in seconds."""
    steps = [float(f"{step}e{power}") for power in range(first, last) for step in (1, 2, 5)]
    return (*steps, float(f"1e{last}"))


ALLOC_BUCKETS_S = (5e-6, *_decades(-5, 0), 2.0, 5.0)
"""5 us (one block, nothing to evict) to 5 s (a long spill on a slow drive)."""

LOOP_BUCKETS_S = _decades(-5, 0)
RPC_BUCKETS_S = _decades(-5, 1)
COPY_BUCKETS_S = _decades(-5, 1)

FSYNC_BUCKETS_S = (*_decades(-4, 0), 2.0, 5.0)
"""0.1 ms (a drive with power-loss protection) to 5 s (one that is dying)."""

CHECKPOINT_BUCKETS_S = _decades(-3, 2)

BATCH_BUCKETS = tuple(float(1 << power) for power in range(9))
"""1 (nobody else asked) to 256 (as many connections as there may be by default)."""

_BRIEF = (
    Declared(
        "tierkv_block_alloc_duration_seconds",
        Type.HISTOGRAM,
        "Time to give a request its device slots, evictions included.",
        "The stall a worker feels before it may compute; it grows when the device tier is full.",
        ("outcome",),
        buckets=ALLOC_BUCKETS_S,
    ),
    Declared(
        "tierkv_prefix_hit_ratio",
        Type.GAUGE,
        "Share of the latest million prompt tokens looked up that were cached.",
        "Whether the cache pays at all; the counters below give the same over any period.",
        read=_value(lambda counters, status: counters.hit_window.ratio),
    ),
    Declared(
        "tierkv_eviction_count_total",
        Type.COUNTER,
        "Blocks that left a tier, by where they went (none = no copy is left below).",
        "A steady flow to none means that the last tier is too small for the work.",
        ("from_tier", "to_tier", "reason"),
        _counted(lambda counters: counters.evictions),
    ),
    Declared(
        "tierkv_free_block_ratio",
        Type.GAUGE,
        "Share of a tier's capacity that is free.",
        "A full tier is normal; a full device tier with nothing evictable refuses requests.",
        ("tier",),
        _tier("free_ratio"),
    ),
)

_PREFIX = (
    Declared(
        "tierkv_prefix_lookup_tokens_total",
        Type.COUNTER,
        "Prompt tokens looked up.",
        "Base of every hit rate.",
        read=_value(lambda counters, status: counters.lookup_tokens),
    ),
    Declared(
        "tierkv_prefix_hit_tokens_total",
        Type.COUNTER,
        "Prompt tokens found, by the fastest tier that had them.",
        "Which tier earns its memory.",
        ("tier",),
        _counted(lambda counters: counters.hit_tokens),
    ),
    Declared(
        "tierkv_prefix_mismatches_total",
        Type.COUNTER,
        "Blocks found by their hash and not used: their tokens or the block before were others.",
        "Two prompts under one hash, by chance or on purpose; it should stay 0.",
        read=_value(lambda counters, status: counters.mismatched_blocks),
    ),
    Declared(
        "tierkv_deduplicated_blocks_total",
        Type.COUNTER,
        "Sealed blocks given up for an equal one that was there already.",
        "Workers that compute the same prefix at the same time; what that costs.",
        read=_value(lambda counters, status: counters.deduplicated_blocks),
    ),
)

_TIERS = (
    Declared(
        "tierkv_blocks",
        Type.GAUGE,
        "Blocks with a copy in the tier.",
        "What a restart would have to find again.",
        ("tier",),
        _tier("blocks"),
    ),
    Declared(
        "tierkv_tier_bytes",
        Type.GAUGE,
        "Bytes of a tier that hold blocks.",
        "How far a budget is used.",
        ("tier",),
        _tier("used_bytes"),
    ),
    Declared(
        "tierkv_tier_capacity_bytes",
        Type.GAUGE,
        "Budget of a tier.",
        "Shows which budget an automatic setting came to.",
        ("tier",),
        _tier("capacity_bytes"),
    ),
    Declared(
        "tierkv_arena_memory_bytes",
        Type.GAUGE,
        "Memory that a RAM tier's slots take, whether they hold blocks or not.",
        "What the tier costs now; the budget is what it may come to.",
        ("tier",),
        _memory("memory_bytes"),
    ),
    Declared(
        "tierkv_arena_prefault_missing_bytes",
        Type.GAUGE,
        "Memory of a RAM tier that is still to be taken ahead of need.",
        "Until it is 0, first writes are slow. If it stays, memory is short: see the log.",
        ("tier",),
        _memory("missing_bytes"),
    ),
    Declared(
        "tierkv_arena_huge_bytes",
        Type.GAUGE,
        "Memory of a RAM tier in huge pages, as far as is known.",
        "0: the kernel does not offer them for that memory; ARCHITECTURE.md says how to change it.",
        ("tier",),
        _memory("huge_bytes"),
    ),
    Declared(
        "tierkv_transfer_bytes_total",
        Type.COUNTER,
        "Payload copied between tiers.",
        "Load on memory and drive; writes to disk wear it.",
        ("from_tier", "to_tier"),
        _counted(lambda counters: counters.transfer_bytes),
    ),
    Declared(
        "tierkv_transfer_duration_seconds",
        Type.HISTOGRAM,
        "Time of one batch of copies between tiers.",
        "Slow promotions delay requests, slow spills delay allocations.",
        ("from_tier", "to_tier"),
        buckets=COPY_BUCKETS_S,
    ),
    Declared(
        "tierkv_checksum_failures_total",
        Type.COUNTER,
        "Copies that did not match their checksum and were dropped.",
        "Any growth outside a restart means failing memory or a failing drive.",
        ("tier",),
        _counted(lambda counters: counters.checksum_failures),
    ),
    Declared(
        "tierkv_disk_read_errors_total",
        Type.COUNTER,
        "Reads of the disk tier that the operating system refused.",
        "A failing drive or a lost mount; damage that can be read counts as a checksum failure.",
        read=_value(lambda counters, status: counters.disk_read_errors),
    ),
    Declared(
        "tierkv_optional_copies_dropped_total",
        Type.COUNTER,
        "Copies to a lower tier that were skipped because its queue was full.",
        "The drive cannot keep up with what is sealed; those blocks die with the RAM.",
        read=_value(lambda counters, status: counters.optional_copies_dropped),
    ),
)

_WAL = (
    Declared(
        "tierkv_wal_bytes_total",
        Type.COUNTER,
        "Bytes written to the log.",
        "The log's share of the drive's load.",
        read=_value(lambda counters, status: counters.wal_bytes),
    ),
    Declared(
        "tierkv_wal_frames_total",
        Type.COUNTER,
        "Frames (groups of records committed together) written to the log.",
        "Bytes per frame show how well commits are grouped.",
        read=_value(lambda counters, status: counters.wal_frames),
    ),
    Declared(
        "tierkv_wal_fsync_duration_seconds",
        Type.HISTOGRAM,
        "Time of one sync of the log to the drive.",
        'With durability = "power" every seal waits for one.',
        buckets=FSYNC_BUCKETS_S,
    ),
    Declared(
        "tierkv_wal_segments",
        Type.GAUGE,
        "Segment files of the log.",
        "Grows without end if checkpoints fail.",
        read=_value(lambda counters, status: status.wal.segments),
    ),
    Declared(
        "tierkv_checkpoint_duration_seconds",
        Type.HISTOGRAM,
        "Time of one checkpoint.",
        "A slow one lengthens the log, and so the next recovery.",
        buckets=CHECKPOINT_BUCKETS_S,
    ),
    Declared(
        "tierkv_checkpoint_timestamp_seconds",
        Type.GAUGE,
        "When the last checkpoint was complete (Unix time); absent before the first.",
        "Alert on its age.",
        read=_checkpoint_timestamp,
    ),
)

_RECOVERY = (
    Declared(
        "tierkv_recovery_duration_seconds",
        Type.GAUGE,
        "Time from the start to ready, of this daemon's start.",
        "How long workers were without a cache.",
        read=_value(lambda counters, status: status.recovery.duration_s),
    ),
    Declared(
        "tierkv_recovery_records",
        Type.GAUGE,
        "Records replayed from the log at this daemon's start.",
        "Explains the recovery's duration.",
        read=_value(lambda counters, status: status.recovery.records),
    ),
    Declared(
        "tierkv_recovery_index_rebuilt",
        Type.GAUGE,
        "1 if this daemon's start found the index lost and made it anew from the slots, else 0.",
        "Look for the cause: the log line, and the store's quarantine.",
        read=_value(lambda counters, status: bool(status.recovery.rebuilt)),
    ),
    Declared(
        "tierkv_recovery_blocks",
        Type.GAUGE,
        "Copies of blocks found again (kept) or lost (dropped) at this daemon's start.",
        "What a crash cost.",
        ("tier", "result"),
        _recovered,
    ),
    Declared(
        "tierkv_arena_adopted_bytes",
        Type.GAUGE,
        "Memory of a RAM tier that this daemon took over from the one before; 0 = made anew.",
        "0 after a crash: the tier's memory was not kept. Say who keeps it by arena.keep.",
        ("tier",),
        _adopted,
    ),
)

_SERVICE = (
    Declared(
        "tierkv_rpc_requests_total",
        Type.COUNTER,
        "Requests answered, by verb and error code (ok = none).",
        "Load, and who gets refused for what.",
        ("verb", "code"),
        _counted(lambda counters: counters.rpc_requests),
    ),
    Declared(
        "tierkv_rpc_duration_seconds",
        Type.HISTOGRAM,
        "Time from a request's last byte to its reply's first.",
        "What the daemon adds to a worker's latency.",
        ("verb",),
        buckets=RPC_BUCKETS_S,
    ),
    Declared(
        "tierkv_attend_batch_requests",
        Type.HISTOGRAM,
        "Requests for attention that were computed together.",
        "1: workers ask one after another. More: they share the daemon's cores well.",
        buckets=BATCH_BUCKETS,
    ),
    Declared(
        "tierkv_attend_wait_seconds",
        Type.HISTOGRAM,
        "Time from a request for attention to when it began to be computed.",
        "Long: the cores are busy with others' requests; compute some of them in the workers.",
        buckets=RPC_BUCKETS_S,
    ),
    Declared(
        "tierkv_connections",
        Type.GAUGE,
        "Open connections.",
        "Near connections_max new workers are refused.",
        read=_value(lambda counters, status: status.connections),
    ),
    Declared(
        "tierkv_leases",
        Type.GAUGE,
        "Leases: workers that hold something, connected or in their grace period.",
        "More leases than connections means that workers are gone.",
        read=_value(lambda counters, status: status.leases),
    ),
    Declared(
        "tierkv_fenced_blocks",
        Type.GAUGE,
        "Blocks kept from use: a worker whose lease is over, but who lives, may still write there.",
        "Not 0 for long: a worker hangs or is stopped. End it, and its blocks are free.",
        read=_value(lambda counters, status: status.fenced_blocks),
    ),
    Declared(
        "tierkv_sequences",
        Type.GAUGE,
        "Open sequences.",
        "Their blocks cannot be evicted from the device tier.",
        read=_value(lambda counters, status: status.sequences),
    ),
    Declared(
        "tierkv_event_loop_lag_seconds",
        Type.GAUGE,
        "How late the event loop last woke up.",
        "Above some milliseconds something blocks the loop, and every request waits for it.",
        read=_value(lambda counters, status: counters.event_loop_lag_s),
    ),
    Declared(
        "tierkv_loop_turn_seconds",
        Type.HISTOGRAM,
        "How long a turn of the event loop took: a hundred turns a second are measured.",
        "Above a millisecond something takes too much at once, and every request waits for it.",
        buckets=LOOP_BUCKETS_S,
    ),
    Declared(
        "tierkv_loop_delay_seconds",
        Type.HISTOGRAM,
        "How late a timer of the event loop fired: a hundred times a second. Timers may be 1 ms.",
        "What a request may wait before the loop looks at it, in turns that take long or alone.",
        buckets=LOOP_BUCKETS_S,
    ),
    Declared(
        "tierkv_gc_pause_seconds",
        Type.HISTOGRAM,
        "How long a run of Python's garbage collector took.",
        "Nothing else runs meanwhile. Blocks are no objects: it does not grow with their number.",
        buckets=LOOP_BUCKETS_S,
    ),
    Declared(
        "tierkv_state",
        Type.GAUGE,
        "1 for the state that the daemon is in, 0 for the others.",
        "Alert when it is not serving.",
        ("state",),
        _state,
    ),
    Declared(
        "tierkv_build_info",
        Type.GAUGE,
        "Always 1; the labels tell the versions.",
        "Which versions run where.",
        ("version", "python"),
        _build,
    ),
)

METRICS = (*_BRIEF, *_PREFIX, *_TIERS, *_WAL, *_RECOVERY, *_SERVICE)
"""All metrics, in the order of the documentation."""
