"""Metrics of the service: the log, recovery, requests, the daemon itself."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from tierkv.core.counters import Counters
from tierkv.obs.declared import Declared, Read, Sample, Type, counted, decades, value
from tierkv.obs.status import STATES, StatusDocument


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


def _room(field: str) -> Read:
    return lambda counters, status: [
        ((directory,), getattr(room, field)) for directory, room in status.room.items()
    ]


def _checkpoint_timestamp(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    if counters.checkpoint_timestamp_s:
        yield (), counters.checkpoint_timestamp_s


def _build(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    yield (status.version, platform.python_version()), 1.0


LOOP_BUCKETS_S = decades(-5, 0)
RPC_BUCKETS_S = decades(-5, 1)

FSYNC_BUCKETS_S = (*decades(-4, 0), 2.0, 5.0)
"""0.1 ms (a drive with power-loss protection) to 5 s (one that is dying)."""

CHECKPOINT_BUCKETS_S = decades(-3, 2)

RECORD_BUCKETS = tuple(float(1 << power) for power in range(0, 15, 2))
"""1 (a suspend) to 16384 (a very long prompt, or many requests of one turn)."""

BATCH_BUCKETS = tuple(float(1 << power) for power in range(9))
"""1 (nobody else asked) to 256 (as many connections as there may be by default)."""

_WAL = (
    Declared(
        "tierkv_wal_bytes_total",
        Type.COUNTER,
        "Bytes written to the log.",
        "The log's share of the drive's load.",
        read=value(lambda counters, status: counters.wal_bytes),
    ),
    Declared(
        "tierkv_wal_frames_total",
        Type.COUNTER,
        "Frames (groups of records committed together) written to the log.",
        "Bytes per frame show how well commits are grouped.",
        read=value(lambda counters, status: counters.wal_frames),
    ),
    Declared(
        "tierkv_wal_append_duration_seconds",
        Type.HISTOGRAM,
        "Time of one write of the log to the kernel.",
        "On the way of every request that changes something. Long: the kernel is short of memory.",
        buckets=LOOP_BUCKETS_S,
    ),
    Declared(
        "tierkv_wal_batch_records",
        Type.HISTOGRAM,
        "Records in one write of the log.",
        "How well requests share a write: more of them at a time, the cheaper each is.",
        buckets=RECORD_BUCKETS,
    ),
    Declared(
        "tierkv_wal_fsync_duration_seconds",
        Type.HISTOGRAM,
        "Time of one sync of the log to the drive.",
        'With durability = "power" every seal waits for one.',
        buckets=FSYNC_BUCKETS_S,
    ),
    Declared(
        "tierkv_wal_unsynced_bytes",
        Type.GAUGE,
        "Log that was appended and would not survive power loss yet.",
        'What a power failure costs now. With durability = "kill" checkpoints bring it down.',
        read=value(lambda counters, status: status.wal.unsynced_bytes),
    ),
    Declared(
        "tierkv_wal_since_checkpoint_bytes",
        Type.GAUGE,
        "Log written since the last checkpoint.",
        "What a recovery would have to read.",
        read=value(lambda counters, status: status.wal.since_checkpoint_bytes),
    ),
    Declared(
        "tierkv_wal_segments",
        Type.GAUGE,
        "Segment files of the log.",
        "Grows without end if checkpoints fail.",
        read=value(lambda counters, status: status.wal.segments),
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
        read=value(lambda counters, status: status.recovery.duration_s),
    ),
    Declared(
        "tierkv_recovery_records",
        Type.GAUGE,
        "Records replayed from the log at this daemon's start.",
        "Explains the recovery's duration.",
        read=value(lambda counters, status: status.recovery.records),
    ),
    Declared(
        "tierkv_recovery_truncated_bytes",
        Type.GAUGE,
        "Bytes at the log's end that this daemon's start gave up.",
        "Pieces of a write that a crash tore are normal; more is damage, and lies in quarantine.",
        read=value(lambda counters, status: status.recovery.truncated_bytes),
    ),
    Declared(
        "tierkv_recovery_index_rebuilt",
        Type.GAUGE,
        "1 if this daemon's start found the index lost and made it anew from the slots, else 0.",
        "Look for the cause: the log line, and the store's quarantine.",
        read=value(lambda counters, status: bool(status.recovery.rebuilt)),
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
        counted(lambda counters: counters.rpc_requests),
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
        "tierkv_rpc_in_flight",
        Type.GAUGE,
        "Requests that were taken and wait for their answer.",
        "Grows when bytes must move first, or the log must be synced: the queue of the daemon.",
        read=value(lambda counters, status: status.in_flight),
    ),
    Declared(
        "tierkv_connections",
        Type.GAUGE,
        "Open connections.",
        "Near connections_max new workers are refused.",
        read=value(lambda counters, status: status.connections),
    ),
    Declared(
        "tierkv_leases",
        Type.GAUGE,
        "Leases: workers that hold something, connected or in their grace period.",
        "More leases than connections means that workers are gone.",
        read=value(lambda counters, status: status.leases),
    ),
    Declared(
        "tierkv_fenced_blocks",
        Type.GAUGE,
        "Blocks kept from use: a worker whose lease is over, but who lives, may still write there.",
        "Not 0 for long: a worker hangs or is stopped. End it, and its blocks are free.",
        read=value(lambda counters, status: status.fenced_blocks),
    ),
    Declared(
        "tierkv_sequences",
        Type.GAUGE,
        "Open sequences.",
        "Their blocks cannot be evicted from the device tier.",
        read=value(lambda counters, status: status.sequences),
    ),
    Declared(
        "tierkv_event_loop_lag_seconds",
        Type.GAUGE,
        "How late the event loop last woke up.",
        "Above some milliseconds something blocks the loop, and every request waits for it.",
        read=value(lambda counters, status: counters.event_loop_lag_s),
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
        "tierkv_room_free_bytes",
        Type.GAUGE,
        "Room on the file system of the state directory (state) and of the disk tier (disk).",
        "Without room the disk tier stops, then checkpoints fail, and the log grows until it dies.",
        ("directory",),
        _room("free_bytes"),
    ),
    Declared(
        "tierkv_room_capacity_bytes",
        Type.GAUGE,
        "Size of that file system.",
        "Base of the share that is free.",
        ("directory",),
        _room("capacity_bytes"),
    ),
    Declared(
        "tierkv_config_reload_success",
        Type.GAUGE,
        "1 if the configuration that was read last is in force, 0 if it was refused.",
        "After a refused reload the daemon runs on what it had: see its log, then reload again.",
        read=value(lambda counters, status: status.config.ok),
    ),
    Declared(
        "tierkv_config_reload_timestamp_seconds",
        Type.GAUGE,
        "When the configuration was read last, at the start or by a reload (Unix time).",
        "Whether a change in the file has reached the daemon.",
        read=value(lambda counters, status: status.config.read_unix_s),
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

SERVICE = (*_WAL, *_RECOVERY, *_SERVICE)
