"""The core on make-believe tiers, in states that only a restart brings about."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.world import World
from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.records import Kind, blank
from tierkv.service.undo import _drop_stale_copies

TOKENS = list(range(1000, 1040))
OTHERS = list(range(2000, 2040))


def restart(world: World) -> None:
    """All leases stay; device copies are unverified, as after a recovery."""
    rows = world.state.live_rows()
    world._assemble()
    world.placement.doubt.mark(rows)
    world.placement.list_all()


def begin(world: World, local: int, tokens: list[int]):
    return world.run(
        world.planner.acquire(world.lease, world.namespace, local, world.chain(tokens))
    )


def damage(world: World, slot: int) -> None:
    world.tiers.at(Tier.DEVICE, 0, slot).payload = b"damaged"


def test_blocks_that_left_the_device_tier_and_came_back_are_not_doubted() -> None:
    world = World(4, 8, 0)
    world.store(1, TOKENS[:12])
    world.planner.release(world.lease, [1])
    restart(world)
    world.store(2, OTHERS[:16])
    world.planner.release(world.lease, [2])
    assert world.planner.lookup(
        world.namespace, world.chain(TOKENS[:12]).hi, world.chain(TOKENS[:12]).lo
    ) == (0, 3, 0)
    view = begin(world, 3, TOKENS[:12])
    assert len(view.slots) == 3
    check_invariants(world.state)


def test_a_new_block_in_the_row_of_a_doubted_one_is_not_doubted() -> None:
    world = World(4, 0, 0)
    world.store(1, TOKENS[:16])
    world.planner.release(world.lease, [1])
    restart(world)
    view = world.run(world.planner.acquire(world.lease, world.namespace, 2, world.chain([])))
    view = world.run(world.planner.reserve(world.lease, 2, 0, 16))
    world.write(view.slots, 0, [b"not full yet"] * 4)
    world.planner.suspend(world.lease, 2)
    view = world.run(world.planner.resume(world.lease, 2))
    assert [world.payload(view.slots, n) for n in range(4)] == [b"not full yet"] * 4
    assert world.counters.checksum_failures["device"] == 0
    check_invariants(world.state)


def test_a_damaged_twin_is_never_put_in_place_of_a_workers_own_block() -> None:
    world = World(8, 0, 0)
    first = world.store(1, TOKENS[:8])
    world.planner.release(world.lease, [1])
    damage(world, first.slots[1])
    restart(world)
    begin(world, 2, TOKENS[:4])
    view = world.run(world.planner.reserve(world.lease, 2, 4, 8))
    hi, lo = world.write(view.slots, 1, [b"right"])
    view = world.run(
        world.planner.seal(world.lease, 2, 1, world.chain(TOKENS[:8]).part(1, 2), hi, lo)
    )
    assert world.payload(view.slots, 1) == b"right"
    assert world.counters.checksum_failures["device"] == 1
    assert world.payload(begin(world, 3, TOKENS[:8]).slots, 1) == b"right"
    check_invariants(world.state)


def test_a_damaged_twin_that_somebody_has_mapped_is_replaced_for_the_others() -> None:
    world = World(8, 0, 0)
    first = world.store(1, TOKENS[:8])
    damage(world, first.slots[1])
    restart(world)
    begin(world, 2, TOKENS[:4])
    view = world.run(world.planner.reserve(world.lease, 2, 4, 8))
    hi, lo = world.write(view.slots, 1, [b"right"])
    chain = world.chain(TOKENS[:8]).part(1, 2)
    view = world.run(world.planner.seal(world.lease, 2, 1, chain, hi, lo))
    assert world.payload(view.slots, 1) == b"right"
    assert np.array_equal(
        world.planner.table(world.planner.sequence(world.lease, 1)).slots,
        first.slots,
    )
    check_invariants(world.state)


def test_a_begin_that_is_repeated_after_a_restart_is_checked_like_the_first() -> None:
    world = World(8, 0, 0)
    first = world.store(1, TOKENS[:8])
    begin(world, 2, TOKENS[:8])
    world.planner.release(world.lease, [1])
    damage(world, first.slots[1])
    restart(world)
    assert len(begin(world, 2, TOKENS[:8]).slots) == 1
    assert len(world.planner.sequence(world.lease, 2)) == 1
    check_invariants(world.state)


def test_a_copy_of_a_block_that_its_worker_writes_on_in_does_not_count() -> None:
    world = World(4, 4, 0)
    world.run(world.planner.acquire(world.lease, world.namespace, 1, world.chain([])))
    view = world.run(world.planner.reserve(world.lease, 1, 0, 4))
    world.write(view.slots, 0, [b"half"])
    world.planner.suspend(world.lease, 1)
    rows = world.planner.sequence(world.lease, 1).rows
    ids = world.state.blocks.id[rows].copy()
    copying = world.placement.copy(Tier.DEVICE, Tier.HOST, rows, ids)
    move = copying.send(None)
    assert isinstance(move, Move)
    world.run(world.planner.resume(world.lease, 1))
    world.write(view.slots, 0, [b"more"])
    with pytest.raises(StopIteration):
        copying.send(world.tiers.perform(move))
    assert not world.state.blocks.has_copy(rows, Tier.HOST).any()
    world.planner.suspend(world.lease, 1)
    world.store(2, OTHERS[:16])
    world.planner.release(world.lease, [2])
    view = world.run(world.planner.resume(world.lease, 1))
    assert world.payload(view.slots, 0) == b"more"
    check_invariants(world.state)


def test_a_twin_with_the_same_payload_keeps_its_copies_below() -> None:
    world = World(4, 0, 8)
    world.store(1, TOKENS[:8])
    world.planner.release(world.lease, [1])
    view = begin(world, 2, [])
    view = world.run(world.planner.reserve(world.lease, 2, 0, 16))
    hi, lo = world.write(view.slots, 0, [repr(TOKENS[:4]).encode(), b"another run's rounding"])
    world.run(world.planner.seal(world.lease, 2, 0, world.chain(TOKENS[:8]), hi, lo))
    rows = world.planner.sequence(world.lease, 2).rows[:2]
    assert world.state.blocks.has_copy(rows, Tier.DEVICE).tolist() == [True, True]
    assert world.state.blocks.has_copy(rows, Tier.DISK).tolist() == [True, False]
    check_invariants(world.state)


def test_recovery_forgets_copies_of_blocks_that_a_worker_may_have_written_on_in() -> None:
    world = World(4, 4, 0)
    world.run(world.planner.acquire(world.lease, world.namespace, 1, world.chain([])))
    world.write(world.run(world.planner.reserve(world.lease, 1, 0, 4)).slots, 0, [b"half"])
    world.planner.suspend(world.lease, 1)
    sequence = world.planner.sequence(world.lease, 1)
    rows = sequence.rows
    world.run(world.placement.copy(Tier.DEVICE, Tier.HOST, rows, world.state.blocks.id[rows]))
    resumed = blank(1, Kind.SEQ_RESUME)
    resumed["id"] = sequence.id
    world.commit(resumed)  # the last record before the crash
    _drop_stale_copies(world.state, sequence)
    assert world.state.blocks.has_copy(rows, Tier.DEVICE).all()
    assert not world.state.blocks.has_copy(rows, Tier.HOST).any()
    check_invariants(world.state)
