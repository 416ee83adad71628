"""Least recently used, in numpy and native, against a plain list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.core import policy
from tierkv.core.policy import Lru
from tierkv.core.structures import Structures
from tierkv.native.core import structures
from tierkv.native.library import load

ROWS = 12
SHARED = [HealthCheck.function_scoped_fixture]
"""The fixture only makes new ones."""
SIZES = np.array([1, 1, 2, 3] * 3)

rows_of = st.lists(st.integers(0, ROWS - 1), max_size=6, unique=True)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), rows_of),
        st.tuples(st.just("forget"), rows_of),
        st.tuples(st.just("victims"), rows_of, st.integers(0, 12)),
    ),
    max_size=60,
)


@pytest.fixture(params=["numpy", "native"])
def new(request: pytest.FixtureRequest) -> Callable[[], Lru]:
    """Makes empty orders."""
    made_of = Structures() if request.param == "numpy" else structures(load({}))
    return lambda: made_of.lru(policy.SCAN)


def ints(values: list[int]) -> Any:
    return np.array(values, np.int64)


def victims(
    lru: Lru, need: int, busy: list[int] | None = None, mapped: list[int] | None = None
) -> list[int]:
    """``busy`` rows cannot leave now and keep their place, ``mapped`` ones leave the order."""

    def eligible(rows: Any) -> Any:
        return ~np.isin(rows, (busy or []) + (mapped or []))

    def stays(rows: Any) -> Any:
        return ~np.isin(rows, mapped or [])

    return lru.victims(need, eligible, stays, lambda rows: SIZES[rows]).tolist()


@given(steps=steps)
@settings(max_examples=200, deadline=None, suppress_health_check=SHARED)
def test_victims_come_in_the_order_of_a_list(new, steps) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "SCAN", 4)  # so that a scan takes several parts, and the log wraps
        lru = new()
        order: list[int] = []
        for verb, rows, *need in steps:
            if verb == "touch":
                lru.touch(ints(rows))
                order = [row for row in order if row not in rows] + rows
            elif verb == "forget":
                lru.forget(ints(rows))
                order = [row for row in order if row not in rows]
            else:
                expected, size = [], 0
                for row in order:
                    if size < need[0] and row not in rows:
                        expected.append(row)
                        size += SIZES[row]
                assert victims(lru, need[0], busy=rows) == expected
        assert victims(lru, 10**6) == order


def test_a_busy_row_keeps_its_place_and_a_mapped_one_comes_back_when_it_is_touched(new) -> None:
    lru = new()
    lru.touch(ints([3, 4, 5]))
    assert victims(lru, 100, busy=[3], mapped=[4]) == [5]
    assert victims(lru, 100) == [3, 5]
    lru.touch(ints([4]))
    assert victims(lru, 100) == [3, 5, 4]


def test_victims_stay_in_the_order_until_they_are_forgotten(new) -> None:
    lru = new()
    lru.touch(ints([0, 1, 2]))
    assert victims(lru, 2) == victims(lru, 2) == [0, 1]
    lru.forget(ints([0, 1]))
    assert victims(lru, 1) == [2]
    assert victims(lru, 3) == [2]


def test_a_row_in_the_log_thousands_of_times_is_one_victim(new) -> None:
    lru = new()
    lru.touch(ints([1]))
    for _ in range(5000):
        lru.touch(ints([2, 3]))
    assert victims(lru, 100) == [1, 2, 3]


def test_the_log_is_as_long_as_twice_the_rows_or_so(new) -> None:
    lru, random = new(), np.random.default_rng(1)
    for _ in range(2000):
        lru.touch(random.permutation(5000)[:50])
    assert len(lru) == 5000
    assert lru.nbytes <= 4 * (5000 + 4096) + 4 * (2 * 5000 + 4096 + policy.SCAN)
    order = victims_of_size_one(lru)
    assert sorted(order) == list(range(5000))


def victims_of_size_one(lru: Lru) -> list[int]:
    everyone = lambda rows: np.ones(len(rows), np.bool_)  # noqa: E731  # shorter than two defs
    return lru.victims(2**60, everyone, everyone, lambda rows: np.ones(len(rows))).tolist()
