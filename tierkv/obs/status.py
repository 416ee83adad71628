"""The status document: what `tierkv status --json`, /status.json and the Stat verb show.

The daemon fills one ``StatusDocument``; the metrics are computed from the same one, so that the
two cannot contradict each other. Keys are stable: they may be added, never renamed.
"""

from __future__ import annotations

from typing import Any

import msgspec

STATES = ("starting", "recovering", "serving", "draining", "stopped")
"""States of the daemon, in order of a life. It is ready in "serving" only."""

SERVING = "serving"

TIERS = ("device", "host", "disk")


PROBLEMS_MAX = 32
"""Kinds of problems that the document remembers."""


class ProgressStatus(msgspec.Struct, kw_only=True):
    """The step that the daemon is at while it does not serve yet: ``done`` of ``total``.

    ``total`` is 0 where nobody knows how much there is. ``elapsed_s``: time in this step.
    """

    what: str = ""
    done: int = 0
    total: int = 0
    elapsed_s: float = 0.0


class TierStatus(msgspec.Struct, kw_only=True):
    """One tier. ``free_ratio``: share of the capacity that holds no block (0 to 1).

    ``evictable_blocks`` have a copy here that no sequence maps. ``state``: "ok", "off" (no
    capacity) or "failed". ``io``: how the disk tier reads and writes ("io_uring, direct"); empty
    for the others.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    free_ratio: float = 1.0
    evictable_blocks: int = 0
    state: str = "ok"
    io: str = ""


class MemoryStatus(msgspec.Struct, kw_only=True):
    """The memory behind one RAM tier.

    ``prefault``: "off", "running", "done" or "short of memory"; ``missing_bytes`` are still to be
    taken ahead of need. ``huge_bytes`` of ``memory_bytes`` are in huge pages as far as is known.
    ``numa``: where pages go, such as "interleave 0,1"; empty = wherever they are first written.
    """

    memory_bytes: int = 0
    prefault: str = "off"
    missing_bytes: int = 0
    huge_bytes: int = 0
    numa: str = ""


class HeldStatus(msgspec.Struct, kw_only=True):
    """What of something lies in one tier: blocks, and the bytes that their slots take."""

    blocks: int = 0
    bytes: int = 0


class NamespaceStatus(msgspec.Struct, kw_only=True):
    """One namespace: which model's blocks, whose, how large one is, and what lies where.

    ``model`` and ``tenant`` are empty if only the ``digest`` (hex) outlived the index. ``blocks``
    counts each once, ``tiers`` each copy; in a large store they are some seconds old. Tokens are
    those looked up and found since the start.
    """

    id: int
    model: str
    dtype: str
    block_tokens: int
    block_bytes: int
    tenant: str = ""
    digest: str = ""
    blocks: int = 0
    tiers: dict[str, HeldStatus] = {}
    lookup_tokens: int = 0
    hit_tokens: int = 0


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One connected worker. ``name`` is what it calls itself; ``pid`` is the kernel's word."""

    lease: int
    pid: int
    name: str = ""
    sequences: int = 0


class PrefixStatus(msgspec.Struct, kw_only=True):
    """Tokens looked up and found since the start; the ratio is over the latest tokens only.

    ``hit_tokens_by_tier``: the tokens found, by the fastest tier that had them.
    """

    lookup_tokens: int = 0
    hit_tokens: int = 0
    hit_ratio: float = 0.0
    hit_tokens_by_tier: dict[str, int] = {}


class TopPrefixStatus(msgspec.Struct, kw_only=True):
    """Prompts that begin alike, by the hash of the block that they have in common (hex).

    ``hits``: how often such a prefix was found since the start; ``hit_tokens`` may be too many by
    ``error_tokens``, for only the most frequent ones are counted.
    """

    hash: str
    namespace: int
    hits: int
    hit_tokens: int
    error_tokens: int = 0


class EvictionStatus(msgspec.Struct, kw_only=True):
    """Blocks that left a tier since the start: by where a copy was left, "none" or the tier.

    ``why`` is the ``reason`` in words.
    """

    from_tier: str
    to_tier: str
    reason: str
    blocks: int
    why: str = ""


class WalStatus(msgspec.Struct, kw_only=True):
    """The log: the last record, and the last ones that survive the daemon's and the machine's end.

    ``unsynced_bytes`` would not survive power loss; ``since_checkpoint_bytes`` would be replayed
    after a crash.
    """

    appended_lsn: int = 0
    written_lsn: int = 0
    durable_lsn: int = 0
    unsynced_bytes: int = 0
    since_checkpoint_bytes: int = 0
    bytes: int = 0
    segments: int = 0


class RecoveredTier(msgspec.Struct, kw_only=True):
    """Copies of blocks that a tier still had after a restart, and those it had lost."""

    kept: int = 0
    dropped: int = 0


class RecoveryStatus(msgspec.Struct, kw_only=True):
    """What the start found: records replayed, blocks kept, blocks that no tier had any more.

    ``truncated_bytes``: at the log's end, given up: pieces that a crash left, or damage.
    ``rebuilt``: why the index was lost and had to be made anew from the slots; empty if not.
    ``adopted_bytes``: memory of each RAM tier that outlived the last daemon; 0 = made anew.
    """

    duration_s: float = 0.0
    records: int = 0
    blocks: int = 0
    dropped_blocks: int = 0
    truncated_bytes: int = 0
    rebuilt: str = ""
    tiers: dict[str, RecoveredTier] = {}
    adopted_bytes: dict[str, int] = {}


class CheckpointStatus(msgspec.Struct, kw_only=True):
    """The last checkpoint: all up to ``lsn`` is in the index. ``age_s`` is -1 before the first."""

    lsn: int = 0
    age_s: float = -1.0


class ConfigStatus(msgspec.Struct, kw_only=True):
    """The last time that the configuration was read, at the start or since (Unix time).

    ``ok`` is False if that failed, for which ``error`` says why: then the one before is in force.
    ``needs_restart``: settings that were changed and do not hold yet.
    """

    ok: bool = True
    read_unix_s: float = 0.0
    error: str = ""
    needs_restart: list[str] = []


class RoomStatus(msgspec.Struct, kw_only=True):
    """The file system of one directory that the daemon writes to."""

    path: str
    free_bytes: int
    capacity_bytes: int


class ProblemStatus(msgspec.Struct, kw_only=True):
    """Something that the log warned of or called an error, and how often since the start.

    ``time_s`` (Unix time), ``message`` and ``fields`` (the ids in question) are the latest ones.
    """

    time_s: float
    level: str
    logger: str
    message: str
    fields: dict[str, str] = {}
    count: int = 1


class LoopStatus(msgspec.Struct, kw_only=True):
    """How long turns of the event loop took since the start, and the garbage collector's runs.

    Quantiles are upper bounds, as exact as the buckets of ``tierkv_loop_turn_seconds``.
    """

    turns: int = 0
    turn_p50_s: float = 0.0
    turn_p99_s: float = 0.0
    turn_p999_s: float = 0.0
    turn_max_s: float = 0.0
    delay_p999_s: float = 0.0
    delay_max_s: float = 0.0
    gc_runs: int = 0
    gc_max_s: float = 0.0


def _no_tiers() -> dict[str, TierStatus]:
    return {tier: TierStatus() for tier in TIERS}


class StatusDocument(msgspec.Struct, kw_only=True):
    """All that the daemon tells about itself at one moment.

    ``progress`` says how far the start is, until the daemon serves.
    ``evictions`` counts blocks by way, "device>host" or "disk>none", since the start;
    ``evicted`` tells the reasons, too.
    ``only_in_ram_blocks`` have no copy on disk, those that are being filled among them.
    ``native``: hot loops run in C; ``native_missing`` says why if they do not.
    ``pins`` are chains that operators keep. ``fenced_blocks`` are kept from use because a worker
    whose lease is over may still write there.
    ``in_flight``: requests that wait for their answer; ``behind_blocks``: sealed blocks that wait
    to be written behind. ``room``: by what the directory is for. ``problems``: the latest first.
    """

    version: str
    state: str
    progress: ProgressStatus = msgspec.field(default_factory=ProgressStatus)
    epoch: int = 0
    pid: int = 0
    uptime_s: float = 0.0
    durability: str = "kill"
    socket: str = ""
    native: bool = False
    native_missing: str = ""
    tiers: dict[str, TierStatus] = msgspec.field(default_factory=_no_tiers)
    memory: dict[str, MemoryStatus] = {}
    blocks: int = 0
    only_in_ram_blocks: int = 0
    sequences: int = 0
    leases: int = 0
    pins: int = 0
    fenced_blocks: int = 0
    connections: int = 0
    in_flight: int = 0
    behind_blocks: int = 0
    workers: list[WorkerStatus] = []
    namespaces: list[NamespaceStatus] = []
    prefix: PrefixStatus = msgspec.field(default_factory=PrefixStatus)
    top_prefixes: list[TopPrefixStatus] = []
    evictions: dict[str, int] = {}
    evicted: list[EvictionStatus] = []
    wal: WalStatus = msgspec.field(default_factory=WalStatus)
    recovery: RecoveryStatus = msgspec.field(default_factory=RecoveryStatus)
    checkpoint: CheckpointStatus = msgspec.field(default_factory=CheckpointStatus)
    loop: LoopStatus = msgspec.field(default_factory=LoopStatus)
    config: ConfigStatus = msgspec.field(default_factory=ConfigStatus)
    room: dict[str, RoomStatus] = {}
    problems: list[ProblemStatus] = []


def to_plain(document: StatusDocument) -> dict[str, Any]:
    """The document as dicts, lists and plain values, for JSON and for the socket."""
    plain: dict[str, Any] = msgspec.to_builtins(document)
    return plain


def from_plain(plain: dict[str, Any]) -> StatusDocument:
    """The document a daemon sent; keys of a newer daemon are ignored.

    Raises msgspec.ValidationError if a key has another type than here.
    """
    return msgspec.convert(plain, StatusDocument)
