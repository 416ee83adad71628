"""Every declared metric is exposed, with the numbers of the counters and of the status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tierkv.obs import docs
from tierkv.obs.declared import Type
from tierkv.obs.metrics import Metrics
from tierkv.obs.status import (
    ConfigStatus,
    HeldStatus,
    NamespaceStatus,
    RecoveredTier,
    RecoveryStatus,
    RoomStatus,
    StatusDocument,
    TierStatus,
    WalStatus,
)
from tierkv.obs.table import METRICS

STATUS = StatusDocument(
    version="1.2.3",
    state="recovering",
    connections=2,
    leases=3,
    sequences=4,
    tiers={
        "device": TierStatus(capacity_bytes=1000, used_bytes=400, blocks=4, free_ratio=0.6),
        "host": TierStatus(state="off"),
        "disk": TierStatus(
            capacity_bytes=5000, used_bytes=500, blocks=5, free_ratio=0.9, state="failed"
        ),
    },
    wal=WalStatus(segments=6, unsynced_bytes=640, since_checkpoint_bytes=320),
    in_flight=7,
    only_in_ram_blocks=9,
    pins=10,
    namespaces=[
        NamespaceStatus(
            id=0,
            model="m",
            dtype="float32",
            block_tokens=16,
            block_bytes=4096,
            tenant="acme",
            blocks=3,
            tiers={"host": HeldStatus(blocks=2, bytes=8192)},
            lookup_tokens=64,
            hit_tokens=32,
        )
    ],
    behind_blocks=8,
    room={"state": RoomStatus(path="/x", free_bytes=10, capacity_bytes=20)},
    config=ConfigStatus(ok=False, read_unix_s=1e9),
    recovery=RecoveryStatus(
        duration_s=0.5,
        records=70,
        tiers={"disk": RecoveredTier(kept=8, dropped=1)},
        adopted_bytes={"device": 300, "host": 0},
        truncated_bytes=128,
    ),
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda: STATUS)


def samples(metrics: Metrics) -> dict[str, float]:
    """Value by series, written as in PromQL."""
    found = {}
    for family in parse_text(metrics.exposition()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_every_metric_is_exposed_with_its_type_and_help(metrics: Metrics) -> None:
    families = {family.name: family for family in parse_text(metrics.exposition()[0].decode())}
    for declared in METRICS:
        family = families[declared.name.removesuffix("_total")]
        assert family.type == declared.type.value
        assert family.documentation == declared.help


def test_numbers_of_the_status(metrics: Metrics) -> None:
    found = samples(metrics)
    expected = {
        'tierkv_free_block_ratio{tier="device"}': 0.6,
        'tierkv_free_block_ratio{tier="disk"}': 0.9,
        'tierkv_blocks{tier="disk"}': 5,
        'tierkv_tier_bytes{tier="device"}': 400,
        'tierkv_tier_capacity_bytes{tier="device"}': 1000,
        "tierkv_connections": 2,
        "tierkv_leases": 3,
        "tierkv_sequences": 4,
        "tierkv_wal_segments": 6,
        "tierkv_wal_unsynced_bytes": 640,
        "tierkv_rpc_in_flight": 7,
        "tierkv_behind_blocks": 8,
        "tierkv_only_in_ram_blocks": 9,
        "tierkv_pins": 10,
        "tierkv_wal_since_checkpoint_bytes": 320,
        'tierkv_tenant_blocks{tenant="acme"}': 3,
        'tierkv_tenant_tier_bytes{tenant="acme",tier="host"}': 8192,
        'tierkv_tenant_lookup_tokens_total{tenant="acme"}': 64,
        'tierkv_tenant_hit_tokens_total{tenant="acme"}': 32,
        'tierkv_room_free_bytes{directory="state"}': 10,
        'tierkv_room_capacity_bytes{directory="state"}': 20,
        "tierkv_config_reload_success": 0,
        "tierkv_config_reload_timestamp_seconds": 1e9,
        "tierkv_recovery_truncated_bytes": 128,
        'tierkv_tier_in_service{tier="device"}': 1,
        'tierkv_tier_in_service{tier="disk"}': 0,
        "tierkv_recovery_duration_seconds": 0.5,
        "tierkv_recovery_records": 70,
        'tierkv_recovery_blocks{result="kept",tier="disk"}': 8,
        'tierkv_recovery_blocks{result="dropped",tier="disk"}': 1,
        'tierkv_arena_adopted_bytes{tier="device"}': 300,
        'tierkv_arena_adopted_bytes{tier="host"}': 0,
        'tierkv_state{state="recovering"}': 1,
        'tierkv_state{state="serving"}': 0,
    }
    assert expected.items() <= found.items()
    assert 'tierkv_tier_in_service{tier="host"}' not in found
    assert any(series.startswith("tierkv_build_info{") and "1.2.3" in series for series in found)


def test_numbers_of_the_counters(metrics: Metrics) -> None:
    counters = metrics.counters
    counters.looked_up(0, 200, device=100, disk=50)
    counters.evicted("device", "host", "capacity", 7)
    counters.transferred("device", "host", 4096)
    counters.checksum_failures["disk"] += 1
    counters.disk_read_errors = 4
    counters.optional_copies_dropped += 2
    counters.mismatched_blocks += 5
    counters.promotions["disk"] += 3
    counters.breaker_trips["disk"] += 1
    counters.deduplicated_blocks += 6
    counters.wal_bytes += 640
    counters.wal_frames += 3
    counters.answered("acquire")
    counters.answered("acquire", "pool_exhausted")
    counters.event_loop_lag_s = 0.25
    expected = {
        "tierkv_prefix_lookup_tokens_total": 200,
        'tierkv_prefix_hit_tokens_total{tier="device"}': 100,
        'tierkv_prefix_hit_tokens_total{tier="host"}': 0,
        'tierkv_prefix_hit_tokens_total{tier="disk"}': 50,
        "tierkv_prefix_hit_ratio": 0.75,
        'tierkv_eviction_count_total{from_tier="device",reason="capacity",to_tier="host"}': 7,
        'tierkv_transfer_bytes_total{from_tier="device",to_tier="host"}': 4096,
        'tierkv_checksum_failures_total{tier="disk"}': 1,
        "tierkv_disk_read_errors_total": 4,
        "tierkv_optional_copies_dropped_total": 2,
        "tierkv_prefix_mismatches_total": 5,
        'tierkv_promotion_count_total{from_tier="disk"}': 3,
        'tierkv_promotion_count_total{from_tier="host"}': 0,
        'tierkv_tier_trips_total{tier="disk"}': 1,
        "tierkv_deduplicated_blocks_total": 6,
        "tierkv_wal_bytes_total": 640,
        "tierkv_wal_frames_total": 3,
        'tierkv_rpc_requests_total{code="ok",verb="acquire"}': 1,
        'tierkv_rpc_requests_total{code="pool_exhausted",verb="acquire"}': 1,
        "tierkv_event_loop_lag_seconds": 0.25,
    }
    assert expected.items() <= samples(metrics).items()


def test_histograms(metrics: Metrics) -> None:
    metrics.block_alloc_duration["ok"].observe(7e-6)
    metrics.block_alloc_duration["exhausted"].observe(60)
    metrics.transfer_duration["disk", "device"].observe(0.003)
    metrics.rpc_duration["seal"].observe(0.003)
    metrics.wal_fsync_duration.observe(0.003)
    metrics.checkpoint_duration.observe(0.003)
    expected = {
        'tierkv_block_alloc_duration_seconds_bucket{le="5e-06",outcome="ok"}': 0,
        'tierkv_block_alloc_duration_seconds_bucket{le="1e-05",outcome="ok"}': 1,
        'tierkv_block_alloc_duration_seconds_bucket{le="5.0",outcome="exhausted"}': 0,
        'tierkv_block_alloc_duration_seconds_bucket{le="+Inf",outcome="exhausted"}': 1,
        'tierkv_transfer_duration_seconds_count{from_tier="disk",to_tier="device"}': 1,
        'tierkv_rpc_duration_seconds_sum{verb="seal"}': 0.003,
        "tierkv_wal_fsync_duration_seconds_count": 1,
        "tierkv_checkpoint_duration_seconds_count": 1,
    }
    assert expected.items() <= samples(metrics).items()


def test_a_histograms_child_is_bound_once(metrics: Metrics) -> None:
    assert metrics.rpc_duration["seal"] is metrics.rpc_duration["seal"]


def test_the_checkpoint_timestamp_is_absent_before_the_first(metrics: Metrics) -> None:
    assert "tierkv_checkpoint_timestamp_seconds" not in samples(metrics)
    metrics.counters.checkpoint_timestamp_s = 1e9
    assert samples(metrics)["tierkv_checkpoint_timestamp_seconds"] == 1e9


def test_openmetrics_if_asked_for(metrics: Metrics) -> None:
    metrics.counters.evicted("device", "host", "capacity")
    metrics.block_alloc_duration["ok"].observe(0.1)
    page, content_type = metrics.exposition("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(page.decode())}
    assert {"tierkv_eviction_count", "tierkv_block_alloc_duration_seconds"} <= names
    assert metrics.exposition()[1].startswith("text/plain")


def test_no_creation_timestamps(metrics: Metrics) -> None:
    metrics.block_alloc_duration["ok"].observe(0.1)
    assert b"_created" not in metrics.exposition()[0]
    assert b"_created" not in metrics.exposition("application/openmetrics-text")[0]


def test_importing_changes_nothing_for_the_process() -> None:
    code = (
        "import tierkv.obs.metrics, prometheus_client as p\n"
        "registry = p.CollectorRegistry()\n"
        "p.Counter('seen', 'x', registry=registry).inc()\n"
        "assert b'seen_created' in p.generate_latest(registry)\n"
        "assert b'tierkv' not in p.generate_latest()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_two_daemons_in_one_process_do_not_mix(metrics: Metrics) -> None:
    other = Metrics(lambda: STATUS)
    other.counters.wal_frames = 9
    assert samples(metrics)["tierkv_wal_frames_total"] == 0
    assert samples(other)["tierkv_wal_frames_total"] == 9


def test_the_tables_names_follow_the_conventions() -> None:
    names = [declared.name for declared in METRICS]
    assert len(names) == len(set(names))
    for declared in METRICS:
        assert declared.name.startswith("tierkv_")
        assert declared.name.endswith("_total") == (declared.type is Type.COUNTER)
        assert declared.help.endswith(".")
        assert declared.why.endswith(".")
        assert list(declared.buckets) == sorted(set(declared.buckets))
        assert bool(declared.buckets) == (declared.type is Type.HISTOGRAM)


def test_metrics_page_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / docs.MARKDOWN_PATH).read_text(encoding="utf-8")
    assert page == docs.markdown(), "run `python -m tierkv.obs.docs`"
