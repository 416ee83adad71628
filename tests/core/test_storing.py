"""Storing out of a stock: what is cached then, what becomes of the stock, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from replaying import check_replay, check_same
from scheduler import Scheduler, SlowTiers, check_nothing_leaked
from world import World

from tierkv.core.ids import Tier
from tierkv.core.invariants import check_invariants
from tierkv.errors import InvalidArgument, LimitExceeded, UnknownSequence

TOKENS = list(range(1000, 1064))
OTHERS = list(range(2000, 2064))


@pytest.fixture
def world() -> Iterator[World]:
    """Room for 16 blocks in each tier; what is logged gives the same state, however replayed."""
    world = World(16, 16, 16)
    yield world
    check_invariants(world.state)
    check_same(world.state, world.replayed())
    check_replay(world.log, world.empty(), world.empty(), Random(1))
    check_nothing_leaked(world)


def cached(world: World, tokens: list[int], tag: bytes = b"") -> int:
    """How many leading blocks are found; their payloads are checked."""
    chain = world.chain(tokens)
    view = world.run(world.planner.acquire(world.lease, world.namespace, 99, chain))
    for block in range(len(view.slots)):
        expected = tag + repr(tokens[: (block + 1) * 4]).encode()
        assert world.payload(view.slots, block) == expected
    world.planner.release(world.lease, [99])
    return len(view.slots)


def slots(world: World, local: int) -> list[int]:
    return world.planner.table(world.planner.sequence(world.lease, local)).slots.tolist()


def spill(world: World) -> None:
    """Everything that nobody holds leaves the device tier."""
    capacity = world.state.slots[Tier.DEVICE, 0].capacity
    world.stock(98, capacity - sum(len(one) for one in world.state.sequences.values()))
    world.planner.release(world.lease, [98])


def test_blocks_are_cached_and_held_by_nobody(world: World) -> None:
    world.stock(1, 3)
    assert world.put(1, 2, TOKENS[:12]) == 3
    assert cached(world, TOKENS[:12]) == 3
    assert len(slots(world, 2)) == 3
    assert not world.planner.has_sequence(world.lease, 1)
    assert world.state.blocks.refs[world.state.live_rows()].sum() == 3
    ((rows, _ids),) = world.planner.take_sealed()
    assert len(rows) == 3


def test_one_stock_follows_the_other(world: World) -> None:
    world.stock(1, 2)
    for local in range(1, 9):
        tokens = list(range(100 * local, 100 * local + 8))
        assert world.put(local, local + 1, tokens) == 2
        assert cached(world, tokens) == 2


def test_a_long_chain_is_stored_in_pieces(world: World) -> None:
    world.stock(1, 4)
    for piece in range(3):
        stored = world.put(piece + 1, piece + 2, TOKENS[: 16 * (piece + 1)], 4 * piece)
        assert stored == 4
    assert cached(world, TOKENS[:48]) == 12


def test_without_the_blocks_before_nothing_is_stored(world: World) -> None:
    world.stock(1, 2)
    before = slots(world, 1)
    assert world.put(1, 2, TOKENS[:16], 2) == -2
    assert slots(world, 1) == before
    assert not world.planner.has_sequence(world.lease, 2)
    assert cached(world, TOKENS[:16]) == 0
    assert world.put(1, 3, TOKENS[:8]) == 2


def test_the_blocks_before_must_have_the_same_tokens(world: World) -> None:
    """A collision of hashes: found by name, but not the block."""
    world.stock(1, 4)
    assert world.put(1, 2, TOKENS[:8]) == 2
    wanted = world.to_store(2, 3, TOKENS[:16], 2)
    wanted.chain.tokens[0, 0] += 1
    stored = world.run(world.planner.store(world.lease, world.namespace, wanted))
    assert len(stored.rows) == 0


def test_cached_twins_are_used_and_their_slots_stay_in_the_stock(world: World) -> None:
    world.stock(1, 4)
    assert world.put(1, 2, TOKENS[:8], room=4) == 2
    world.planner.take_sealed()
    before = slots(world, 2)
    assert world.put(2, 3, TOKENS[:12], tag=b"", room=4) == 3
    after = slots(world, 3)
    assert after[:3] == [*before[:2], before[3]]
    assert len(after) == 4
    assert world.counters.deduplicated_blocks == 2
    ((rows, _ids),) = world.planner.take_sealed()
    assert len(rows) == 1
    assert cached(world, TOKENS[:12]) == 3


def test_if_all_is_cached_the_stock_is_the_same_under_another_name(world: World) -> None:
    world.stock(1, 2)
    assert world.put(1, 2, TOKENS[:8]) == 2
    before = slots(world, 2)
    logged = sum(len(records) for records in world.log)
    assert world.put(2, 3, TOKENS[:8]) == 2
    assert slots(world, 3) == before
    assert sum(len(records) for records in world.log) - logged == 3  # open, push, close


@pytest.mark.parametrize("tag", [b"", b"other "])
def test_a_twin_further_down_gets_the_payload_as_its_device_copy(world: World, tag: bytes) -> None:
    world.stock(1, 2)
    assert world.put(1, 2, TOKENS[:8]) == 2
    spill(world)
    rows = world.state.index.get(
        *(world.chain(TOKENS[:8]).hi, world.chain(TOKENS[:8]).lo),
        *(world.state.blocks.hash_hi, world.state.blocks.hash_lo),
    )
    assert not world.state.blocks.has_copy(rows, Tier.DEVICE).any()
    assert world.put(2, 3, TOKENS[:8], tag=tag) == 2
    assert world.state.blocks.has_copy(rows, Tier.DEVICE).all()
    assert world.state.blocks.has_copy(rows, Tier.HOST).all() == (not tag)
    assert cached(world, TOKENS[:8], tag) == 2


def test_twins_that_are_only_on_disk_are_proven() -> None:
    world = World(4, 0, 16)
    world.stock(1, 2)
    assert world.put(1, 2, TOKENS[:8]) == 2
    spill(world)
    assert world.put(2, 3, TOKENS[:8]) == 2
    assert world.counters.deduplicated_blocks == 2
    assert cached(world, TOKENS[:8]) == 2
    spill(world)
    wanted = world.to_store(3, 4, TOKENS[:8])
    wanted.chain.tokens[1, 0] += 1
    stored = world.run(world.planner.store(world.lease, world.namespace, wanted))
    assert world.counters.deduplicated_blocks == 3
    assert len(stored.rows) == 2


def test_where_there_is_no_room_the_new_stock_is_what_was_left(world: World) -> None:
    world.stock(1, 3)
    world.stock(2, 13)
    assert world.put(1, 3, TOKENS[:8], room=8) == 2
    assert len(slots(world, 3)) == 1
    assert world.put(3, 4, TOKENS[:12], 2, room=8) == 1
    # Room for three was to be had by evicting, but not for eight.
    assert slots(world, 4) == []
    assert cached(world, TOKENS[:12]) == 3


def test_more_room_than_asked_for_is_given_back(world: World) -> None:
    world.stock(1, 8)
    assert world.put(1, 2, TOKENS[:4]) == 1
    assert len(slots(world, 2)) == 1
    assert world.state.slots[Tier.DEVICE, 0].used_count == 2


def test_asked_again_it_answers_again(world: World) -> None:
    world.stock(1, 2)
    wanted = world.to_store(1, 2, TOKENS[:8])
    first = world.run(world.planner.store(world.lease, world.namespace, wanted))
    logged, before = len(world.log), slots(world, 2)
    again = world.run(world.planner.store(world.lease, world.namespace, wanted))
    assert again.ids.tolist() == first.ids.tolist()
    assert len(world.log) == logged
    assert slots(world, 2) == before


def test_what_is_no_stock_is_refused(world: World) -> None:
    world.stock(1, 2)
    world.stock(2, 2)
    with pytest.raises(InvalidArgument, match="there is a sequence 2 already"):
        world.put(1, 2, TOKENS[:8])
    with pytest.raises(InvalidArgument, match="sequence number 0"):
        world.put(1, 0, TOKENS[:8])
    wanted = world.to_store(1, 3, TOKENS[:8])
    world.planner.release(world.lease, [1])
    with pytest.raises(UnknownSequence):
        world.run(world.planner.store(world.lease, world.namespace, wanted))
    other = world.planner.open_namespace(b"o" * 16, world.shape)
    wanted = world.to_store(2, 3, TOKENS[:8])
    with pytest.raises(InvalidArgument, match="of another namespace"):
        world.run(world.planner.store(world.lease, other, wanted))
    world.planner.suspend(world.lease, 2)
    with pytest.raises(InvalidArgument, match="is suspended"):
        world.run(world.planner.store(world.lease, world.namespace, wanted))
    assert cached(world, TOKENS[:8]) == 0


def test_blocks_that_are_not_open_or_not_there_are_refused(world: World) -> None:
    world.stock(1, 3)
    chain = world.chain(TOKENS[:12])
    wanted = world.to_store(1, 2, TOKENS[:12])
    world.planner.truncate(world.lease, 1, 8)
    with pytest.raises(InvalidArgument, match="3 blocks out of a stock of 2"):
        world.run(world.planner.store(world.lease, world.namespace, wanted))
    world.planner.fork(world.lease, 1, 7, 8)
    with pytest.raises(InvalidArgument, match="shared by a fork"):
        world.put(1, 2, TOKENS[:8])
    world.planner.release(world.lease, [7])
    world.run(
        world.planner.seal(
            world.lease, 1, 0, chain.part(0, 1), wanted.sum_hi[:1], wanted.sum_lo[:1]
        )
    )
    with pytest.raises(InvalidArgument, match="are sealed"):
        world.put(1, 2, OTHERS[:8])
    assert sum(world.planner.lookup(world.namespace, chain.hi, chain.lo)) == 1


def test_no_more_blocks_than_the_limit(world: World) -> None:
    world.stock(1, 1)
    with pytest.raises(LimitExceeded):
        world.put(1, 2, TOKENS[:4], room=70_000)
    assert cached(world, TOKENS[:4]) == 0


def test_another_stores_the_same_while_twins_are_looked_for() -> None:
    """Its blocks are found, whichever of the two is first."""
    tiers = SlowTiers(4)
    world = World(8, 0, 8, tiers=tiers)
    scheduler = Scheduler(world, tiers, Random(0))
    world.stock(1, 2)
    assert world.put(1, 2, TOKENS[:8]) == 2
    world.stock(3, 6)  # they leave for the disk, and are to be proven there
    world.planner.release(world.lease, [3])
    world.stock(4, 2)
    answers = {}
    for stock, new in ((2, 5), (4, 6)):
        flow = world.storing(world.to_store(stock, new, TOKENS[:8]))
        scheduler.start(f"{stock}", flow, lambda result, new=new: answers.update({new: result}))
    scheduler.drain(lambda: check_invariants(world.state))
    assert answers[5].ids.tolist() == answers[6].ids.tolist()
    assert len(np.unique(slots(world, 5) + slots(world, 6))) == 4
    check_nothing_leaked(world)


def test_a_stock_that_is_released_meanwhile_is_not_stored() -> None:
    tiers = SlowTiers(4)
    world = World(4, 0, 8, tiers=tiers)
    scheduler = Scheduler(world, tiers, Random(0))
    world.stock(1, 2)
    assert world.put(1, 2, TOKENS[:8]) == 2
    world.stock(3, 2)
    answers = []
    wanted = world.to_store(2, 5, TOKENS[:8])
    scheduler.start(
        "store", world.planner.store(world.lease, world.namespace, wanted), answers.append
    )
    assert not answers
    world.planner.release(world.lease, [2])
    scheduler.drain(lambda: check_invariants(world.state))
    assert isinstance(answers[0], UnknownSequence)
    assert not world.planner.has_sequence(world.lease, 5)
    check_nothing_leaked(world)
