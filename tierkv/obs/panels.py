"""What the dashboard shows: one row per question, and the panels that answer it.

In the order in which somebody asks who sees tierkv for the first time.
"""

from __future__ import annotations

from typing import NamedTuple


class Query(NamedTuple):
    """PromQL, and how its series are called."""

    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """One picture. ``kind`` and ``unit`` are Grafana's; ``stacked``: series add up to something."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False
    columns: int = 8


class Row(NamedTuple):
    """A question and the panels that answer it."""

    question: str
    panels: tuple[Panel, ...]


_CHOSEN = ('job=~"$job"', 'instance=~"$instance"')


def of(metric: str, *conditions: str) -> str:
    """The metric's series of the daemons chosen in the dashboard."""
    return f"{metric}{{{', '.join((*_CHOSEN, *conditions))}}}"


def rate(metric: str, *conditions: str) -> str:
    """Its growth per second."""
    return f"rate({of(metric, *conditions)}[$__rate_interval])"


def by(labels: str, expression: str) -> str:
    """The sum over everything but these labels."""
    return f"sum by ({labels}) ({expression})"


def quantile(share: float, histogram: str, labels: str = "") -> str:
    """That share of what a histogram saw was not above the result."""
    kept = f"le, {labels}" if labels else "le"
    return f"histogram_quantile({share}, {by(kept, rate(f'{histogram}_bucket'))})"


def _quantiles(histogram: str, labels: str = "") -> tuple[Query, ...]:
    named = " ".join(f"{{{{{label.strip()}}}}}" for label in labels.split(",") if label)
    return tuple(
        Query(quantile(share, histogram, labels), f"{named} {name}".strip())
        for share, name in ((0.5, "half within"), (0.99, "99% within"))
    )


_UP = Row(
    "Is it up?",
    (
        Panel(
            "State",
            "1 for the state that the daemon is in.",
            "short",
            (Query(f"{of('tierkv_state')} == 1", "{{instance}} {{state}}"),),
            kind="stat",
            columns=4,
        ),
        Panel(
            "Up since",
            "A short time means that it was restarted.",
            "s",
            (
                Query(
                    f"time() - {of('process_start_time_seconds')} "
                    "and on (job, instance) tierkv_build_info",
                    "{{instance}}",
                ),
            ),
            kind="stat",
            columns=4,
        ),
        Panel(
            "Version",
            "Which versions run where.",
            "short",
            (Query(of("tierkv_build_info"), "{{instance}} {{version}}, Python {{python}}"),),
            kind="stat",
            columns=4,
        ),
        Panel(
            "Configuration",
            "1: the configuration that was read last is in force. And when that was.",
            "short",
            (Query(of("tierkv_config_reload_success"), "{{instance}} in force"),),
            kind="stat",
            columns=4,
        ),
        Panel(
            "Configuration read",
            "How long ago the configuration was read last.",
            "s",
            (
                Query(
                    f"time() - {of('tierkv_config_reload_timestamp_seconds')}",
                    "{{instance}}",
                ),
            ),
            kind="stat",
            columns=4,
        ),
        Panel(
            "Tiers in service",
            "0: a write failed, and the tier is tried again now and then.",
            "short",
            (Query(of("tierkv_tier_in_service"), "{{instance}} {{tier}}"),),
            kind="stat",
            columns=4,
        ),
        Panel(
            "Requests",
            "Requests answered per second.",
            "reqps",
            (Query(by("verb", rate("tierkv_rpc_requests_total")), "{{verb}}"),),
            stacked=True,
        ),
        Panel(
            "Refused requests",
            "By error code. pool_exhausted: the device tier is full of blocks in use.",
            "reqps",
            (Query(by("code", rate("tierkv_rpc_requests_total", 'code!="ok"')), "{{code}}"),),
        ),
        Panel(
            "Workers",
            "More leases than connections: workers are gone, and may come back.",
            "short",
            (
                Query(by("", of("tierkv_connections")), "connections"),
                Query(by("", of("tierkv_leases")), "leases"),
                Query(by("", of("tierkv_sequences")), "sequences"),
                Query(by("", of("tierkv_rpc_in_flight")), "requests in flight"),
                Query(by("", of("tierkv_fenced_blocks")), "fenced blocks"),
            ),
        ),
    ),
)

_PAYS = Row(
    "Does it pay?",
    (
        Panel(
            "Hit ratio",
            "Share of prompt tokens that need not be computed again.",
            "percentunit",
            (
                Query(
                    f"{by('', rate('tierkv_prefix_hit_tokens_total'))} / "
                    f"{by('', rate('tierkv_prefix_lookup_tokens_total'))}",
                    "now",
                ),
                Query(f"avg({of('tierkv_prefix_hit_ratio')})", "latest million tokens"),
            ),
        ),
        Panel(
            "Tokens found",
            "By the fastest tier that had them, per second. Each is a token less to compute.",
            "short",
            (Query(by("tier", rate("tierkv_prefix_hit_tokens_total")), "{{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens found since the daemons' start",
            "The work that was not done twice.",
            "short",
            (Query(by("tier", of("tierkv_prefix_hit_tokens_total")), "{{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Time between uses of a block",
            "How long the cache must remember. Sampled.",
            "s",
            _quantiles("tierkv_block_reuse_gap_seconds"),
        ),
        Panel(
            "Computed twice",
            "Sealed blocks per second for which there was an equal one already.",
            "short",
            (Query(by("", rate("tierkv_deduplicated_blocks_total")), "blocks"),),
        ),
        Panel(
            "Hash collisions",
            "Blocks found by their hash that had other tokens. It should stay 0.",
            "short",
            (Query(by("", of("tierkv_prefix_mismatches_total")), "blocks"),),
        ),
    ),
)

_FULL = Row(
    "How full is it?",
    (
        Panel(
            "Share of each tier that is used",
            "A full tier is normal.",
            "percentunit",
            (Query(f"1 - {of('tierkv_free_block_ratio')}", "{{instance}} {{tier}}"),),
        ),
        Panel(
            "Bytes in each tier",
            "What holds blocks, and the budget.",
            "bytes",
            (
                Query(by("tier", of("tierkv_tier_bytes")), "{{tier}}"),
                Query(by("tier", of("tierkv_tier_capacity_bytes")), "{{tier}} budget"),
            ),
        ),
        Panel(
            "Blocks in each tier",
            "A block may have copies in several tiers.",
            "short",
            (
                Query(by("tier", of("tierkv_blocks")), "{{tier}}"),
                Query(by("", of("tierkv_pins")), "chains that are pinned"),
            ),
        ),
        Panel(
            "Memory of the RAM tiers",
            "Taken, in huge pages, and still to be taken ahead of need.",
            "bytes",
            (
                Query(by("tier", of("tierkv_arena_memory_bytes")), "{{tier}}"),
                Query(by("tier", of("tierkv_arena_huge_bytes")), "{{tier}} in huge pages"),
                Query(by("tier", of("tierkv_arena_prefault_missing_bytes")), "{{tier}} to take"),
            ),
        ),
        Panel(
            "Room on the file systems",
            "Share that is free where the daemon writes.",
            "percentunit",
            (
                Query(
                    f"{of('tierkv_room_free_bytes')} / {of('tierkv_room_capacity_bytes')}",
                    "{{instance}} {{directory}}",
                ),
            ),
        ),
    ),
)

_EVICTED = Row(
    "Why were blocks evicted?",
    (
        Panel(
            "What their room was needed for",
            "METRICS.md says what each reason means.",
            "short",
            (
                Query(
                    by("from_tier, reason", rate("tierkv_eviction_count_total")),
                    "{{from_tier}}: {{reason}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Where they went",
            "none: no copy is left. A steady flow there means that the last tier is too small.",
            "short",
            (
                Query(
                    by("from_tier, to_tier", rate("tierkv_eviction_count_total")),
                    "{{from_tier}} to {{to_tier}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Blocks that came back up",
            "By the tier that they came from.",
            "short",
            (Query(by("from_tier", rate("tierkv_promotion_count_total")), "{{from_tier}}"),),
        ),
        Panel(
            "Unused before they were evicted",
            "Shorter than the time between uses: the tier is too small. Sampled.",
            "s",
            _quantiles("tierkv_block_idle_before_evict_seconds", "tier"),
        ),
        Panel(
            "Age when the last copy went",
            "How far back the cache remembers. Sampled.",
            "s",
            _quantiles("tierkv_block_lifetime_seconds"),
        ),
    ),
)

_WHO = Row(
    "Who uses it?",
    (
        Panel(
            "Tokens looked up by tenant",
            "Per second.",
            "short",
            (Query(by("tenant", rate("tierkv_tenant_lookup_tokens_total")), "{{tenant}}"),),
            stacked=True,
        ),
        Panel(
            "Hit ratio by tenant",
            "For whom the cache pays.",
            "percentunit",
            (
                Query(
                    f"{by('tenant', rate('tierkv_tenant_hit_tokens_total'))} / "
                    f"{by('tenant', rate('tierkv_tenant_lookup_tokens_total'))}",
                    "{{tenant}}",
                ),
            ),
        ),
        Panel(
            "Bytes by tenant and tier",
            "Who has the cache.",
            "bytes",
            (Query(by("tenant, tier", of("tierkv_tenant_tier_bytes")), "{{tenant}} in {{tier}}"),),
            stacked=True,
        ),
        Panel(
            "Blocks by tenant",
            "Each counted once, wherever its copies are.",
            "short",
            (Query(by("tenant", of("tierkv_tenant_blocks")), "{{tenant}}"),),
            stacked=True,
        ),
    ),
)

_SAFE = Row(
    "Is the data safe?",
    (
        Panel(
            "Not on disk yet",
            "Blocks that would end with the machine, and copies per second that were skipped.",
            "short",
            (
                Query(by("", of("tierkv_only_in_ram_blocks")), "blocks that are only in RAM"),
                Query(by("", of("tierkv_behind_blocks")), "of these, sealed and waiting"),
                Query(
                    by("", rate("tierkv_optional_copies_dropped_total")),
                    "copies skipped per second",
                ),
            ),
        ),
        Panel(
            "Log that power loss would take",
            "What was appended and is not synced; and what a recovery would have to read.",
            "bytes",
            (
                Query(of("tierkv_wal_unsynced_bytes"), "{{instance}}"),
                Query(of("tierkv_wal_since_checkpoint_bytes"), "{{instance}} since the checkpoint"),
            ),
        ),
        Panel(
            "Age of the last checkpoint",
            "Grows without end if checkpoints fail, or if there is nothing new.",
            "s",
            (
                Query(
                    f"time() - {of('tierkv_checkpoint_timestamp_seconds')}",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Damage",
            "Since the daemons' start: copies that did not match their checksum, reads that the "
            "operating system refused, times a tier went out of service.",
            "short",
            (
                Query(by("tier", of("tierkv_checksum_failures_total")), "{{tier}} checksums"),
                Query(by("", of("tierkv_disk_read_errors_total")), "disk read errors"),
                Query(by("tier", of("tierkv_tier_trips_total")), "{{tier}} out of service"),
            ),
        ),
        Panel(
            "Log",
            "Bytes written per second.",
            "Bps",
            (Query(by("", rate("tierkv_wal_bytes_total")), "written"),),
        ),
        Panel(
            "Log segments",
            "Removed by checkpoints.",
            "short",
            (Query(of("tierkv_wal_segments"), "{{instance}}"),),
        ),
        Panel(
            "The last start: how long",
            "From the start of the process to serving.",
            "s",
            (Query(of("tierkv_recovery_duration_seconds"), "{{instance}}"),),
            kind="stat",
            columns=4,
        ),
        Panel(
            "The last start: what came back",
            "Copies of blocks that were found again, and those that were lost.",
            "short",
            (Query(of("tierkv_recovery_blocks"), "{{instance}} {{tier}} {{result}}"),),
            kind="stat",
            columns=10,
        ),
        Panel(
            "The last start: from the log",
            "Records replayed, bytes at its end given up, and whether the index was made anew.",
            "short",
            (
                Query(of("tierkv_recovery_records"), "{{instance}} records"),
                Query(of("tierkv_recovery_truncated_bytes"), "{{instance}} bytes given up"),
                Query(of("tierkv_recovery_index_rebuilt"), "{{instance}} index made anew"),
            ),
            kind="stat",
            columns=6,
        ),
        Panel(
            "The last start: memory kept",
            "0: the RAM tier was made anew.",
            "bytes",
            (Query(of("tierkv_arena_adopted_bytes"), "{{instance}} {{tier}}"),),
            kind="stat",
            columns=4,
        ),
    ),
)

_LATENCY = Row(
    "How fast is it?",
    (
        Panel(
            "Requests",
            "From a request's last byte to its reply's first.",
            "s",
            _quantiles("tierkv_rpc_duration_seconds", "verb"),
        ),
        Panel(
            "Room for new blocks",
            "The stall a worker feels before it may compute.",
            "s",
            _quantiles("tierkv_block_alloc_duration_seconds", "outcome"),
        ),
        Panel(
            "Moves between tiers",
            "One batch of copies.",
            "s",
            _quantiles("tierkv_transfer_duration_seconds", "from_tier, to_tier"),
        ),
        Panel(
            "Bytes between tiers",
            "Writes to disk wear it.",
            "Bps",
            (
                Query(
                    by("from_tier, to_tier", rate("tierkv_transfer_bytes_total")),
                    "{{from_tier}} to {{to_tier}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Syncs of the log",
            "With durability power every seal waits for one.",
            "s",
            _quantiles("tierkv_wal_fsync_duration_seconds"),
        ),
        Panel(
            "Writes of the log",
            "Every request that changes something waits for one.",
            "s",
            _quantiles("tierkv_wal_append_duration_seconds"),
        ),
        Panel(
            "Writes of the log: how many",
            "Writes per second, and records in one.",
            "short",
            (
                Query(by("", rate("tierkv_wal_frames_total")), "writes per second"),
                *_quantiles("tierkv_wal_batch_records"),
            ),
        ),
        Panel(
            "Checkpoints",
            "A slow one lengthens the log.",
            "s",
            _quantiles("tierkv_checkpoint_duration_seconds"),
        ),
        Panel(
            "Event loop",
            "Turns, late timers, and the garbage collector: every request waits for them.",
            "s",
            (
                Query(quantile(0.99, "tierkv_loop_turn_seconds"), "99% of turns within"),
                Query(quantile(0.99, "tierkv_loop_delay_seconds"), "99% of timers late by"),
                Query(quantile(0.99, "tierkv_gc_pause_seconds"), "99% of collections within"),
                Query(f"max({of('tierkv_event_loop_lag_seconds')})", "last lag"),
            ),
        ),
        Panel(
            "Attention: waiting",
            "Until a request for attention begins to be computed.",
            "s",
            _quantiles("tierkv_attend_wait_seconds"),
        ),
        Panel(
            "Attention: together",
            "Requests that are computed together.",
            "short",
            _quantiles("tierkv_attend_batch_requests"),
        ),
        Panel(
            "CPU and memory of the daemon",
            "CPUs in use; resident memory, the RAM tiers included.",
            "short",
            (
                Query(
                    f"{rate('process_cpu_seconds_total')} and on (job, instance) tierkv_build_info",
                    "{{instance}} CPUs",
                ),
                Query(
                    f"{of('process_resident_memory_bytes')} / 1e9 "
                    "and on (job, instance) tierkv_build_info",
                    "{{instance}} GB",
                ),
            ),
        ),
    ),
)

ROWS = (_UP, _PAYS, _FULL, _EVICTED, _WHO, _SAFE, _LATENCY)
