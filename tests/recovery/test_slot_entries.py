"""What lies in slots agrees with the log at every moment, so that no crash makes a block a loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from recovery_harness import SIZE, Daemon, Killed, Machine, chain_of, content, tail_content

from tierkv.core.ids import Tier
from tierkv.core.matching import Chain
from tierkv.core.spec import KVSpec
from tierkv.tiers.entry import set_checks

Start = Callable[..., Daemon]

A = list(range(100, 100 + 4 * SIZE))
B = list(range(200, 200 + 4 * SIZE))
BIG = KVSpec(model="big", layers=1, kv_heads=2, head_dim=8, block_tokens=4)


def suspended(daemon: Daemon, lease: int, local: int, tokens: list[int]) -> None:
    """A sequence of full blocks that may spill."""
    daemon.store(lease, local, tokens)
    daemon.planner.suspend(lease, local)
    daemon.write()


def bytes_of(daemon: Daemon, lease: int, local: int, tokens: list[int]) -> None:
    """Resume the sequence and look at every byte of it."""
    daemon.run(daemon.planner.resume(lease, local))
    slots = daemon.slots(lease, local)
    assert len(slots) == len(tokens) // SIZE
    for block, slot in enumerate(slots):
        assert np.array_equal(daemon.payload(slot), content(tokens, block))


@pytest.mark.parametrize("lower", ["host", "disk"])
def test_a_block_that_made_room_is_not_lost_before_the_log_says_where_it_went(
    start: Start, lower: str
) -> None:
    """A spilled block's slot gets its new owner's entry in the same turn; then the daemon dies."""
    daemon = start(device=4, host=4 * (lower == "host"), disk=8 * (lower == "disk"))
    lease = daemon.hello()
    suspended(daemon, lease, 1, A)
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 2, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 2, 0, len(B)))
    daemon = start()
    bytes_of(daemon, lease, 1, A)


def test_memory_is_given_back_only_when_the_log_says_that_it_is_free(start: Start) -> None:
    """Another pool needs the budget: the pages of the spilled blocks are punched out."""
    daemon = start(device=8, host=0, disk=8)
    lease = daemon.hello()
    suspended(daemon, lease, 1, A)
    suspended(daemon, lease, 2, B)
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(BIG), 3, chain_of([], BIG)))
    daemon.run(daemon.planner.reserve(lease, 3, 0, 4 * SIZE))
    daemon = start()
    daemon.planner.release(lease, [3])
    bytes_of(daemon, lease, 1, A)
    bytes_of(daemon, lease, 2, B)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_seal_that_meets_a_block_on_disk_may_die_anywhere(
    start: Start, machine: Machine, steps: int
) -> None:
    """The worker's own slot becomes the cached block's; the worker must not lose what it wrote."""
    daemon = start(device=8, host=0, disk=8)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.planner.release(lease, [1])
    daemon.write_behind()
    rows = daemon.state.live_rows()
    daemon.placement._drop(Tier.DEVICE, rows, "capacity")
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 2, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 2, 0, len(A)))
    daemon.write()
    machine.countdown.left = steps
    died = False
    try:
        daemon.seal(lease, 2, A, 0)
    except Killed:
        died = True
    assert died or steps == 5
    daemon = start()
    sequence = daemon.planner.sequence(lease, 2)
    assert len(sequence) == len(A) // SIZE
    if sequence.suspended:
        daemon.run(daemon.planner.resume(lease, 2))
    daemon.seal(lease, 2, A, 0)
    for block, slot in enumerate(daemon.slots(lease, 2)):
        assert np.array_equal(daemon.payload(slot), content(A, block))
    assert daemon.planner.table(sequence).sealed == len(A) // SIZE


def test_an_entry_whose_record_was_lost_is_trusted_for_no_block(start: Start) -> None:
    """The copy reached its slot, the log never heard of it; then the slot is used again."""
    daemon = start(device=4, host=4, disk=8)
    lease = daemon.hello()
    suspended(daemon, lease, 1, A)
    rows = daemon.state.live_rows()
    flow = daemon.placement.copy(Tier.DEVICE, Tier.HOST, rows, daemon.state.blocks.id[rows].copy())
    daemon.mover.perform(flow.send(None))
    daemon = start()
    assert not daemon.state.blocks.has_copy(daemon.state.live_rows(), Tier.HOST).any()
    assert daemon.recovered.arenas[Tier.HOST].table(0)["id"].any()
    suspended(daemon, lease, 2, B)
    daemon = start()
    bytes_of(daemon, lease, 1, A)


def test_a_copy_that_left_before_it_was_verified_is_not_doubted_when_it_comes_back(
    start: Start,
) -> None:
    daemon = start(device=4, host=0, disk=8)
    lease = daemon.hello()
    suspended(daemon, lease, 1, A)
    daemon = start()
    suspended(daemon, lease, 2, B)
    bytes_of(daemon, lease, 1, A)


def test_an_open_block_in_the_row_of_a_doubted_one_is_not_doubted(start: Start) -> None:
    daemon = start(device=8, host=0, disk=0)
    lease = daemon.hello()
    daemon.store(lease, 1, A[:SIZE])
    # A block of other tokens under the same hash takes the first one's place in the index.
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 2, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 2, 0, SIZE))
    chain, none = chain_of(A[:SIZE]), np.ones(1, np.uint64)
    other = Chain(chain.hi, chain.lo, chain.tokens + 1, chain.extras)
    daemon.run(daemon.planner.seal(lease, 2, 0, other, none, none))
    daemon.write()
    daemon = start()
    row = int(daemon.planner.sequence(lease, 1).rows[0])
    daemon.planner.release(lease, [1])
    daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 3, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 3, 0, 2))
    assert int(daemon.planner.sequence(lease, 3).rows[0]) == row
    daemon.payload(daemon.slots(lease, 3)[0])[:] = tail_content([7])
    daemon.planner.suspend(lease, 3)
    daemon.run(daemon.planner.resume(lease, 3))
    assert np.array_equal(daemon.payload(daemon.slots(lease, 3)[0]), tail_content([7]))


def test_bytes_that_changed_while_no_daemon_ran_are_not_handed_out(start: Start) -> None:
    daemon = start(device=8, host=0, disk=0)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    slots = daemon.slots(lease, 1)
    daemon.planner.release(lease, [1])
    daemon.write()
    daemon.payload(slots[2])[5] ^= 1
    daemon = start()
    assert daemon.cached(A) == 4
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 2, chain_of(A)))
    assert len(view.slots) == 2
    assert daemon.counters.checksum_failures["device"] == 1


def _dies_while_acquiring(daemon: Daemon, lease: int, chain: Chain) -> None:
    """The blocks are on their way up from disk when the daemon goes."""
    daemon.store(lease, 1, A)
    daemon.write_behind()
    daemon.planner.release(lease, [1])
    daemon.placement._drop(Tier.DEVICE, daemon.state.live_rows(), "capacity")
    daemon.write()
    daemon.planner.acquire(lease, daemon.namespace(), 2, chain).send(None)
    daemon.write()


def test_a_prefix_asked_for_again_is_proven_again(start: Start) -> None:
    """Other tokens under the same hashes: the first answer would have found that out."""
    daemon = start(device=8, host=0, disk=8)
    lease = daemon.hello()
    chain = chain_of(A)
    tokens = chain.tokens.copy()
    tokens[2, 1] += 1
    other = Chain(chain.hi, chain.lo, tokens, chain.extras)
    _dies_while_acquiring(daemon, lease, other)
    daemon = start()
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 2, other))
    assert len(view.slots) == 2
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 3, chain))
    assert len(view.slots) == 4


def test_a_prefix_asked_for_again_may_have_become_shorter(start: Start, machine: Machine) -> None:
    daemon = start(device=8, host=0, disk=8)
    lease = daemon.hello()
    _dies_while_acquiring(daemon, lease, chain_of(A))
    row = daemon.planner.sequence(lease, 2).rows[3]
    slot = int(daemon.state.blocks.slot[Tier.DISK][row])
    machine.crash()
    segment = next((machine.folder / "data").glob("*.seg"))
    with segment.open("r+b") as file:
        file.seek(slot * 8192)
        file.write(b"\0")
    daemon = start()
    view = daemon.run(daemon.planner.acquire(lease, daemon.namespace(), 2, chain_of(A)))
    assert len(view.slots) == 3


@pytest.mark.parametrize("field", ["id", "sum_hi", "sum_lo", "check"])
def test_an_entry_of_another_block_or_checksum_makes_the_copy_a_miss(
    start: Start, field: str
) -> None:
    daemon = start(device=8, host=0, disk=0)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    slots = daemon.slots(lease, 1)
    daemon.planner.release(lease, [1])
    daemon.write()
    table = daemon.recovered.arenas[Tier.DEVICE].table(0)
    entry = table[slots[1] : slots[1] + 1]
    entry[field] ^= 1
    if field != "check":
        set_checks(entry)
    daemon = start()
    assert daemon.cached(A) == 1
    assert (daemon.report.tiers[Tier.DEVICE].kept, daemon.report.dropped_blocks) == (3, 1)
