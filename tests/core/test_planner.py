"""The verbs on make-believe tiers: what a worker may rely on."""

from __future__ import annotations

import numpy as np
import pytest
from world import SHAPE, World

from tierkv.core.effects import Effect, Move
from tierkv.core.ids import Tier
from tierkv.core.inline import run_inline
from tierkv.core.invariants import active_without_device_copy, check_invariants
from tierkv.core.records import Kind, blank
from tierkv.errors import (
    CorruptionError,
    InvalidArgument,
    InvariantViolation,
    LeaseLost,
    LimitExceeded,
    NotOwner,
    PoolExhausted,
    TierFailed,
    UnknownNamespace,
    UnknownSequence,
)

TOKENS = list(range(1000, 1040))


def begin(world: World, local: int, tokens: list[int]):
    return world.run(
        world.planner.acquire(world.lease, world.namespace, local, world.chain(tokens))
    )


def released(world: World, *locals_: int) -> None:
    world.planner.release(world.lease, list(locals_))
    check_invariants(world.state)


def test_a_cached_prefix_is_found_and_shared() -> None:
    world = World(16, 16, 16)
    first = world.store(1, TOKENS[:16])
    view = begin(world, 2, [*TOKENS[:12], 7, 7, 7, 7])
    assert view.slots.tolist() == first.slots[:3].tolist()
    assert view.sealed == 3
    assert view.by_tier == (3, 0, 0)
    check_invariants(world.state)


def test_what_workers_read_by_themselves_counts_as_used() -> None:
    world = World(4, 0, 0)
    world.store(1, TOKENS[:8])
    world.store(2, TOKENS[8:16])
    released(world, 1, 2)
    chain = world.chain(TOKENS[:8])
    world.planner.used(world.namespace, chain.hi[::-1], chain.lo[::-1], 3)
    world.store(3, TOKENS[16:24])
    assert sum(world.planner.lookup(world.namespace, chain.hi, chain.lo)) == 2
    assert world.counters.lookup_tokens - 3 * 8 == (2 + 3) * 4
    assert world.counters.hit_tokens["device"] == 2 * 4
    gone = world.chain(TOKENS[8:16])
    assert sum(world.planner.lookup(world.namespace, gone.hi, gone.lo)) == 0
    world.planner.used(world.namespace, gone.hi, gone.lo, 0)
    check_invariants(world.state)
    with pytest.raises(UnknownNamespace):
        world.planner.used(world.namespace + 1, chain.hi, chain.lo, 0)


def test_a_block_outlives_the_end_of_one_of_its_sequences() -> None:
    world = World(4, 0, 0)
    world.store(1, TOKENS[:8])
    view = begin(world, 2, TOKENS[:8])
    released(world, 1)
    assert world.payload(view.slots, 1) == repr(TOKENS[:8]).encode()
    with pytest.raises(PoolExhausted):
        world.store(3, list(range(12)))
    assert world.payload(view.slots, 0) == repr(TOKENS[:4]).encode()


def test_victims_go_leaf_first_so_that_the_rest_stays_usable() -> None:
    world = World(4, 0, 0)
    world.store(1, TOKENS[:16])
    released(world, 1)
    world.store(2, [1, 2, 3, 4])
    chain = world.chain(TOKENS[:16])
    assert world.planner.lookup(world.namespace, chain.hi, chain.lo) == (3, 0, 0)
    check_invariants(world.state)


def test_victims_spill_down_and_come_back_with_their_bytes() -> None:
    world = World(4, 4, 16)
    prompts = [[n * 100 + t for t in range(16)] for n in range(4)]
    for local, prompt in enumerate(prompts, 1):
        world.store(local, prompt)
        released(world, local)
    chain = world.chain(prompts[0])
    assert world.planner.lookup(world.namespace, chain.hi, chain.lo) == (0, 0, 4)
    view = begin(world, 9, prompts[0])
    assert view.by_tier == (0, 0, 4)
    for block in range(4):
        assert world.payload(view.slots, block) == repr(prompts[0][: (block + 1) * 4]).encode()
    check_invariants(world.state)
    assert active_without_device_copy(world.state) == 0


def test_a_prefix_larger_than_the_device_tier_is_served_as_far_as_it_fits() -> None:
    world = World(6, 0, 64)
    world.store(1, TOKENS[:24])
    world.planner.suspend(world.lease, 1)
    world.store(2, [5] * 16)
    view = begin(world, 3, TOKENS[:24])
    assert 0 < len(view.slots) < 6
    check_invariants(world.state)


def test_allocation_is_all_or_nothing() -> None:
    world = World(4, 4, 4)
    world.store(1, TOKENS[:12])
    begin(world, 2, [])
    before = world.state.used_bytes(Tier.DEVICE)
    with pytest.raises(PoolExhausted) as caught:
        world.run(world.planner.reserve(world.lease, 2, 0, 8))
    assert caught.value.details == {"tier": "device", "asked": 2, "free": 1, "evictable": 0}
    assert world.state.used_bytes(Tier.DEVICE) == before
    world.run(world.planner.reserve(world.lease, 2, 0, 4))
    check_invariants(world.state)


def test_reserve_is_idempotent_and_absolute() -> None:
    world = World(8, 0, 0)
    begin(world, 1, [])
    first = world.run(world.planner.reserve(world.lease, 1, 0, 10))
    again = world.run(world.planner.reserve(world.lease, 1, 0, 10))
    assert first.slots.tolist() == again.slots.tolist()
    assert len(first.slots) == 3


def test_sealing_twice_is_the_same_as_once_but_not_under_another_name() -> None:
    world = World(8, 0, 0)
    view = world.store(1, TOKENS[:8])
    chain = world.chain(TOKENS[:8])
    zero = np.zeros(2, np.uint64)
    again = world.run(world.planner.seal(world.lease, 1, 0, chain, zero, zero))
    assert again.slots.tolist() == view.slots.tolist()
    with pytest.raises(InvalidArgument, match="another hash"):
        world.run(world.planner.seal(world.lease, 1, 0, world.chain([9] * 8), zero, zero))


def test_sealing_what_is_cached_takes_the_cached_block() -> None:
    world = World(8, 0, 0)
    first = world.store(1, TOKENS[:8])
    begin(world, 2, [])
    view = world.run(world.planner.reserve(world.lease, 2, 0, 8))
    hi, lo = world.write(view.slots, 0, [b"x", b"y"])
    chain = world.chain(TOKENS[:8])
    view = world.run(world.planner.seal(world.lease, 2, 0, chain, hi, lo))
    assert view.slots.tolist() == first.slots.tolist()
    assert world.state.slots[Tier.DEVICE, 0].used_count == 2
    check_invariants(world.state)


@pytest.mark.parametrize("host", [0, 8])
def test_sealing_what_is_only_further_down_keeps_the_chain_and_the_fresh_bytes(host: int) -> None:
    world = World(4, host, 16)
    world.store(1, TOKENS[:16])
    released(world, 1)
    world.store(2, [7] * 16)
    released(world, 2)
    begin(world, 3, [])
    view = world.run(world.planner.reserve(world.lease, 3, 0, 4))
    hi, lo = world.write(view.slots, 0, [b"fresh"])
    view = world.run(world.planner.seal(world.lease, 3, 0, world.chain(TOKENS[:4]), hi, lo))
    check_invariants(world.state)
    assert world.payload(view.slots, 0) == b"fresh"
    released(world, 3)
    chain = world.chain(TOKENS[:16])
    assert sum(world.planner.lookup(world.namespace, chain.hi, chain.lo)) == 4
    view = begin(world, 4, TOKENS[:16])
    assert world.payload(view.slots, 3) == repr(TOKENS[:16]).encode()
    assert world.payload(view.slots, 0) == b"fresh"


def test_a_hash_collision_is_a_miss_and_is_replaced() -> None:
    world = World(8, 0, 0)
    world.store(1, TOKENS[:8])
    forged = world.chain([1, 2, 3, 4, 5, 6, 7, 8])
    real = world.chain(TOKENS[:8])
    forged.hi[:], forged.lo[:] = real.hi, real.lo
    view = world.run(world.planner.acquire(world.lease, world.namespace, 2, forged))
    assert len(view.slots) == 0
    view = world.run(world.planner.reserve(world.lease, 2, 0, 8))
    hi, lo = world.write(view.slots, 0, [b"p", b"q"])
    world.run(world.planner.seal(world.lease, 2, 0, forged, hi, lo))
    check_invariants(world.state)
    view = world.run(world.planner.acquire(world.lease, world.namespace, 3, forged))
    assert world.payload(view.slots, 1) == b"q"
    assert world.counters.mismatched_blocks >= 1
    released(world, 1, 2, 3)


def test_a_collision_on_disk_is_found_when_the_block_comes_up() -> None:
    world = World(4, 0, 16)
    world.store(1, TOKENS[:16])
    released(world, 1)
    world.store(2, [7] * 16)
    released(world, 2)
    forged = world.chain(list(range(16)))
    real = world.chain(TOKENS[:16])
    forged.hi[:], forged.lo[:] = real.hi, real.lo
    view = world.run(world.planner.acquire(world.lease, world.namespace, 3, forged))
    assert len(view.slots) == 0
    check_invariants(world.state)


def test_the_parent_is_part_of_the_proof() -> None:
    world = World(8, 0, 0)
    world.store(1, TOKENS[:8])
    chain = world.chain([9, 9, 9, 9, *TOKENS[4:8]])
    world.store(2, [9, 9, 9, 9])
    chain.hi[1], chain.lo[1] = world.chain(TOKENS[:8]).hi[1], world.chain(TOKENS[:8]).lo[1]
    view = world.run(world.planner.acquire(world.lease, world.namespace, 3, chain))
    assert len(view.slots) == 1


def test_extra_keys_are_part_of_the_proof() -> None:
    world = World(8, 0, 0)
    world.store(1, TOKENS[:8])
    chain = world.chain(TOKENS[:8])
    chain.extras[1] = 77
    view = world.run(world.planner.acquire(world.lease, world.namespace, 2, chain))
    assert len(view.slots) == 1


def test_a_fork_shares_and_copies_on_write() -> None:
    world = World(8, 0, 0)
    world.store(1, TOKENS[:8])
    view = world.run(world.planner.reserve(world.lease, 1, 8, 10))
    world.write(view.slots, 2, [b"partial"])
    fork = world.planner.fork(world.lease, 1, 2, 10)
    assert fork.slots.tolist() == view.slots.tolist()
    mine = world.run(world.planner.reserve(world.lease, 2, 10, 12))
    assert mine.slots[:2].tolist() == view.slots[:2].tolist()
    assert mine.slots[2] != view.slots[2]
    assert world.payload(mine.slots, 2) == b"partial"
    check_invariants(world.state)
    theirs = world.run(world.planner.reserve(world.lease, 1, 10, 12))
    assert theirs.slots.tolist() == view.slots.tolist()
    released(world, 1)
    assert world.payload(mine.slots, 0) == repr(TOKENS[:4]).encode()


def test_rolling_back_into_a_sealed_block_copies_it_before_it_is_written() -> None:
    world = World(8, 0, 0)
    view = world.store(1, TOKENS[:8])
    world.planner.truncate(world.lease, 1, 6)
    after = world.run(world.planner.reserve(world.lease, 1, 6, 12))
    assert after.slots[0] == view.slots[0]
    assert after.slots[1] != view.slots[1]
    assert world.payload(after.slots, 1) == repr(TOKENS[:8]).encode()
    assert len(after.slots) == 3
    assert after.sealed == 1
    check_invariants(world.state)


def test_partial_blocks_are_never_shared() -> None:
    world = World(8, 0, 0)
    begin(world, 1, TOKENS[:6])
    world.run(world.planner.reserve(world.lease, 1, 0, 6))
    assert len(begin(world, 2, TOKENS[:6]).slots) == 0
    released(world, 1, 2)
    assert world.state.used_bytes(Tier.DEVICE) == 0


def test_five_sequences_fit_a_pool_for_two_when_they_take_turns() -> None:
    world = World(4, 4, 16)
    prompts = [[n * 50 + t for t in range(8)] for n in range(5)]
    for local, prompt in enumerate(prompts, 1):
        world.store(local, prompt)
        world.planner.suspend(world.lease, local)
        check_invariants(world.state)
    for local, prompt in enumerate(prompts, 1):
        view = world.run(world.planner.resume(world.lease, local))
        assert [world.payload(view.slots, b) for b in range(2)] == [
            repr(prompt[: (b + 1) * 4]).encode() for b in range(2)
        ]
        world.planner.suspend(world.lease, local)
        check_invariants(world.state)


def test_a_suspended_partial_block_keeps_its_bytes_and_can_be_written_on() -> None:
    world = World(2, 0, 8)
    begin(world, 1, [])
    view = world.run(world.planner.reserve(world.lease, 1, 0, 2))
    world.write(view.slots, 0, [b"half"])
    for _ in range(2):
        world.planner.suspend(world.lease, 1)
        world.store(2, [1, 2, 3, 4, 5, 6, 7, 8])
        released(world, 2)
        view = world.run(world.planner.resume(world.lease, 1))
        assert world.payload(view.slots, 0).startswith(b"half")
        world.write(view.slots, 0, [world.payload(view.slots, 0) + b"+"])
        row = world.planner.sequence(world.lease, 1).rows
        assert not world.state.blocks.has_copy(row, Tier.DISK).any()
        check_invariants(world.state)
    assert world.payload(view.slots, 0) == b"half++"


def test_resume_without_room_leaves_the_sequence_suspended() -> None:
    world = World(2, 0, 8)
    world.store(1, TOKENS[:8])
    world.planner.suspend(world.lease, 1)
    world.store(2, [3] * 8)
    with pytest.raises(PoolExhausted):
        world.run(world.planner.resume(world.lease, 1))
    assert world.planner.sequence(world.lease, 1).suspended
    released(world, 2)
    assert len(world.run(world.planner.resume(world.lease, 1)).slots) == 2
    check_invariants(world.state)


def test_a_damaged_copy_is_a_miss_and_the_prefix_before_it_is_served() -> None:
    world = World(4, 0, 16)
    world.store(1, TOKENS[:16])
    released(world, 1)
    world.store(2, [7] * 16)
    released(world, 2)
    row = int(
        world.state.index.get(
            world.chain(TOKENS).hi[2:3],
            world.chain(TOKENS).lo[2:3],
            world.state.blocks.hash_hi,
            world.state.blocks.hash_lo,
        )[0]
    )
    world.tiers.at(Tier.DISK, 0, world.state.blocks.slot[Tier.DISK][row]).payload = b"rotten"
    view = begin(world, 3, TOKENS[:16])
    assert len(view.slots) == 2
    assert world.counters.checksum_failures["disk"] == 1
    check_invariants(world.state)


def test_a_damaged_block_of_a_suspended_sequence_is_reported_as_lost() -> None:
    world = World(2, 0, 8)
    world.store(1, TOKENS[:8])
    world.planner.suspend(world.lease, 1)
    world.store(2, [3] * 8)
    released(world, 2)
    row = world.planner.sequence(world.lease, 1).rows[1]
    world.tiers.at(Tier.DISK, 0, world.state.blocks.slot[Tier.DISK][row]).payload = b"rotten"
    with pytest.raises(CorruptionError) as caught:
        world.run(world.planner.resume(world.lease, 1))
    assert caught.value.details["blocks"] == 1
    assert world.planner.sequence(world.lease, 1).suspended
    view = world.run(world.planner.resume(world.lease, 1))
    assert world.payload(view.slots, 0) == repr(TOKENS[:4]).encode()
    assert len(view.slots) == 1
    check_invariants(world.state)


def test_a_disk_that_refuses_to_be_read_costs_a_hit_and_no_block() -> None:
    world = World(4, 0, 16)
    world.store(1, TOKENS[:16])
    released(world, 1)
    world.store(2, [7] * 12)
    released(world, 2)
    chain = world.chain(TOKENS[:16])
    here = world.planner.lookup(world.namespace, chain.hi, chain.lo)
    assert here == (1, 0, 3)

    def refuse(effect: Effect) -> object:
        if isinstance(effect, Move) and effect.source is Tier.DISK:
            raise TierFailed("input/output error")
        return world.tiers.perform(effect)

    acquire = world.planner.acquire(world.lease, world.namespace, 3, chain)
    assert len(run_inline(acquire, refuse).slots) == 1
    check_invariants(world.state)
    released(world, 3)
    assert sum(world.planner.lookup(world.namespace, chain.hi, chain.lo)) == 4
    view = begin(world, 4, TOKENS[:16])
    assert world.payload(view.slots, 3) == repr(TOKENS[:16]).encode()
    world.planner.suspend(world.lease, 4)
    world.store(5, [8] * 12)
    released(world, 5)
    with pytest.raises(TierFailed):
        run_inline(world.planner.resume(world.lease, 4), refuse)
    assert world.planner.sequence(world.lease, 4).suspended
    assert len(world.run(world.planner.resume(world.lease, 4)).slots) == 4
    check_invariants(world.state)


def test_one_block_that_cannot_be_read_does_not_cost_those_before_it() -> None:
    world = World(4, 0, 16)
    world.store(1, TOKENS[:16])
    unreadable = world.state.blocks.id[world.planner.sequence(world.lease, 1).rows[2]]
    released(world, 1)
    world.store(2, [7] * 16)
    released(world, 2)

    def refuse(effect: Effect) -> object:
        if isinstance(effect, Move) and effect.source is Tier.DISK and unreadable in effect.ids:
            raise TierFailed("input/output error")
        return world.tiers.perform(effect)

    chain = world.chain(TOKENS[:16])
    assert world.planner.lookup(world.namespace, chain.hi, chain.lo) == (0, 0, 4)
    acquire = world.planner.acquire(world.lease, world.namespace, 3, chain)
    view = run_inline(acquire, refuse)
    assert [world.payload(view.slots, at) for at in range(len(view.slots))] == [
        repr(TOKENS[:4]).encode(),
        repr(TOKENS[:8]).encode(),
    ]
    check_invariants(world.state)


def test_the_end_of_a_lease_leaves_no_reference() -> None:
    world = World(8, 0, 0)
    other = world.planner.open_lease(b"u" * 16, 5, 6, 7).id
    world.run(world.planner.acquire(other, world.namespace, 1, world.chain([])))
    world.run(world.planner.reserve(other, 1, 0, 12))
    world.store(1, TOKENS[:8])
    world.planner.close_lease(other)
    check_invariants(world.state)
    assert world.state.used_bytes(Tier.DEVICE) == 2 * SHAPE.block_bytes


def test_a_block_that_is_a_candidate_twice_is_written_once() -> None:
    """Sealed, spilled, and brought up as a twin before it was written: the queue has it twice."""
    world = World(4, 0, 16)
    world.store(1, TOKENS[:16])
    rows, ids = world.planner.take_sealed()[-1]
    twice, names = np.concatenate([rows, rows[:2]]), np.concatenate([ids, ids[:2]])
    assert world.run(world.placement.clean_down(twice, names)) == len(rows)
    assert world.state.slots[Tier.DISK, 0].used_count == len(rows)
    check_invariants(world.state)
    check_invariants(world.replayed())


def test_eviction_does_not_go_on_with_a_state_that_is_broken() -> None:
    """Some of the blocks have left by then: another try would start from the middle."""
    world = World(4, 0, 0)
    world.store(1, TOKENS[:16])
    released(world, 1)
    state, (row,) = world.state, world.state.live_rows()[1:2]
    state.index.remove(np.array([row]), state.blocks.hash_hi, state.blocks.hash_lo)
    with pytest.raises(InvariantViolation, match="in the hash table"):
        world.store(2, [8] * 16)


def test_write_behind_makes_eviction_free() -> None:
    world = World(4, 0, 16)
    world.store(1, TOKENS[:16])
    rows, ids = world.planner.take_sealed()[-1]
    assert world.run(world.placement.clean_down(rows, ids)) == 4
    released(world, 1)
    before = world.tiers.moves
    world.store(2, [8] * 16)
    assert world.tiers.moves == before
    check_invariants(world.state)


def test_pools_of_different_block_size_share_one_budget() -> None:
    from tierkv.core.state import PoolShape

    world = World(8, 0, 0)
    world.store(1, TOKENS[:32])
    released(world, 1)
    big = world.planner.open_namespace(b"m" * 16, PoolShape(256, 4))
    world.run(world.planner.acquire(world.lease, big, 2, world.chain([])))
    world.run(world.planner.reserve(world.lease, 2, 0, 4))
    assert world.tiers.punched == 4
    check_invariants(world.state)
    with pytest.raises(PoolExhausted):
        world.run(world.planner.reserve(world.lease, 2, 0, 12))
    check_invariants(world.state)


def test_replaying_the_log_gives_the_same_state() -> None:
    world = World(4, 2, 8)
    for local in range(1, 9):
        world.store(local, [local % 3 * 10 + t for t in range(12)])
        if local % 2:
            world.planner.suspend(world.lease, local)
        else:
            released(world, local)
    twin = world.replayed()
    check_invariants(twin)
    rows = world.state.live_rows()
    assert np.array_equal(rows, twin.live_rows())
    assert np.array_equal(world.state.blocks.export(rows), twin.blocks.export(rows))
    assert world.state.sequences.keys() == twin.sequences.keys()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Kind.SEQ_OPEN, {"id": 77 << 32}),
        (Kind.SEQ_CLOSE, {"id": 77}),
        (Kind.ALLOC, {"id": 5, "aux": 9, "key": 3}),
        (Kind.PLACE, {"key": 10**6, "id": 5}),
        (Kind.DROP, {"key": 0, "id": 1, "tier": 1, "loc": 10**6}),
    ],
)
def test_a_record_that_names_what_does_not_exist_is_a_violation(
    kind: Kind, values: dict[str, int]
) -> None:
    world = World(4, 4, 0)
    world.store(1, TOKENS[:4])
    record = blank(1, kind)
    for name, value in values.items():
        record[name] = value
    with pytest.raises(InvariantViolation):
        world.state.apply(record)


def test_bad_requests_are_typed_errors_and_change_nothing() -> None:
    world = World(4, 0, 0)
    world.store(1, TOKENS[:8])
    other = world.planner.open_lease(b"u" * 16, 5, 6, 7).id
    log = len(world.log)
    plan, lease = world.planner, world.lease
    chain = world.chain(TOKENS[:4])
    zero = np.zeros(1, np.uint64)
    with pytest.raises(UnknownNamespace):
        world.run(plan.acquire(lease, 9, 2, chain))
    with pytest.raises(LeaseLost):
        world.run(plan.acquire(77, world.namespace, 2, chain))
    with pytest.raises(UnknownSequence):
        world.run(plan.reserve(lease, 5, 0, 4))
    with pytest.raises(NotOwner):
        plan.release(other, [(lease << 32) | 1])
    with pytest.raises(NotOwner):
        world.run(plan.reserve(other, (lease << 32) | 1, 0, 4))
    with pytest.raises(InvalidArgument):
        world.run(plan.acquire(lease, world.namespace, 0, chain))
    with pytest.raises(InvalidArgument):
        world.run(plan.reserve(lease, 1, 100, 104))
    with pytest.raises(InvalidArgument):
        world.run(plan.seal(lease, 1, 3, chain, zero, zero))
    with pytest.raises(InvalidArgument):
        plan.truncate(lease, 1, 100)
    with pytest.raises(InvalidArgument):
        plan.fork(lease, 1, 2, 100)
    with pytest.raises(LimitExceeded):
        world.run(plan.reserve(lease, 1, 8, 4 * 10**6))
    plan.suspend(lease, 1)
    with pytest.raises(InvalidArgument, match="suspended"):
        world.run(plan.reserve(lease, 1, 8, 12))
    assert len(world.log) == log + 1
    check_invariants(world.state)
