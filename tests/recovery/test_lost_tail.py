"""The end of the log is lost: nothing that it named may be mistaken for something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recovery_harness import SIZE, Daemon, Machine, chain_of, content, tail_content

from tierkv.core.ids import Tier
from tierkv.service.recovery import BLOCK_IDS_PER_EPOCH

Start = Callable[..., Daemon]
A = list(range(100, 100 + 3 * SIZE))
B = list(range(200, 200 + 3 * SIZE))


def test_ids_of_lost_records_are_not_given_again(start: Start) -> None:
    daemon = start(device=8, host=0, disk=8)
    lease = daemon.hello()
    daemon.namespace()
    daemon.write()
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 1, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 1, 0, len(A)))
    lost = daemon.recovered.arenas[Tier.DEVICE].table(0)["id"].copy()
    assert lost.any()
    daemon = start()
    daemon.store(lease, 2, B)
    rows = daemon.state.live_rows()
    assert not np.isin(daemon.state.blocks.id[rows], lost[lost != 0]).any()
    assert daemon.state.blocks.id[rows].min() >= daemon.state.epoch * BLOCK_IDS_PER_EPOCH


def test_an_old_block_in_a_slot_that_lost_its_write_is_never_served(
    machine: Machine, start: Start
) -> None:
    """Power loss: the log kept the record of a copy whose slot still holds what was there before.

    Even if that has the same id, the checksum in the log tells them apart.
    """
    daemon = start(device=8, host=0, disk=8)
    lease = daemon.hello()
    daemon.store(lease, 1, A[:SIZE])
    daemon.write_behind()
    slots = daemon.state.blocks.slot[Tier.DISK][daemon.planner.sequence(lease, 1).rows].tolist()
    segment = next((machine.folder / "data").glob("*.seg"))
    before = segment.read_bytes()
    daemon.planner.release(lease, [1])
    rows = daemon.state.live_rows()
    ids = daemon.state.blocks.id[rows].copy()
    for tier in (Tier.DEVICE, Tier.DISK):
        daemon.placement._drop(tier, rows, "capacity")
    daemon.state.next_block = int(ids.min())
    daemon.store(lease, 2, B[:SIZE])
    daemon.write_behind()
    second = daemon.planner.sequence(lease, 2).rows
    assert daemon.state.blocks.slot[Tier.DISK][second].tolist() == slots
    assert np.array_equal(daemon.state.blocks.id[second], ids)
    daemon.planner.release(lease, [2])
    daemon.placement._drop(Tier.DEVICE, second, "capacity")
    daemon.write()
    machine.crash()
    segment.write_bytes(before)
    daemon = start()
    assert daemon.cached(B[:SIZE]) == 1
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 3, chain_of(B[:SIZE])))
    assert len(view.slots) == 0
    assert daemon.counters.checksum_failures["disk"] == 1


def test_a_lease_whose_record_was_lost_is_unknown(start: Start) -> None:
    daemon = start()
    daemon.write()
    token = b"lost with the log"[:16]
    lease = daemon.hello(token)
    daemon = start()
    assert not daemon.state.leases
    again = daemon.hello(b"another's own 16")
    assert again == lease  # the number may come again, but only with another token
    assert [one.token for one in daemon.state.leases.values()] == [b"another's own 16"]


def test_lease_numbers_go_on_behind_closed_ones(start: Start) -> None:
    daemon = start()
    first = daemon.hello()
    daemon.planner.close_lease(first)
    daemon.write()
    daemon = start()
    daemon.checkpoint()
    daemon = start()
    assert daemon.hello() == first + 1


def _stale_tail(daemon: Daemon, lease: int) -> None:
    """A partial block spills, comes back and is written on; the log keeps only the first half."""
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 1, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 1, 0, 2))
    daemon.payload(daemon.slots(lease, 1)[0])[:] = tail_content([1, 2])
    daemon.planner.suspend(lease, 1)
    rows = daemon.planner.sequence(lease, 1).rows
    daemon.run(daemon.placement._demote(Tier.DEVICE, 0, rows, "new_blocks"))
    daemon.write()
    daemon.writer.sync()
    daemon.run(daemon.planner.resume(lease, 1))
    daemon.payload(daemon.slots(lease, 1)[0])[:] = tail_content([1, 2, 3])


def test_after_replies_ahead_of_the_log_no_worker_gets_its_sequences_back(start: Start) -> None:
    """Durability "none": the worker wrote on in a block whose way up the log does not know."""
    daemon = start(durability="none")
    lease = daemon.hello()
    daemon.store(lease, 2, A)
    daemon.planner.release(lease, [2])
    daemon.write_behind()
    _stale_tail(daemon, lease)
    before = daemon.recovered.arenas[Tier.DEVICE].identity
    daemon = start(durability="kill")
    assert not daemon.state.sequences
    assert daemon.report.leases_closed == 1
    assert daemon.recovered.arenas[Tier.DEVICE].identity != before
    assert daemon.cached(A) == 3
    lease = daemon.hello()
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 1, chain_of(A)))
    for block, slot in enumerate(view.slots.tolist()):
        assert np.array_equal(daemon.payload(slot), content(A, block))
    daemon.write()
    daemon = start()
    assert daemon.report.leases_kept == 1


def test_after_a_corrupt_log_no_worker_gets_its_sequences_back(
    machine: Machine, start: Start
) -> None:
    daemon = start(host=4)
    lease = daemon.hello()
    _stale_tail(daemon, lease)
    daemon.write()
    daemon.writer.sync()
    daemon.hello()
    daemon.write()
    lost = daemon.writer.durable_lsn
    at = daemon.writer._segment.offset_of(lost)
    segment = sorted((machine.folder / "state" / "wal").glob("*.wal"))[-1]
    machine.crash()
    _flip(segment, at)
    daemon = start()
    assert daemon.report.wal_end == "corrupt"
    assert not daemon.state.leases
    assert not daemon.state.sequences
    assert len(list((machine.folder / "state" / "quarantine").iterdir())) >= 1


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("durability", ["none", "kill"])
def test_a_last_checkpoint_leaves_nothing_to_doubt(start: Start, durability: str) -> None:
    """What the Checkpointer says at a clean stop; see test_checkpoints for who says it when."""
    daemon = start(durability=durability)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.planner.close_lease(lease)
    daemon.checkpoint(last=True)
    daemon = start()
    assert daemon.report.tiers[Tier.DEVICE].kept == 3
