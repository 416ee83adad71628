"""The hash table against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.table import FIRST_PROBE, HashTable

KEYS = [(hi, lo) for hi in range(4) for lo in (0, 1, 2, 7, 8, 15, 16, 2**32, 2**63 + 15, 2**64 - 1)]
"""Few places, many collisions: equal low bits, equal halves, runs over the table's end."""

ROWS = 64


def arrays(keys: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(keys, np.uint64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


steps = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(KEYS), unique=True, max_size=20)),
    max_size=40,
)


@given(steps, st.sampled_from([16, 64]), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_it_finds_what_a_dict_finds(steps, places, random) -> None:
    table = HashTable(places)
    column_hi, column_lo = np.zeros(ROWS, np.uint64), np.zeros(ROWS, np.uint64)
    model: dict[tuple[int, int], int] = {}
    free = list(range(ROWS))
    for adding, keys in steps:
        if adding:
            keys = [key for key in keys if key not in model]
            rows = [free.pop(random.randrange(len(free))) for _ in keys]
            column_hi[rows], column_lo[rows] = arrays(keys)
            table.put(np.array(rows, np.int64), column_hi, column_lo)
            model.update(zip(keys, rows, strict=True))
        else:
            rows = [model.pop(key) for key in keys if key in model]
            table.remove(np.array(rows, np.int64), column_hi, column_lo)
            free += rows
        assert len(table) == len(model)
        hi, lo = arrays(KEYS)
        found = table.get(hi, lo, column_hi, column_lo)
        assert found.tolist() == [model.get(key, -1) for key in KEYS]
        asked = random.sample(KEYS, len(KEYS))
        known = [key in model for key in asked]
        leading = known.index(False) if False in known else len(asked)
        prefix = table.get_prefix(*arrays(asked), column_hi, column_lo)
        assert prefix.tolist() == [model[key] for key in asked[:leading]]


def test_a_long_prefix_is_found_to_its_first_gap() -> None:
    count = 3 * FIRST_PROBE
    table = HashTable(16)
    hi = np.arange(count, dtype=np.uint64)
    lo = hi * np.uint64(16)
    rows = np.arange(count)
    table.put(rows, hi, lo)
    assert table.get_prefix(hi, lo, hi, lo).tolist() == rows.tolist()
    for gap in (2 * FIRST_PROBE, FIRST_PROBE, FIRST_PROBE - 1, 0):
        table.remove(np.array([gap]), hi, lo)
        assert table.get_prefix(hi, lo, hi, lo).tolist() == rows[:gap].tolist()


def test_no_keys_are_no_work() -> None:
    table = HashTable()
    none = np.zeros(0, np.uint64)
    column = np.zeros(4, np.uint64)
    table.put(np.zeros(0, np.int64), column, column)
    table.remove(np.zeros(0, np.int64), column, column)
    assert len(table) == len(table.get(none, none, column, column)) == 0
    assert len(table.get_prefix(none, none, column, column)) == 0
