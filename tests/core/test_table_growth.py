"""The hash table against a dict while it moves to a larger array, a few places at a time."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core import table
from tierkv.core.table import HashTable

ROWS = 1024


@given(st.integers(0, 2**32), st.sampled_from([4, 64, 2**20]))
@settings(max_examples=25, deadline=None)
def test_it_finds_what_a_dict_finds_at_any_time(seed: int, spread: int) -> None:
    """``spread``: how many different low halves there are to a place; few make long runs."""
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "SWEEP_MIN", 0)
        patch.setattr(table, "SWEEP", 2)
        tried = HashTable(16)
        column_hi, column_lo = np.zeros(ROWS, np.uint64), np.zeros(ROWS, np.uint64)
        model: dict[tuple[int, int], int] = {}
        free = list(range(ROWS))
        was_growing = False
        while len(model) < ROWS // 3:
            keys = {
                (random.randrange(2**64), random.randrange(16 * spread) * (ROWS // 16))
                for _ in range(random.choice((1, 3, 60)))
            }
            rows = [free.pop(random.randrange(len(free))) for _ in keys]
            column_hi[rows], column_lo[rows] = np.array(list(keys), np.uint64).T
            tried.put(np.array(rows, np.int64), column_hi, column_lo)
            model.update(zip(keys, rows, strict=True))
            gone = random.sample(sorted(model), random.randrange(len(keys)))
            back = [model.pop(key) for key in gone]
            tried.remove(np.array(back, np.int64), column_hi, column_lo)
            free += back
            was_growing |= tried._old is not None
            asked = random.sample(sorted(model), min(len(model), 50)) + gone[:50]
            hi, lo = np.array(asked, np.uint64).T.copy()
            found = tried.get(hi, lo, column_hi, column_lo)
            assert found.tolist() == [model.get(key, -1) for key in asked]
            assert len(tried) == len(model)
        assert was_growing


def test_the_array_to_come_is_made_ready_and_used() -> None:
    tried = HashTable(1024)
    hi = np.arange(2000, dtype=np.uint64)
    assert not tried.ahead(2000)
    tried.put(np.arange(400), hi, hi)
    assert not tried.ahead(512)  # it never gets too full
    (coming,) = tried.ahead(2000)
    tried.put(np.arange(400, 600), hi, hi)
    assert np.count_nonzero(coming)
    assert not tried.ahead(2000)
    assert tried.get(hi[:700], hi[:700], hi, hi).tolist() == [*range(600), *[-1] * 100]
