"""The sliding hit ratio and the parts of the status document that come from the counters."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.counters import Counters, HitWindow


def test_the_ratio_is_zero_before_the_first_lookup() -> None:
    assert HitWindow().ratio == 0.0


def test_old_lookups_are_forgotten() -> None:
    window = HitWindow(1000)
    for _ in range(100):
        window.add(10, 0)
    assert window.ratio == 0.0
    for _ in range(50):
        window.add(10, 10)
    assert window.ratio == pytest.approx(0.5, abs=0.02)
    for _ in range(60):
        window.add(10, 10)
    assert window.ratio == 1.0


def test_one_lookup_larger_than_the_window_is_the_ratio() -> None:
    window = HitWindow(100)
    window.add(100, 100)
    window.add(10_000, 2_500)
    assert window.ratio == 0.25


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=300))
def test_the_ratio_is_that_of_the_last_tokens(lookups: list[tuple[int, float]]) -> None:
    window_tokens = 1000
    window = HitWindow(window_tokens)
    exact: deque[tuple[int, int]] = deque()
    for tokens, share in lookups:
        hit = int(tokens * share)
        window.add(tokens, hit)
        exact.append((tokens, hit))
        while sum(looked for looked, _ in exact) - exact[0][0] >= window_tokens:
            exact.popleft()
    ratio = sum(hit for _, hit in exact) / sum(looked for looked, _ in exact)
    assert window.ratio == pytest.approx(ratio, abs=0.07)


def test_evictions_by_way() -> None:
    counters = Counters()
    counters.evicted("device", "host", "capacity", 3)
    counters.evicted("device", "host", "suspend")
    counters.evicted("disk", "none", "capacity", 2)
    assert counters.evictions_status() == {"device>host": 4, "disk>none": 2}


def test_counters_hold_nothing_that_is_not_declared() -> None:
    with pytest.raises(AttributeError):
        Counters().lookup_token = 1  # type: ignore[attr-defined]  # the misspelling under test
