"""Which memory is taken and given back, decided for tiers that do not exist."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.service.leads import (
    GIVE_BYTES,
    LEAD_BYTES,
    TAKE_BYTES,
    Budget,
    GiveBack,
    PoolMemory,
    Take,
    missing_bytes,
    next_step,
)

MIB = 1 << 20
GIB = 1 << 30


def test_without_pools_there_is_nothing_to_do() -> None:
    assert next_step([], Budget(GIB, GIB, 0), ahead=True) is None
    assert missing_bytes([], Budget(GIB, GIB, 0)) == 0


def test_a_single_pool_gets_all_its_slots_in_order() -> None:
    budget, pool, steps = Budget(GIB, GIB, 0), PoolMemory(0, MIB, 1000, 0, 0), []
    while (step := next_step([pool], budget, ahead=True)) is not None:
        assert isinstance(step, Take)
        assert missing_bytes([pool], budget) == (1000 - pool.taken) * MIB
        steps.append((step.first, step.stop))
        pool = pool._replace(taken=step.stop)
    assert steps == [(at, min(at + 64, 1000)) for at in range(0, 1000, 64)]
    assert missing_bytes([pool], budget) == 0


def test_slots_that_were_given_out_are_passed_over() -> None:
    pool = PoolMemory(0, MIB, 1000, 900, 100)
    assert next_step([pool], Budget(GIB, GIB, 0), ahead=True) == Take(0, 900, 964)
    assert missing_bytes([pool], Budget(GIB, GIB, 0)) == 100 * MIB


def test_a_slot_larger_than_a_step_is_taken_whole() -> None:
    pool = PoolMemory(0, 3 * TAKE_BYTES, 5, 0, 0)
    assert next_step([pool], Budget(GIB, GIB, 0), ahead=True) == Take(0, 0, 1)


def test_several_pools_lead_by_equal_parts_and_leave_one() -> None:
    tier = Tier(9 * 64 * MIB, [MIB, 2 * MIB])
    tier.settle()
    assert [pool.lead_bytes for pool in tier.pools] == [3 * 64 * MIB] * 2


def test_a_lead_is_a_gibibyte_at_most_if_there_are_several_pools() -> None:
    tier = Tier(64 * GIB, [MIB, MIB, MIB])
    tier.settle()
    assert [pool.lead_bytes for pool in tier.pools] == [LEAD_BYTES] * 3


def test_a_pool_that_was_alone_gives_back_only_what_another_needs() -> None:
    tier = Tier(64 * GIB, [MIB])
    tier.settle()
    assert tier.in_memory == 64 * GIB
    tier.add(4 * MIB)
    tier.settle()
    first, second = tier.pools
    assert second.lead_bytes == LEAD_BYTES
    assert first.lead_bytes == 62 * GIB  # one is the second pool's, one is nobody's
    tier.give_out(1, 15 * 256)
    tier.settle()
    assert (first.lead_bytes, second.lead_bytes) == (47 * GIB, LEAD_BYTES)
    tier.give_out(1, 48 * 256)
    tier.settle()
    assert tier.in_memory <= 64 * GIB
    assert {pool.lead_bytes // (4 * MIB) for pool in tier.pools} == {GIB // 3 // (4 * MIB)}


def test_where_memory_is_not_taken_ahead_only_an_overdraft_is_given_back() -> None:
    lazy = PoolMemory(0, MIB, 1024, 10, 700)
    busy = PoolMemory(1, MIB, 1024, 400, 0)
    assert next_step([lazy, busy], Budget(GIB, 614 * MIB, 1024 * MIB), ahead=False) is None
    step = next_step([lazy, busy], Budget(GIB, 614 * MIB, 1025 * MIB), ahead=False)
    assert step == GiveBack(0, 698, 700)
    assert next_step([lazy], Budget(GIB, GIB, 2 * GIB), ahead=False) is None


@pytest.mark.parametrize("ahead", [True, False])
def test_slots_that_were_given_out_keep_their_memory_whatever_is_missing(ahead: bool) -> None:
    overdrawn = Budget(GIB, 0, GIB + 100 * MIB)
    busy = PoolMemory(1, MIB, 1024, 325, 0)
    last = next_step([PoolMemory(0, MIB, 1024, 699, 700), busy], overdrawn, ahead=ahead)
    assert last == GiveBack(0, 699, 700)
    assert next_step([PoolMemory(0, MIB, 1024, 699, 699), busy], overdrawn, ahead=ahead) is None


@dataclass
class Pool:
    stride: int
    slots: int
    given_out: int = 0
    taken: int = 0

    @property
    def lead_bytes(self) -> int:
        return max(0, self.taken - self.given_out) * self.stride

    @property
    def in_memory(self) -> int:
        return max(self.taken, self.given_out) * self.stride


class Tier:
    """Pools that touch what they are given out at once, and a task that follows the plan."""

    def __init__(self, budget: int, strides: list[int]) -> None:
        self.budget = budget
        self.pools: list[Pool] = []
        for stride in strides:
            self.add(stride)

    def add(self, stride: int) -> None:
        self.pools.append(Pool(stride, self.budget // stride))

    @property
    def in_memory(self) -> int:
        return sum(pool.in_memory for pool in self.pools)

    @property
    def free(self) -> int:
        return self.budget - sum(pool.given_out * pool.stride for pool in self.pools)

    def give_out(self, number: int, slots: int) -> None:
        pool = self.pools[number]
        pool.given_out += min(slots, self.free // pool.stride, pool.slots - pool.given_out)

    def step(self) -> bool:
        views = [
            PoolMemory(number, pool.stride, pool.slots, pool.given_out, pool.taken)
            for number, pool in enumerate(self.pools)
        ]
        before = self.in_memory
        step = next_step(views, Budget(self.budget, self.free, before), ahead=True)
        if step is None:
            return False
        pool = self.pools[step.pool]
        assert 0 <= step.first < step.stop <= pool.slots
        if isinstance(step, GiveBack):
            assert step.first >= pool.given_out, "memory that may be in use is never given back"
            assert step.stop == pool.taken
            assert (step.stop - step.first) * pool.stride <= max(GIVE_BYTES, pool.stride)
            pool.taken = step.first
        else:
            assert step.first == max(pool.given_out, pool.taken)
            assert (step.stop - step.first) * pool.stride <= max(TAKE_BYTES, pool.stride)
            pool.taken = step.stop
            assert self.in_memory <= self.budget, "no more than the budget is ever taken"
        return True

    def settle(self) -> None:
        for _ in range(200_000):
            if not self.step():
                return
        pytest.fail("takes and gives back for ever")


@given(
    budget=st.integers(1, 4096).map(lambda units: units * 4 * MIB),
    strides=st.lists(
        st.sampled_from([64 << 10, 720 << 10, 2 * MIB, 96 * MIB]), min_size=1, max_size=4
    ),
    work=st.lists(
        st.one_of(
            st.tuples(st.just("give out"), st.integers(0, 3), st.integers(1, 400)),
            st.tuples(st.just("step"), st.integers(1, 40), st.just(0)),
            st.tuples(st.just("add"), st.sampled_from([128 << 10, 3 * MIB]), st.just(0)),
        ),
        max_size=30,
    ),
)
def test_any_work_stays_within_the_budget_and_comes_to_rest(
    budget: int, strides: list[int], work: list[tuple[str, int, int]]
) -> None:
    tier = Tier(budget, strides)
    for what, number, count in work:
        if what == "give out":
            tier.give_out(number % len(tier.pools), count)
        elif what == "add":
            tier.add(number)
        else:
            for _ in range(number):
                tier.step()
    tier.settle()
    assert tier.in_memory <= max(budget, sum(p.given_out * p.stride for p in tier.pools))
    if len(tier.pools) == 1:
        assert max(tier.pools[0].taken, tier.pools[0].given_out) == tier.pools[0].slots
