"""Cases that take several unlikely things at once: what they must not break."""

from __future__ import annotations

import numpy as np
import pytest
from world import World

from tierkv.core.ids import Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.state import State
from tierkv.errors import CorruptionError

TOKENS = list(range(1000, 1040))
OTHER = list(range(2000, 2040))


def begin(world: World, local: int, tokens: list[int]):
    return world.run(
        world.planner.acquire(world.lease, world.namespace, local, world.chain(tokens))
    )


def reserve(world: World, local: int, written: int, total: int):
    return world.run(world.planner.reserve(world.lease, local, written, total))


def test_a_damaged_block_that_must_be_copied_is_an_error_not_an_endless_try() -> None:
    world = World(4, 0, 0)
    view = world.store(1, TOKENS[:8])
    world.tiers.at(Tier.DEVICE, 0, view.slots[1]).payload = b"rot"
    world.planner.truncate(world.lease, 1, 6)
    flow = world.planner.reserve(world.lease, 1, 6, 8)
    move = next(flow)
    with pytest.raises(CorruptionError):
        flow.send(world.tiers.perform(move))
    check_invariants(world.state)
    assert world.state.slots[Tier.DEVICE, 0].held_count == 0


def test_a_damaged_block_that_somebody_has_mapped_is_no_hit_when_the_device_tier_is_full() -> None:
    world = World(3, 4, 0)
    world.store(1, TOKENS[:8])
    world.planner.release(world.lease, [1])
    world.store(2, OTHER[:8])
    view = begin(world, 3, TOKENS[:4])
    assert len(view.slots) == 1
    world.placement.doubt.mark(world.state.live_rows())
    world.tiers.at(Tier.DEVICE, 0, view.slots[0]).payload = b"rot"
    assert len(begin(world, 4, TOKENS[:8]).slots) == 0


@pytest.mark.parametrize("commits", [1, 3, 10_000])
def test_replay_does_not_care_how_commits_were_put_into_frames(commits: int) -> None:
    world = World(4, 2, 8)
    for local in range(1, 12):
        world.store(local, [local % 3 * 10 + token for token in range(12)])
        if local % 2:
            world.planner.suspend(world.lease, local)
        else:
            world.planner.release(world.lease, [local])
    replayed = State(world.budgets, lambda _tier, shape: shape.block_bytes)
    for at in range(0, len(world.log), commits):
        replayed.apply(np.concatenate(world.log[at : at + commits]))
    check_invariants(replayed)
    rows = world.state.live_rows()
    assert np.array_equal(rows, replayed.live_rows())
    assert np.array_equal(world.state.blocks.export(rows), replayed.blocks.export(rows))
    for name, sequence in world.state.sequences.items():
        assert np.array_equal(sequence.rows, replayed.sequences[name].rows)
