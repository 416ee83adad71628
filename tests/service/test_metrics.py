"""What the daemon tells of itself, and that it agrees with itself and with what was done."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.service.blocks import (
    BLOCK,
    SPEC,
    check,
    fill,
    grow,
    payloads,
    press,
    sized,
    store,
    tokens,
)
from tests.service.raw import Peer
from tests.service.running import Daemon, run_cli, running, samples, until
from tierkv.core.counters import REASONS
from tierkv.core.prefix import chain_hashes
from tierkv.errors import PoolExhausted
from tierkv.obs.table import METRICS
from tierkv.rpc import messages as m

EVICTIONS = "tierkv_eviction_count_total"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    settings = sized(16, 16, 64, **{"metrics.tcp": "127.0.0.1:0", "wal.durability": "power"})
    with running(settings) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def total(metrics: dict[str, float], name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in metrics.items()
        if sample.partition("{")[0] == name and all(part in sample for part in wanted)
    )


def tcp_port(daemon: Daemon) -> int:
    found = re.search(r"metrics_port=(\d+)", daemon.said())
    assert found, daemon.said()
    return int(found[1])


# --- pages ----------------------------------------------------------------------------------------


def test_the_same_pages_on_a_free_loopback_port_and_on_the_unix_socket(daemon: Daemon) -> None:
    port = tcp_port(daemon)
    for tcp in (0, port):
        assert daemon.get("/healthz", tcp) == (200, "ok\n")
        assert daemon.get("/readyz", tcp) == (200, "serving\n")
        assert daemon.get("/nothing", tcp)[0] == 404
        assert daemon.get("/status.json", tcp)[0] == 200
    volatile = ("process_", "python_", "tierkv_event_loop_lag", "tierkv_loop_", "tierkv_gc_")
    volatile += ("tierkv_room_free",)
    pages = [samples(daemon.get("/metrics", tcp)[1]) for tcp in (0, port)]
    unix, tcp_page = ({k: v for k, v in p.items() if not k.startswith(volatile)} for p in pages)
    assert unix == tcp_page
    assert stat.S_IMODE(daemon.metrics_socket.stat().st_mode) == 0o660


def test_every_metric_of_the_documentation_is_there(daemon: Daemon, ns) -> None:
    page = daemon.get("/metrics")[1]
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    documented = re.findall(r"^\| `(tierkv_\w+)` \| (\w+) \|", _metrics_page(), re.MULTILINE)
    assert len(documented) == len(METRICS)
    assert {name: kind for name, kind in found.items() if name.startswith("tierkv_")} == dict(
        documented
    )


def _metrics_page() -> str:
    return Path(__file__).parents[2].joinpath("docs", "METRICS.md").read_text()


def test_status_json_is_what_the_command_prints(daemon: Daemon, ns, client) -> None:
    store(ns, tokens(4, seed=800))
    client.flush()
    client.close()
    until(lambda: daemon.status()["leases"] == 0)
    page = daemon.status()
    done = run_cli("status", "--json", "--socket", str(daemon.socket))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert page.keys() == printed.keys()
    # The command is connected, too, but holds nothing.
    assert (printed["connections"], printed["leases"]) == (1, 0)
    assert page["workers"] == printed["workers"] == []
    volatile = (
        "uptime_s",
        "connections",
        "leases",
        "workers",
        "wal",
        "checkpoint",
        "loop",
        "memory",
        "room",
        "in_flight",
    )
    assert {key: page[key] for key in page if key not in volatile} == {
        key: printed[key] for key in printed if key not in volatile
    }


# --- the four metrics of the brief ----------------------------------------------------------------


def test_alloc_duration_counts_every_reservation_and_its_outcome(daemon: Daemon, ns) -> None:
    name = "tierkv_block_alloc_duration_seconds_count"
    before = daemon.metrics()
    with fill(ns, tokens(10, seed=810)), ns.begin([]) as asker, pytest.raises(PoolExhausted):
        asker.reserve(7 * BLOCK)
    after = daemon.metrics()
    assert total(after, name, outcome="ok") == total(before, name, outcome="ok") + 1
    assert total(after, name, outcome="exhausted") == total(before, name, outcome="exhausted") + 1
    seconds = "tierkv_block_alloc_duration_seconds_sum"
    assert total(before, seconds) < total(after, seconds) < total(before, seconds) + 30


def test_hit_ratio_and_hits_by_tier(daemon: Daemon, ns, client) -> None:
    store(ns, tokens(8, seed=820))
    before = daemon.metrics()
    fill(ns, tokens(8, seed=820)).end()
    ns.begin(tokens(8, seed=821), keep=0).end()
    press(client, ns, 16, seed=10_000)
    fill(ns, tokens(8, seed=820)).end()
    after = daemon.metrics()
    tokens_looked_up = (8 + 8 + 16 + 8) * BLOCK
    looked_up = "tierkv_prefix_lookup_tokens_total"
    hits = "tierkv_prefix_hit_tokens_total"
    assert after[looked_up] - before[looked_up] == tokens_looked_up
    assert total(after, hits, tier="device") - total(before, hits, tier="device") == 8 * BLOCK
    assert total(after, hits, tier="host") - total(before, hits, tier="host") == 8 * BLOCK
    assert total(after, hits, tier="disk") == total(before, hits, tier="disk")
    ratio = total(after, hits) / after[looked_up]
    assert after["tierkv_prefix_hit_ratio"] == pytest.approx(ratio)
    assert daemon.status()["prefix"] == {
        "lookup_tokens": after[looked_up],
        "hit_tokens": total(after, hits),
        "hit_ratio": pytest.approx(ratio),
        "hit_tokens_by_tier": {
            tier: total(after, hits, tier=tier) for tier in ("device", "host", "disk")
        },
    }


def test_evictions_transfers_and_free_blocks(daemon: Daemon, ns, client) -> None:
    client.flush()
    press(client, ns, 16, seed=20_000)
    client.flush()
    before = daemon.metrics()
    press(client, ns, 8, seed=30_000)
    client.flush()
    after, status = daemon.metrics(), daemon.status()
    evicted = {
        to: total(after, EVICTIONS, from_tier="device", to_tier=to, reason="new_blocks")
        - total(before, EVICTIONS, from_tier="device", to_tier=to, reason="new_blocks")
        for to in ("host", "disk", "none")
    }
    assert evicted == {"host": 8, "disk": 0, "none": 0}
    moved = {
        (source, target): total(
            after, "tierkv_transfer_bytes_total", from_tier=source, to_tier=target
        )
        - total(before, "tierkv_transfer_bytes_total", from_tier=source, to_tier=target)
        for source, target in (("device", "host"), ("device", "disk"), ("disk", "device"))
    }
    assert moved == {
        ("device", "host"): 8 * SPEC.block_bytes,
        ("device", "disk"): 8 * SPEC.block_bytes,
        ("disk", "device"): 0,
    }
    duration = "tierkv_transfer_duration_seconds_count"
    assert total(after, duration, from_tier="device", to_tier="host") > total(
        before, duration, from_tier="device", to_tier="host"
    )
    ways: dict[str, float] = {}
    for way, blocks in status["evictions"].items():
        source, _, target = way.partition(">")
        ways[way] = total(after, EVICTIONS, from_tier=source, to_tier=target)
        assert ways[way] == blocks
    assert sum(ways.values()) == total(after, EVICTIONS)
    for tier, shown in status["tiers"].items():
        assert total(after, "tierkv_free_block_ratio", tier=tier) == shown["free_ratio"]
        assert total(after, "tierkv_blocks", tier=tier) == shown["blocks"]
        assert total(after, "tierkv_tier_bytes", tier=tier) == shown["used_bytes"]
        assert total(after, "tierkv_tier_capacity_bytes", tier=tier) == shown["capacity_bytes"]
    assert status["tiers"]["device"]["free_ratio"] == 0
    with fill(ns, tokens(2, seed=830)):
        assert total(daemon.metrics(), "tierkv_sequences") == 1


def test_why_blocks_were_evicted_and_how_long_they_had_been_unused() -> None:
    with running(sized(8, 8, 32)) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        press(client, ns, 200, seed=70_000)
        client.flush()
        early = tokens(4, seed=70_000 + 172)
        assert ns.lookup(early)[:4] == (4 * BLOCK, 0, 0, 4)
        promoted = fill(ns, early)
        large = client.namespace(msgspec.structs.replace(SPEC, model="large", layers=4))
        promoted.end()
        store(large, tokens(2, seed=80_000))
        metrics = daemon.metrics()

        def evicted(tier: str, reason: str) -> float:
            return total(metrics, EVICTIONS, from_tier=tier, reason=reason)

        assert evicted("device", "new_blocks") >= 200 - 8
        assert evicted("device", "promotion") == 4
        assert evicted("device", "other_model") == 4
        assert evicted("host", "spill") > 100
        assert evicted("disk", "write_behind") + evicted("disk", "spill") > 100
        assert total(metrics, EVICTIONS) == sum(
            evicted(tier, reason) for tier in ("device", "host", "disk") for reason in REASONS
        )
        assert total(metrics, "tierkv_promotion_count_total", from_tier="disk") == 4
        # Three of the two hundred are of the sample; the next look at it is due within a moment.
        idle, lived = "tierkv_block_idle_before_evict_seconds", "tierkv_block_lifetime_seconds"
        for name, tier in ((idle, "device"), (idle, "host"), (idle, "disk"), (lived, "")):
            labels = {"tier": tier} if tier else {}
            until(
                lambda name=name, labels=labels: total(daemon.metrics(), f"{name}_count", **labels)
            )
            assert total(daemon.metrics(), f"{name}_sum", **labels) < 60


def test_the_prefixes_that_are_found_most(daemon: Daemon, client) -> None:
    ns = client.namespace(msgspec.structs.replace(SPEC, salt="top"))
    often, rarely, read = (tokens(6, seed=seed) for seed in (891, 892, 893))
    for ids, times in ((often, 5), (rarely, 2), (read, 1)):
        for _ in range(times):
            store(ns, ids)

    def found() -> dict[str, tuple[int, int]]:
        return {
            one["hash"]: (one["hits"], one["hit_tokens"]) for one in client.stat()["top_prefixes"]
        }

    def name(ids: np.ndarray) -> str:
        return chain_hashes(ns.spec.digest, ids, BLOCK)[0].tobytes().hex()

    def told() -> bool:
        # What is read without asking is told a while later, with another read.
        assert ns.read(read, out) == ns.read(often, out) == 6
        return found().get(name(read), (0, 0))[0] > 3

    out = np.zeros((6, SPEC.block_bytes), np.uint8)
    until(told, "for what was read to be told")
    counted = found()
    assert counted[name(rarely)] == (1, 6 * BLOCK)
    # The last read of the other one may not be told yet.
    assert counted[name(often)][0] - counted[name(read)][0] in (3, 4)
    for ids in (often, read):
        hits, hit_tokens = counted[name(ids)]
        assert hit_tokens == hits * 6 * BLOCK


def test_tenants(daemon: Daemon, client) -> None:
    ids = tokens(4, seed=890)
    of_acme = msgspec.structs.replace(SPEC, tenant="acme")
    acme = client.namespace(of_acme)
    store(acme, ids)
    store(acme, ids)
    metrics = daemon.metrics()
    assert total(metrics, "tierkv_tenant_blocks", tenant="acme") == 4
    in_device = total(metrics, "tierkv_tenant_tier_bytes", tenant="acme", tier="device")
    assert in_device == 4 * SPEC.block_bytes
    assert total(metrics, "tierkv_tenant_lookup_tokens_total", tenant="acme") == 8 * BLOCK
    assert total(metrics, "tierkv_tenant_hit_tokens_total", tenant="acme") == 4 * BLOCK
    assert total(metrics, "tierkv_tenant_lookup_tokens_total") == total(
        metrics, "tierkv_prefix_lookup_tokens_total"
    )
    (shown,) = [one for one in daemon.status()["namespaces"] if one["tenant"] == "acme"]
    assert (shown["lookup_tokens"], shown["hit_tokens"]) == (8 * BLOCK, 4 * BLOCK)


def test_room_on_the_file_systems_and_what_was_read_of_the_configuration(daemon: Daemon) -> None:
    metrics, status = daemon.metrics(), daemon.status()
    for directory, path in (("state", daemon.state), ("disk", daemon.state / "data")):
        found = os.statvfs(path)
        shown = status["room"][directory]
        assert shown["path"] == str(path)
        assert shown["capacity_bytes"] == found.f_blocks * found.f_frsize
        assert 0 < shown["free_bytes"] < shown["capacity_bytes"]
        for field in ("free_bytes", "capacity_bytes"):
            assert total(metrics, f"tierkv_room_{field}", directory=directory) > 0
    assert metrics["tierkv_config_reload_success"] == 1
    assert abs(metrics["tierkv_config_reload_timestamp_seconds"] - time.time()) < 600
    assert total(metrics, "tierkv_tier_in_service") == 3


# --- the others -----------------------------------------------------------------------------------


def test_log_and_checkpoint(daemon: Daemon, ns, client) -> None:
    before = daemon.metrics()
    store(ns, tokens(3, seed=840))
    after, status = daemon.metrics(), daemon.status()
    assert after["tierkv_wal_bytes_total"] == status["wal"]["bytes"]
    assert after["tierkv_wal_bytes_total"] > before["tierkv_wal_bytes_total"]
    # Acquire, reserve, seal and release: one frame each, and a few for the copies to disk.
    assert 4 <= after["tierkv_wal_frames_total"] - before["tierkv_wal_frames_total"] <= 12
    assert after["tierkv_wal_segments"] == status["wal"]["segments"] == 1
    writes, records = "tierkv_wal_append_duration_seconds_count", "tierkv_wal_batch_records"
    assert after[writes] == after[f"{records}_count"]
    grown = {name: after[name] - before[name] for name in (writes, f"{records}_sum")}
    assert 4 <= grown[writes] <= 12
    # An open, three blocks and their table, three names, a close, three copies.
    assert 12 <= grown[f"{records}_sum"] <= 30
    syncs = "tierkv_wal_fsync_duration_seconds_count"
    # Only the seal's reply waits for one.
    assert after[syncs] >= before[syncs] + 1
    assert status["wal"]["durable_lsn"] <= status["wal"]["appended_lsn"]
    assert after["tierkv_wal_unsynced_bytes"] == status["wal"]["unsynced_bytes"]

    began = time.time()
    client.flush()
    after, status = daemon.metrics(), daemon.status()
    made = after["tierkv_checkpoint_timestamp_seconds"]
    assert began <= made <= time.time()
    assert made == pytest.approx(time.time() - status["checkpoint"]["age_s"], abs=1)
    count = "tierkv_checkpoint_duration_seconds_count"
    assert after[count] >= before[count] + 1
    assert 0 < status["checkpoint"]["lsn"] <= status["wal"]["durable_lsn"]


def test_requests_by_verb_and_code(daemon: Daemon) -> None:
    def counted() -> dict[str, float]:
        name = "tierkv_rpc_requests_total"
        return {k: v for k, v in daemon.metrics().items() if k.startswith(name)}

    before = counted()
    ids = tokens(2, seed=850)
    hashes = chain_hashes(SPEC.digest, ids, BLOCK).tobytes()
    with Peer(daemon) as peer:
        peer.hello()
        number = peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened).namespace
        for _ in range(3):
            peer.want(m.Lookup(number, hashes), m.Found)
        peer.refused(m.Lookup(99, hashes), "unknown_namespace")
        peer.want(m.Acquire(number, 1, hashes, ids.tobytes()), m.Table)
        peer.want(m.Reserve(1, 0, BLOCK), m.Table)
        peer.refused(m.Reserve(2, 0, BLOCK), "unknown_sequence")
        peer.refused(m.Reserve(1, 0, 100 * BLOCK), "pool_exhausted")
        peer.refused(m.Resume(7 << 32 | 1), "not_owner")
        peer.want(m.Suspend(1), m.Done)
        peer.want(m.Resume(1), m.Table)
        peer.want(m.Fork(1, 2, 0), m.Table)
        peer.want(m.Truncate(2, 0), m.Table)
        peer.refused(m.Seal(1, 0, b"", b"", b"1"), "invalid_argument")
        peer.want(m.Stat(), m.Status)
        peer.want(m.Flush(), m.Done)
        peer.refused(m.Attend(number, 9, [], b"", b"", 1, 0, 0, 0), "invalid_argument")
        peer.want(m.Release([1, 2]), m.Done)
    after = counted()
    grown = {
        tuple(re.findall(r'"(\w+)"', name)): value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0)
    }
    well = ("hello", "open_namespace", "acquire", "reserve", "suspend", "resume", "fork")
    well += ("truncate", "stat", "flush", "release")
    expected = {("ok", verb): 1.0 for verb in well}
    expected |= {
        ("unknown_namespace", "lookup"): 1,
        ("unknown_sequence", "reserve"): 1,
        ("pool_exhausted", "reserve"): 1,
        ("not_owner", "resume"): 1,
        ("invalid_argument", "seal"): 1,
        ("invalid_argument", "attend"): 1,
    }
    assert grown == expected | {("ok", "lookup"): 3}


def test_damage_is_counted_where_it_is_found_and_never_served(daemon: Daemon, ns, client) -> None:
    failures = "tierkv_checksum_failures_total"
    # In the device tier: a worker scribbles over a block that it has sealed.
    before = daemon.metrics()
    ids = tokens(4, seed=860)
    client.flush()
    with fill(ns, ids) as sequence:
        client.flush()
        ns.pool[sequence.block_table[2], 5] ^= 1
    press(client, ns, 16, seed=40_000)
    after = daemon.metrics()
    assert total(after, failures, tier="device") == total(before, failures, tier="device") + 1
    # The copy on disk was made before, and is good.
    with fill(ns, ids) as sequence:
        assert sequence.cached_tokens == 4 * BLOCK

    # On disk: the medium loses a bit.
    press(client, ns, 16, seed=50_000)
    client.flush()
    press(client, ns, 16, seed=60_000)
    found = ns.lookup(ids)
    assert found[:4] == (4 * BLOCK, 0, 0, 4)
    _flip_a_bit_of(daemon, ids, block=1)
    with fill(ns, ids) as sequence:
        assert sequence.cached_tokens == BLOCK
    with fill(ns, ids) as sequence:
        assert sequence.cached_tokens == 4 * BLOCK
    last = daemon.metrics()
    assert total(last, failures, tier="disk") == total(after, failures, tier="disk") + 1
    assert total(last, EVICTIONS, from_tier="disk", reason="corrupt") == 1


def _flip_a_bit_of(daemon: Daemon, ids, block: int) -> None:
    """Damage the payload of one block in the segment file that holds it."""
    payload = payloads(SPEC, ids)[block].tobytes()
    for path in daemon.state.joinpath("data").glob("*.seg"):
        at = path.read_bytes().find(payload)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([payload[100] ^ 0x10]))
            return
    raise AssertionError("no segment holds the block")


def test_recovery_numbers() -> None:
    with running(sized(16, 16, 64)) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        store(ns, tokens(6, seed=870))
        client.flush()
        with ns.begin([]) as sequence:
            grow(ns, sequence, tokens(2, seed=871))
            check(ns, sequence)
            wal = daemon.status()["wal"]
            daemon.signal(9)
            daemon.wait()
            daemon.start()
            metrics, status = daemon.metrics(), daemon.status()
            recovery = status["recovery"]
            assert status["epoch"] == 2
            assert recovery["blocks"] == 8
            assert recovery["dropped_blocks"] == 0
            assert 0 < recovery["records"] < wal["appended_lsn"]
            assert recovery["tiers"]["device"] == {"kept": 8, "dropped": 0}
            assert recovery["tiers"]["disk"]["kept"] in (6, 7, 8)
            assert metrics["tierkv_recovery_records"] == recovery["records"]
            assert metrics["tierkv_recovery_duration_seconds"] == recovery["duration_s"]
            for tier, numbers in recovery["tiers"].items():
                for result, blocks in numbers.items():
                    name = "tierkv_recovery_blocks"
                    assert total(metrics, name, tier=tier, result=result) == blocks
            assert abs(metrics["tierkv_checkpoint_timestamp_seconds"] - time.time()) < 30
            assert metrics['tierkv_state{state="serving"}'] == 1
            assert total(metrics, "tierkv_state") == 1
            sequence.reserve(BLOCK)
            check(ns, sequence)
