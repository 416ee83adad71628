"""The status document's keys are a promise."""

from __future__ import annotations

import msgspec
import pytest

from tierkv.obs.status import NamespaceStatus, StatusDocument, from_plain, to_plain


def test_keys() -> None:
    namespace = NamespaceStatus(id=1, model="m", dtype="float32", block_tokens=16, block_bytes=4096)
    plain = to_plain(StatusDocument(version="1", state="serving", namespaces=[namespace]))
    assert list(plain) == [
        "version", "state", "progress", "epoch", "pid", "uptime_s", "durability", "socket",
        "native", "native_missing", "tiers", "memory", "blocks", "only_in_ram_blocks",
        "sequences", "leases", "pins", "fenced_blocks", "connections", "in_flight",
        "behind_blocks", "workers", "namespaces", "prefix", "top_prefixes", "evictions", "evicted",
        "wal", "recovery", "checkpoint", "loop", "config", "room", "problems",
    ]  # fmt: skip
    assert list(plain["tiers"]) == ["device", "host", "disk"]
    assert list(plain["tiers"]["host"]) == [
        "capacity_bytes", "used_bytes", "blocks", "free_ratio", "evictable_blocks", "state",
        "io",
    ]  # fmt: skip
    assert list(plain["namespaces"][0]) == [
        "id", "model", "dtype", "block_tokens", "block_bytes", "tenant", "digest", "blocks",
        "tiers", "lookup_tokens", "hit_tokens",
    ]  # fmt: skip
    assert list(plain["prefix"]) == [
        "lookup_tokens", "hit_tokens", "hit_ratio", "hit_tokens_by_tier",
    ]  # fmt: skip
    assert list(plain["progress"]) == ["what", "done", "total", "elapsed_s"]
    assert list(plain["wal"]) == [
        "appended_lsn", "written_lsn", "durable_lsn", "unsynced_bytes",
        "since_checkpoint_bytes", "bytes", "segments",
    ]  # fmt: skip
    assert list(plain["recovery"]) == [
        "duration_s", "records", "blocks", "dropped_blocks", "truncated_bytes", "rebuilt", "tiers",
        "adopted_bytes",
    ]  # fmt: skip
    assert list(plain["checkpoint"]) == ["lsn", "age_s"]


def test_it_comes_back_from_the_socket_and_ignores_a_newer_daemons_keys() -> None:
    document = StatusDocument(version="1", state="serving", blocks=3)
    assert from_plain(to_plain(document) | {"new": 1}) == document


def test_another_type_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        from_plain({"version": "1", "state": "serving", "blocks": "many"})


def test_documents_share_nothing() -> None:
    one, two = StatusDocument(version="1", state="a"), StatusDocument(version="1", state="b")
    one.tiers["device"].blocks = 5
    one.evictions["a>b"] = 1
    assert two.tiers["device"].blocks == 0
    assert two.evictions == {}
