"""The status document as a person reads it: one section for each question they come with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tierkv.cli.render import Row, clipped
from tierkv.obs.status import NamespaceStatus, StatusDocument, TierStatus
from tierkv.units import about_bytes, about_duration, format_ratio

NAMESPACES_SHOWN = 10
PROBLEMS_SHOWN = 5
PREFIXES_SHOWN = 5

SURVIVES = {
    "none": "what the log has not yet written is lost when the daemon dies",
    "kill": "all that was acknowledged survives the daemon's death",
    "power": "all that was acknowledged survives the daemon's death, sealed blocks power loss too",
}
"""What each wal.durability promises."""


@dataclass(frozen=True)
class Section:
    """A question and its answer: a table, or ``instead`` where there is nothing to list.

    ``numbers``: the columns to align to the right.
    """

    title: str
    headers: Row
    rows: list[Row]
    numbers: Row = ()
    instead: str = ""


def headline(document: StatusDocument, verb: str = "is") -> str:
    """One line: which daemon, in which state, for how long."""
    return (
        f"tierkv {document.version} {verb} {document.state}, up {about_duration(document.uptime_s)}"
        f" (pid {document.pid}, epoch {document.epoch})"
    )


def sections(document: StatusDocument) -> list[Section]:
    """All that there is to say; a daemon that has not served yet holds nothing to speak of."""
    if document.state in ("starting", "recovering"):
        return [_problems(document)]
    found = [_tiers(document), _evictions(document), _users(document)]
    if document.workers:
        found.append(_workers(document))
    if document.top_prefixes:
        found.append(_prefixes(document))
    return [*found, _safety(document), _problems(document), _rest(document)]


def progress_line(document: StatusDocument) -> str:
    """How far the start is: "replaying the log, 1,000 of 4,000 (25%), about 3.00 s left"."""
    progress = document.progress
    if not progress.total:
        return f"{progress.what or 'beginning'}, {about_duration(progress.elapsed_s)}"
    done = min(progress.done, progress.total)
    share = done / progress.total
    line = f"{progress.what}, {done:,} of {progress.total:,} ({int(share * 100)}%)"
    if 0 < share < 1:
        line += f", about {about_duration(progress.elapsed_s * (1 - share) / share)} left"
    return line


def _tiers(document: StatusDocument) -> Section:
    return Section(
        "How full is each tier?",
        ("tier", "capacity", "used", "free", "blocks", "evictable", "state"),
        [
            (
                name,
                about_bytes(tier.capacity_bytes),
                about_bytes(tier.used_bytes),
                format_ratio(tier.free_ratio),
                f"{tier.blocks:,}",
                f"{tier.evictable_blocks:,}",
                "out of service" if tier.state == "failed" else tier.state,
            )
            for name, tier in document.tiers.items()
        ],
        ("capacity", "used", "free", "blocks", "evictable"),
    )


def _evictions(document: StatusDocument) -> Section:
    return Section(
        "Why were blocks evicted?",
        ("from", "a copy is left in", "blocks", "reason"),
        [
            (
                one.from_tier,
                one.to_tier,
                f"{one.blocks:,}",
                f"{one.reason}: {one.why}" if one.why else one.reason,
            )
            for one in sorted(document.evicted, key=lambda one: -one.blocks)
        ],
        ("blocks",),
        "None had to go since the start.",
    )


def _users(document: StatusDocument) -> Section:
    largest = sorted(document.namespaces, key=_held_bytes, reverse=True)
    rows: list[Row] = [
        (
            str(one.id),
            one.tenant or "-",
            clipped(one.model) or f"({one.digest[:12] or 'unknown'})",
            one.dtype or "-",
            about_bytes(one.block_bytes),
            f"{one.blocks:,}",
            *(_held(one, tier) for tier in document.tiers),
            format_ratio(one.hit_tokens / one.lookup_tokens) if one.lookup_tokens else "-",
        )
        for one in largest[:NAMESPACES_SHOWN]
    ]
    return Section(
        "Who uses most?",
        ("namespace", "tenant", "model", "dtype", "block", "blocks", *document.tiers, "hits"),
        rows,
        ("namespace", "block", "blocks", *document.tiers, "hits"),
        "Nobody has used it yet.",
    )


def _held_bytes(one: NamespaceStatus) -> int:
    return sum(tier.bytes for tier in one.tiers.values())


def _held(one: NamespaceStatus, tier: str) -> str:
    held = one.tiers.get(tier)
    return about_bytes(held.bytes) if held is not None and held.blocks else "-"


def _prefixes(document: StatusDocument) -> Section:
    names = {one.id: one.tenant or clipped(one.model) for one in document.namespaces}
    return Section(
        "Which prefixes are found most?",
        ("first block", "of", "hits", "tokens"),
        [
            (
                one.hash,
                names.get(one.namespace) or f"namespace {one.namespace}",
                f"{one.hits:,}",
                ("about " if one.error_tokens else "") + f"{one.hit_tokens:,}",
            )
            for one in document.top_prefixes[:PREFIXES_SHOWN]
        ],
        ("hits", "tokens"),
    )


def _workers(document: StatusDocument) -> Section:
    return Section(
        "Who is connected?",
        ("lease", "pid", "worker", "sequences"),
        [
            (str(worker.lease), str(worker.pid), worker.name or "-", f"{worker.sequences:,}")
            for worker in document.workers
        ],
        ("lease", "pid", "sequences"),
    )


def _safety(document: StatusDocument) -> Section:
    wal, checkpoint, recovery = document.wal, document.checkpoint, document.recovery
    unwritten, unsynced = (
        wal.appended_lsn - wal.written_lsn,
        wal.appended_lsn - wal.durable_lsn,
    )
    recovered = (
        f"{recovery.blocks:,} blocks kept, {recovery.dropped_blocks:,} lost, "
        f"{recovery.records:,} records in {about_duration(recovery.duration_s)}"
    )
    if recovery.rebuilt:
        recovered += ", the index was lost and made anew"
    checkpointed = (
        f"{about_duration(checkpoint.age_s)} ago, {about_bytes(wal.since_checkpoint_bytes)} of log "
        "since"
    )
    rows: list[Row] = [
        ("durability", f"{document.durability}: {SURVIVES.get(document.durability, '')}"),
        ("log lag", _all_but(unwritten, "written") + "; " + _all_but(unsynced, "on the drive")),
        ("checkpoint", checkpointed if checkpoint.age_s >= 0 else "none yet"),
        ("disk copies", _disk_copies(document)),
        ("log", f"{about_bytes(wal.bytes)} written, {wal.segments} segments"),
        ("recovery", recovered),
    ]
    rows += [
        ("room", f"{about_bytes(room.free_bytes)} free for {use} in {room.path}")
        for use, room in document.room.items()
    ]
    return Section("Is the data safe?", ("what", "now"), rows)


def _all_but(records: int, where: str) -> str:
    return f"all but {records:,} records {where}" if records else f"all {where}"


def _disk_copies(document: StatusDocument) -> str:
    disk = document.tiers.get("disk", TierStatus(state="off"))
    if disk.state == "off":
        return "no disk tier: blocks live in RAM only"
    if not document.only_in_ram_blocks:
        return "every block has one"
    missing = f"{document.only_in_ram_blocks:,} blocks have none"
    if document.behind_blocks:
        missing += f", {document.behind_blocks:,} of them wait to be written"
    return missing


def _problems(document: StatusDocument) -> Section:
    now_s = time.time()
    return Section(
        "What went wrong last?",
        ("ago", "level", "times", "what"),
        [
            (
                about_duration(max(0.0, now_s - one.time_s)),
                one.level,
                f"{one.count:,}",
                " ".join((one.message, *_fields(one.fields))),
            )
            for one in document.problems[:PROBLEMS_SHOWN]
        ],
        ("times",),
        "Nothing since the start.",
    )


def _fields(fields: Mapping[str, str]) -> Iterable[str]:
    return (f"{name}={value}" for name, value in fields.items())


def _rest(document: StatusDocument) -> Section:
    prefix = document.prefix
    by_tier = ", ".join(f"{tier} {n:,}" for tier, n in prefix.hit_tokens_by_tier.items() if n)
    workers = (
        f"{len(document.workers):,} connected, {document.leases:,} leases, "
        f"{document.sequences:,} sequences"
    )
    if document.in_flight > 1:  # the question itself is one
        workers += f", {document.in_flight - 1:,} requests wait"
    if document.fenced_blocks:
        workers += f", {document.fenced_blocks:,} blocks kept from use by a worker that hangs"
    disk = document.tiers.get("disk")
    adopted = ", ".join(
        f"{tier} {about_bytes(size)}"
        for tier, size in document.recovery.adopted_bytes.items()
        if size
    )
    loop = (
        f"99.9% of turns within {about_duration(document.loop.turn_p999_s)}, "
        f"the longest {about_duration(document.loop.turn_max_s)}"
    )
    return Section(
        "Does it pay, and does it run well?",
        ("what", "now"),
        [
            ("prefix hits", f"{format_ratio(prefix.hit_ratio)} of the latest tokens"),
            ("since start", f"{prefix.hit_tokens:,} of {prefix.lookup_tokens:,} tokens"),
            ("found in", by_tier or "none yet"),
            ("blocks", f"{document.blocks:,}, {document.pins:,} pinned chains"),
            ("workers", workers),
            ("disk reads", (disk.io if disk is not None else "") or "no disk tier"),
            ("event loop", loop),
            ("configuration", _configuration(document)),
            ("memory", _memory(document) or "none"),
            ("memory kept", adopted or "none"),
            ("native", "yes" if document.native else f"no: {document.native_missing}"),
        ],
    )


def _configuration(document: StatusDocument) -> str:
    config = document.config
    if not config.ok:
        return f"could not be read anew, the one before holds: {config.error}"
    if config.needs_restart:
        return f"changed, but a restart is needed for {', '.join(config.needs_restart)}"
    return "as it was read last"


def _memory(document: StatusDocument) -> str:
    return ", ".join(
        f"{tier} {about_bytes(one.memory_bytes)}"
        + (f" ({about_bytes(one.huge_bytes)} in huge pages)" if one.huge_bytes else "")
        + (f", {about_bytes(one.missing_bytes)} to be taken" if one.missing_bytes else "")
        + (f", {one.numa}" if one.numa else "")
        for tier, one in document.memory.items()
    )
