"""The directory, in Python and native, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.errors import InvariantViolation
from tierkv.native.directory import PLACES, bucket_count, candidates
from tierkv.native.loops import Loops, PythonLoops

SLOTS = 40

NAMES = st.integers(0, 2**64 - 1) | st.integers(0, 20).map(lambda k: k << 40 | 3)
"""Many of the second kind fall into one bucket."""

STEPS = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | NAMES), max_size=120)


def empty(slots: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((bucket_count(slots), PLACES), np.uint64), np.zeros(slots, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@settings(deadline=None)
@given(steps=STEPS)
def test_a_slot_is_found_by_its_last_name_and_by_no_other(loops: Loops, steps) -> None:
    """Or not at all, if its bucket was full; and a place more or less is never left over."""
    places, where = empty(SLOTS)
    holds: dict[int, int] = {}
    for slot, name in steps:
        if name is None:
            loops.leave(places, where, np.array([slot]))
            holds.pop(slot, None)
        else:
            loops.enter(places, where, np.array([slot]), u64(name))
            holds[slot] = name
            assert slot in candidates(places, name, SLOTS)
    listed = {int(slot): int(where[slot]) - 1 for slot in np.flatnonzero(where)}
    assert np.flatnonzero(places.reshape(-1)).tolist() == sorted(listed.values())
    for slot, at in listed.items():
        name = holds[slot]
        assert at // PLACES == name & (len(places) - 1)
        assert int(places.reshape(-1)[at]) == name & ~0xFFFFFFFF | slot + 1
    by_bucket = [name & (len(places) - 1) for name in holds.values()]
    if all(by_bucket.count(bucket) <= PLACES for bucket in by_bucket) and len(steps) <= PLACES:
        assert listed.keys() == holds.keys()


@settings(deadline=None)
@given(steps=STEPS)
def test_both_write_the_same_places(loops: Loops, steps) -> None:
    mine, oracle = empty(SLOTS), empty(SLOTS)
    for slot, name in steps:
        for one, (places, where) in ((loops, mine), (PythonLoops("oracle"), oracle)):
            if name is None:
                one.leave(places, where, np.array([slot]))
            else:
                one.enter(places, where, np.array([slot]), u64(name))
    np.testing.assert_array_equal(mine[0], oracle[0])
    np.testing.assert_array_equal(mine[1], oracle[1])


@pytest.mark.parametrize("slots", [1000, 4096, 4097, 8192])
def test_a_full_pool_loses_next_to_nothing(loops: Loops, slots: int) -> None:
    names = np.random.default_rng(slots).integers(0, 2**64, slots, np.uint64)
    places, where = empty(slots)
    loops.enter(places, where, np.random.default_rng(1).permutation(slots), names)
    assert np.count_nonzero(where) >= slots - max(3, slots // 1000)
    # And does not grow worse as blocks come and go.
    for again in range(5):
        names = np.random.default_rng(again).integers(0, 2**64, slots, np.uint64)
        loops.enter(places, where, np.arange(slots), names)
    assert np.count_nonzero(where) >= slots - max(3, slots // 1000)
    assert np.count_nonzero(places) == np.count_nonzero(where)


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 1000])
def test_buckets_are_a_power_of_two(slots: int) -> None:
    buckets = bucket_count(slots)
    assert buckets & (buckets - 1) == 0
    assert max(slots / 2, 1) <= buckets < max(slots, 2)


@pytest.mark.parametrize("slot", [-1, 8, 2**32])
def test_slots_outside_of_the_pool_are_refused(loops: Loops, slot: int) -> None:
    places, where = empty(8)
    with pytest.raises(InvariantViolation, match="slots"):
        loops.enter(places, where, np.array([1, slot]), u64(5, 6))
    with pytest.raises(InvariantViolation, match="slots"):
        loops.leave(places, where, np.array([1, slot]))
    assert not places.any()
    assert not where.any()
