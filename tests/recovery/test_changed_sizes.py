"""Settings change between two daemons: what no longer fits goes, nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recovery_harness import DISK_SEGMENT_BYTES, SIZE, Daemon, Machine, chain_of, content

from tierkv.core.ids import Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.spec import KVSpec
from tierkv.service import machine as machine_module

Start = Callable[..., Daemon]
A = list(range(100, 100 + 4 * SIZE))
B = list(range(200, 200 + 4 * SIZE))
BIG = KVSpec(model="big", layers=1, kv_heads=64, head_dim=16, block_tokens=4)
"""A block of 32 KiB: five times as much on disk as one of the small model's."""


def _copies(daemon: Daemon) -> dict[str, int]:
    rows = daemon.state.live_rows()
    return {tier.label: int(daemon.state.blocks.has_copy(rows, tier).sum()) for tier in Tier}


def _filled(daemon: Daemon) -> int:
    """A sequence of chain A with copies in all three tiers, chain B cached on disk and device."""
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.store(lease, 2, B)
    daemon.write_behind()
    daemon.planner.release(lease, [2])
    rows = daemon.planner.sequence(lease, 1).rows
    daemon.run(
        daemon.placement.copy(Tier.DEVICE, Tier.HOST, rows, daemon.state.blocks.id[rows].copy())
    )
    daemon.planner.suspend(lease, 1)
    daemon.checkpoint()
    assert _copies(daemon) == {"device": 8, "host": 4, "disk": 8}
    return lease


def _has_all(daemon: Daemon, tokens: list[int]) -> bool:
    lease = daemon.hello()
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 1, chain_of(tokens)))
    for block, slot in enumerate(view.slots.tolist()):
        assert np.array_equal(daemon.payload(slot), content(tokens, block))
    daemon.planner.close_lease(lease)
    assert not any(daemon.counters.checksum_failures.values())
    return len(view.slots) == len(tokens) // SIZE


@pytest.mark.parametrize(
    ("change", "left", "lease_stays"),
    [
        ({}, {"device": 8, "host": 4, "disk": 8}, True),
        ({"device": 16}, {"device": 0, "host": 4, "disk": 8}, False),
        ({"device": 5}, {"device": 0, "host": 4, "disk": 8}, False),
        ({"host": 2}, {"device": 8, "host": 0, "disk": 8}, True),
        ({"host": 0}, {"device": 8, "host": 0, "disk": 8}, True),
        ({"host": 9}, {"device": 8, "host": 0, "disk": 8}, True),
        ({"disk": 5}, {"device": 8, "host": 4, "disk": 5}, True),
        ({"disk": 0}, {"device": 8, "host": 4, "disk": 0}, True),
        ({"disk": 40}, {"device": 8, "host": 4, "disk": 8}, True),
        ({"device": 9, "host": 0, "disk": 0}, {"device": 0, "host": 0, "disk": 0}, False),
    ],
)
def test_only_what_lies_beyond_a_budget_is_dropped(
    start: Start, change: dict[str, int], left: dict[str, int], lease_stays: bool
) -> None:
    daemon = start(device=8, host=4, disk=10)
    lease = _filled(daemon)
    daemon = start(**change)
    check_invariants(daemon.state)
    assert _copies(daemon) == left
    report = daemon.report
    assert report.wal_end == "clean"
    assert not report.quarantined
    assert report.leases_kept == int(lease_stays)
    dropped = {tier.label: one.dropped for tier, one in report.tiers.items()}
    assert dropped == {
        "device": 8 - left["device"],
        "host": 4 - left["host"],
        "disk": 8 - left["disk"],
    }
    if any(left.values()):
        assert daemon.cached(A) == 4
        assert _has_all(daemon, A)
    if lease_stays:
        daemon.run(daemon.planner.resume(lease, 1))
        assert len(daemon.slots(lease, 1)) == 4
    daemon.write()
    daemon = start()
    check_invariants(daemon.state)
    assert daemon.report.wal_end == "clean"


def test_pools_that_share_a_lowered_budget_lose_the_oldest_only(start: Start) -> None:
    """Each pool's slots fit by their numbers, but not all pools together."""
    daemon = start(device=700, host=0, disk=30)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.store(lease, 2, A, BIG)
    daemon.store(lease, 3, B)
    daemon.write_behind()
    daemon.planner.close_lease(lease)
    daemon.write()
    assert _copies(daemon)["disk"] == 12
    daemon = start(disk=24, device=800)
    check_invariants(daemon.state)
    assert daemon.report.wal_end == "clean"
    assert daemon.cached(B) == 4
    assert daemon.cached(A) + daemon.cached(A, BIG) < 8
    assert daemon.report.tiers[Tier.DISK].dropped == 12 - _copies(daemon)["disk"] > 0
    assert daemon.state.used_bytes(Tier.DISK) <= daemon.state.budgets[Tier.DISK]


def test_a_disk_tier_that_was_off_for_a_while_serves_no_old_blocks(start: Start) -> None:
    daemon = start(device=8, host=0, disk=10)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.write_behind()
    daemon.planner.close_lease(lease)
    daemon.write()
    daemon = start(disk=0)
    assert daemon.cached(A) == 4
    lease = daemon.hello()
    daemon.store(lease, 1, B)
    daemon.planner.close_lease(lease)
    daemon.write()
    daemon = start(disk=10, device=9)
    assert daemon.cached(A) == 0
    assert daemon.cached(B) == 0
    lease = daemon.hello()
    daemon.store(lease, 1, B)
    daemon.write_behind()
    daemon.planner.close_lease(lease)
    daemon.write()
    daemon = start(device=8)
    assert daemon.cached(A) == 0
    assert daemon.cached(B) == 4
    assert _has_all(daemon, B)


def test_memory_of_a_host_tier_that_is_off_is_given_back(machine: Machine, start: Start) -> None:
    daemon = start(device=8, host=4, disk=10)
    _filled(daemon)
    assert (machine.folder / "arena" / "host.arena").exists()
    start(host=0)
    assert not (machine.folder / "arena" / "host.arena").exists()
    assert not (machine.folder / "arena" / "host.table").exists()


@pytest.mark.parametrize("segment_bytes", [DISK_SEGMENT_BYTES // 2, DISK_SEGMENT_BYTES * 3])
def test_a_store_keeps_the_segment_size_it_was_made_with(
    start: Start, caplog: pytest.LogCaptureFixture, segment_bytes: int
) -> None:
    daemon = start(device=8, host=0, disk=32)
    _filled_on_disk(daemon)
    with caplog.at_level(logging.INFO):
        daemon = start(disk_segment_bytes=segment_bytes, device=9)
    assert f"disk.segment_bytes is {segment_bytes}, but this store keeps the 65536" in caplog.text
    assert _has_all(daemon, A)
    assert _has_all(daemon, B)


def test_no_word_of_the_segment_size_while_it_is_the_same(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    with caplog.at_level(logging.INFO):
        start()
        start(disk=0, disk_segment_bytes=2 * DISK_SEGMENT_BYTES)
    assert "segment_bytes" not in caplog.text


def _filled_on_disk(daemon: Daemon) -> None:
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.store(lease, 2, B)
    daemon.write_behind()
    daemon.planner.close_lease(lease)
    daemon.write()


def test_arenas_of_another_boot_are_not_taken_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(device=8, host=4, disk=10)
    if not os.path.ismount("/dev/shm") or not str(daemon.directory.path).startswith("/dev/shm"):
        pytest.skip("needs a tmpfs: elsewhere files outlive the kernel")
    _filled(daemon)
    monkeypatch.setattr(machine_module, "boot_id", lambda: "another")
    daemon = start()
    assert _copies(daemon) == {"device": 0, "host": 0, "disk": 8}
    assert not daemon.state.leases
    assert _has_all(daemon, A)


def test_arenas_of_another_store_are_not_taken_over(machine: Machine, start: Start) -> None:
    daemon = start(device=8, host=4, disk=10)
    _filled(daemon)
    identity = daemon.recovered.arenas[Tier.DEVICE].identity
    machine.crash()
    other = Machine(machine.folder / "other")
    other.folder.mkdir()
    daemon = other.start(device=8, host=4, disk=10, arena_dir=machine.folder / "arena")
    assert daemon.recovered.arenas[Tier.DEVICE].identity != identity
    other.crash()
    daemon = start()
    assert _copies(daemon) == {"device": 0, "host": 0, "disk": 8}
    assert _has_all(daemon, A)


def test_an_arena_without_its_table_is_not_taken_over(machine: Machine, start: Start) -> None:
    daemon = start(device=8, host=4, disk=10)
    _filled(daemon)
    machine.crash()
    _cut(machine.folder / "arena" / "device.table", 100)
    daemon = start()
    assert _copies(daemon) == {"device": 0, "host": 4, "disk": 8}
    assert not daemon.state.leases


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
