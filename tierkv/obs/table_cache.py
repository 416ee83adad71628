"""Metrics of what is cached: lookups, tiers, moves between them, tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tierkv.core.counters import Counters
from tierkv.core.residency import SAMPLE
from tierkv.obs.declared import Declared, Read, Sample, Type, counted, decades, value
from tierkv.obs.status import StatusDocument
from tierkv.obs.tenants import Tenant, by_tenant


def _tier(field: str) -> Read:
    return lambda counters, status: [
        ((name,), getattr(tier, field)) for name, tier in status.tiers.items()
    ]


def _in_service(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    for name, tier in status.tiers.items():
        if tier.state != "off":
            yield (name,), float(tier.state == "ok")


def _tenant(read: Callable[[Tenant], int]) -> Read:
    return lambda counters, status: [
        ((label,), read(tenant)) for label, tenant in by_tenant(status.namespaces).items()
    ]


def _tenant_tiers(counters: Counters, status: StatusDocument) -> Iterable[Sample]:
    for label, tenant in by_tenant(status.namespaces).items():
        for tier, size_bytes in tenant.tier_bytes.items():
            yield (label, tier), size_bytes


def _memory(field: str) -> Read:
    return lambda counters, status: [
        ((name,), getattr(memory, field)) for name, memory in status.memory.items()
    ]


ALLOC_BUCKETS_S = (5e-6, *decades(-5, 0), 2.0, 5.0)
"""5 us (one block, nothing to evict) to 5 s (a long spill on a slow drive)."""

COPY_BUCKETS_S = decades(-5, 1)

AGE_BUCKETS_S = (
    0.1,
    0.5,
    1.0,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    21_600.0,
    86_400.0,
    604_800.0,
)
"""A tenth of a second (it is looked at that often) to a week."""

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
        read=value(lambda counters, status: counters.hit_window.ratio),
    ),
    Declared(
        "tierkv_eviction_count_total",
        Type.COUNTER,
        "Blocks that left a tier, by where they went (none = no copy is left below).",
        "A steady flow to none means that the last tier is too small for the work.",
        ("from_tier", "to_tier", "reason"),
        counted(lambda counters: counters.evictions),
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
        read=value(lambda counters, status: counters.lookup_tokens),
    ),
    Declared(
        "tierkv_prefix_hit_tokens_total",
        Type.COUNTER,
        "Prompt tokens found, by the fastest tier that had them.",
        "Which tier earns its memory.",
        ("tier",),
        counted(lambda counters: counters.hit_tokens),
    ),
    Declared(
        "tierkv_prefix_mismatches_total",
        Type.COUNTER,
        "Blocks found by their hash and not used: their tokens or the block before were others.",
        "Two prompts under one hash, by chance or on purpose; it should stay 0.",
        read=value(lambda counters, status: counters.mismatched_blocks),
    ),
    Declared(
        "tierkv_deduplicated_blocks_total",
        Type.COUNTER,
        "Sealed blocks given up for an equal one that was there already.",
        "Workers that compute the same prefix at the same time; what that costs.",
        read=value(lambda counters, status: counters.deduplicated_blocks),
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
        counted(lambda counters: counters.transfer_bytes),
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
        "tierkv_promotion_count_total",
        Type.COUNTER,
        "Blocks that came up into the device tier, by the tier that they came from.",
        "What lower tiers saved from being computed again, and the device tier was too small for.",
        ("from_tier",),
        counted(lambda counters: counters.promotions),
    ),
    Declared(
        "tierkv_tier_in_service",
        Type.GAUGE,
        "1 if the tier takes copies now, 0 if it failed and is tried again now and then.",
        "While the disk tier is out of service, new blocks die with the RAM. Reads go on.",
        ("tier",),
        _in_service,
    ),
    Declared(
        "tierkv_tier_trips_total",
        Type.COUNTER,
        "How often a tier went out of service after an error.",
        "A drive that fails now and then, or fills up: the log says which.",
        ("tier",),
        counted(lambda counters: counters.breaker_trips),
    ),
    Declared(
        "tierkv_pins",
        Type.GAUGE,
        "Chains of blocks that operators keep in the cache.",
        "What is pinned makes no room for anybody else.",
        read=value(lambda counters, status: status.pins),
    ),
    Declared(
        "tierkv_only_in_ram_blocks",
        Type.GAUGE,
        "Blocks without a copy on disk, those that are being filled among them.",
        "What the end of the machine would cost.",
        read=value(lambda counters, status: status.only_in_ram_blocks),
    ),
    Declared(
        "tierkv_behind_blocks",
        Type.GAUGE,
        "Sealed blocks that wait to be written to the disk tier.",
        "Not 0 for long: the drive is slower than what is sealed. They die with the RAM.",
        read=value(lambda counters, status: status.behind_blocks),
    ),
    Declared(
        "tierkv_checksum_failures_total",
        Type.COUNTER,
        "Copies that did not match their checksum and were dropped.",
        "Any growth outside a restart means failing memory or a failing drive.",
        ("tier",),
        counted(lambda counters: counters.checksum_failures),
    ),
    Declared(
        "tierkv_disk_read_errors_total",
        Type.COUNTER,
        "Reads of the disk tier that the operating system refused.",
        "A failing drive or a lost mount; damage that can be read counts as a checksum failure.",
        read=value(lambda counters, status: counters.disk_read_errors),
    ),
    Declared(
        "tierkv_optional_copies_dropped_total",
        Type.COUNTER,
        "Copies to a lower tier that were skipped because its queue was full.",
        "The drive cannot keep up with what is sealed; those blocks die with the RAM.",
        read=value(lambda counters, status: counters.optional_copies_dropped),
    ),
)

_TENANTS = (
    Declared(
        "tierkv_tenant_blocks",
        Type.GAUGE,
        "Blocks of a tenant's namespaces, each counted once.",
        "Who has the cache.",
        ("tenant",),
        _tenant(lambda tenant: tenant.blocks),
    ),
    Declared(
        "tierkv_tenant_tier_bytes",
        Type.GAUGE,
        "Bytes that a tenant's blocks take in a tier.",
        "Who has which tier.",
        ("tenant", "tier"),
        _tenant_tiers,
    ),
    Declared(
        "tierkv_tenant_lookup_tokens_total",
        Type.COUNTER,
        "Prompt tokens that a tenant's workers looked up.",
        "Who asks most.",
        ("tenant",),
        _tenant(lambda tenant: tenant.lookup_tokens),
    ),
    Declared(
        "tierkv_tenant_hit_tokens_total",
        Type.COUNTER,
        "Prompt tokens that a tenant's workers found.",
        "For whom the cache pays.",
        ("tenant",),
        _tenant(lambda tenant: tenant.hit_tokens),
    ),
)

_SAMPLED = f"One block of {SAMPLE} is watched, by its id."

_RESIDENCY = (
    Declared(
        "tierkv_block_lifetime_seconds",
        Type.HISTOGRAM,
        f"Age of blocks that had to leave the last tier that had them. {_SAMPLED}",
        "How far back the cache remembers. Prompts that come back later find nothing.",
        buckets=AGE_BUCKETS_S,
    ),
    Declared(
        "tierkv_block_idle_before_evict_seconds",
        Type.HISTOGRAM,
        f"How long blocks that had to leave a tier had been unused. {_SAMPLED}",
        "Compare it with the reuse gap: a tier that is left sooner than blocks come back is small.",
        ("tier",),
        buckets=AGE_BUCKETS_S,
    ),
    Declared(
        "tierkv_block_reuse_gap_seconds",
        Type.HISTOGRAM,
        f"How long blocks that a request found had been unused. {_SAMPLED}",
        "How long the cache must remember to pay; blocks that came too late are not in here.",
        buckets=AGE_BUCKETS_S,
    ),
)

CACHE = (*_BRIEF, *_PREFIX, *_TIERS, *_TENANTS, *_RESIDENCY)
