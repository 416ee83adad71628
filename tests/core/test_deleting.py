"""Deleting blocks: who may still have them, and when."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest
from scheduler import Scheduler, SlowTiers, check_nothing_leaked
from world import World

from tierkv.core.counters import NEW_BLOCKS
from tierkv.core.deleting import Deleted, Deleter
from tierkv.core.ids import Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.records import Kind, blank
from tierkv.errors import InvariantViolation

IDS = list(range(16))


def found(world: World, tokens: list[int]) -> int:
    chain = world.chain(tokens)
    return sum(world.planner.lookup(world.namespace, chain.hi, chain.lo))


def sound(world: World) -> None:
    check_invariants(world.state)
    world.check_shown()
    world.check_deleted()


def test_a_deleted_block_and_all_that_follow_it_are_gone() -> None:
    world = World(device=8, host=0, disk=8)
    world.store(1, IDS)
    world.store(2, [*IDS[:8], 50, 51, 52, 53])
    world.planner.release(world.lease, [1, 2])
    done = world.delete(IDS[:8])
    assert (done.blocks, done.stay) == (4, 0)
    assert found(world, IDS) == 1
    assert world.state.row_set.used_count == 1
    assert world.state.copies(Tier.DEVICE) == 1
    sound(world)


def test_who_has_them_keeps_them_and_goes_on_without_names() -> None:
    world = World(device=8, host=2, disk=4)
    view = world.store(1, IDS[:8])
    before = [world.payload(view.slots, block) for block in range(2)]
    assert world.delete(IDS[:4]).stay == 2
    assert found(world, IDS[:8]) == 0
    view = world.store(1, IDS[:8])  # resumes it, as after a reconnect
    assert view.sealed == 2
    assert [world.payload(view.slots, block) for block in range(2)] == before
    view = world.run(world.planner.reserve(world.lease, 1, 8, 12))
    hi, lo = world.write(view.slots, 2, [b"third"])
    chain = world.chain(IDS[:12]).part(2, 3)
    assert world.run(world.planner.seal(world.lease, 1, 2, chain, hi, lo)).sealed == 3
    assert found(world, IDS[:12]) == 0
    sound(world)
    world.store(2, IDS[:8])
    assert found(world, IDS[:8]) == 2
    world.planner.release(world.lease, [1])
    assert world.state.row_set.used_count == 2
    sound(world)


def test_asleep_they_spill_and_come_back_and_are_found_by_nobody() -> None:
    world = World(device=4, host=0, disk=8)
    world.store(1, IDS[:8])
    world.planner.suspend(world.lease, 1)
    world.delete(IDS[:4])
    world.store(2, [90 + n for n in range(16)])
    assert world.state.copies(Tier.DISK) >= 2
    world.planner.release(world.lease, [2])
    world.run(world.planner.resume(world.lease, 1))
    sound(world)


def test_slots_that_they_left_show_nothing() -> None:
    world = World(device=4, host=0, disk=8)
    world.store(1, IDS)
    world.planner.release(world.lease, [1])
    slots = world.run(world.placement.room(Tier.DEVICE, 0, 2, NEW_BLOCKS))
    world.placement.unhold_slots(Tier.DEVICE, 0, slots)
    shown = [world.tiers.at(Tier.DEVICE, 0, slot).shown for slot in slots]
    assert None not in shown
    world.delete(IDS[:4])
    sound(world)


def test_what_a_move_reads_is_waited_for() -> None:
    """Its copy arrives first, and goes with the block."""
    tiers = SlowTiers(4)
    world = World(device=4, host=0, disk=8, tiers=tiers)
    world.store(1, IDS[:8])
    world.planner.release(world.lease, [1])
    rows = world.state.live_rows()
    ids = world.state.blocks.id[rows].copy()
    world.deleted.update(ids.tolist())
    done: dict[str, object] = {}
    tasks = Scheduler(world, tiers, Random(1))
    copying = world.placement.copy(Tier.DEVICE, Tier.DISK, rows[:1], ids[:1])
    tasks.start("copy", copying, partial(done.__setitem__, "copied"))
    deleting = Deleter(world.placement).delete(rows[::-1], ids[::-1])
    tasks.start("delete", deleting, partial(done.__setitem__, "deleted"))
    assert world.state.live_rows().tolist() == rows[:1].tolist()
    tasks.drain()
    assert done == {"copied": 1, "deleted": Deleted(2, 0)}
    assert world.state.row_set.used_count == 0
    check_nothing_leaked(world)
    sound(world)


def test_an_open_block_has_no_name_to_be_deleted_by() -> None:
    world = World(device=4, host=0, disk=0)
    world.run(world.planner.acquire(world.lease, world.namespace, 1, world.chain([])))
    world.run(world.planner.reserve(world.lease, 1, 0, 4))
    records = blank(1, Kind.DELETE)
    records["key"] = row = world.state.live_rows()
    records["id"] = world.state.blocks.id[row]
    with pytest.raises(InvariantViolation, match="an open block was deleted"):
        world.state.apply(records)
    assert np.array_equal(world.state.live_rows(), row)
