"""The hash tables, in numpy and native, against a dict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.blocks import Blocks
from tierkv.core.table import FIRST_PROBE, HashTable, Places
from tierkv.errors import InvariantViolation
from tierkv.native.library import load
from tierkv.native.table import NativePlaces, NativeTable

KEYS = [(hi, lo) for hi in range(4) for lo in (0, 1, 2, 7, 8, 15, 16, 2**32, 2**63 + 15, 2**64 - 1)]
"""Few places, many collisions: equal low bits, equal halves, runs over the table's end."""

ROWS = 64

Tables = Callable[[int], HashTable]


@pytest.fixture(scope="module", params=["numpy", "native"])
def tables(request: pytest.FixtureRequest) -> Tables:
    """Makes empty tables of so many places."""
    return HashTable if request.param == "numpy" else partial(NativeTable, load({}))


def arrays(keys: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(keys, np.uint64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


steps = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(KEYS), unique=True, max_size=20)),
    max_size=40,
)


@given(steps, st.sampled_from([16, 64]), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_it_finds_what_a_dict_finds(tables: Tables, steps, places, random) -> None:
    table = tables(places)
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


def test_a_long_prefix_is_found_to_its_first_gap(tables: Tables) -> None:
    count = 3 * FIRST_PROBE
    table = tables(16)
    hi = np.arange(count, dtype=np.uint64)
    lo = hi * np.uint64(16)
    rows = np.arange(count)
    table.put(rows, hi, lo)
    assert table.get_prefix(hi, lo, hi, lo).tolist() == rows.tolist()
    for gap in (2 * FIRST_PROBE, FIRST_PROBE, FIRST_PROBE - 1, 0):
        table.remove(np.array([gap]), hi, lo)
        assert table.get_prefix(hi, lo, hi, lo).tolist() == rows[:gap].tolist()


def test_no_keys_are_no_work(tables: Tables) -> None:
    table = tables(16)
    none = np.zeros(0, np.uint64)
    column = np.zeros(4, np.uint64)
    table.put(np.zeros(0, np.int64), column, column)
    table.remove(np.zeros(0, np.int64), column, column)
    assert len(table) == len(table.get(none, none, column, column)) == 0
    assert len(table.get_prefix(none, none, column, column)) == 0


def chained(tables: Tables, count: int) -> tuple[HashTable, Blocks, np.ndarray, np.ndarray]:
    """A chain of blocks with ids 100, 101... in namespace 7, in rows that are all over the place;
    and their hashes."""
    rng = np.random.default_rng(count)
    blocks, rows = Blocks(), rng.permutation(4 * count)[:count]
    blocks.ensure(4 * count)
    hi, lo = rng.integers(0, 2**64, (2, count), np.uint64)
    blocks.hash_hi[rows], blocks.hash_lo[rows] = hi, lo
    blocks.id[rows] = np.arange(100, 100 + count)
    blocks.parent[rows] = np.arange(99, 99 + count)
    blocks.namespace[rows] = 7
    table = tables(16)
    table.put(rows, blocks.hash_hi, blocks.hash_lo)
    return table, blocks, hi, lo


@pytest.mark.parametrize("count", [1, 2, 63, 64, 300])
def test_a_chain_is_followed_as_far_as_its_links_hold(tables: Tables, count: int) -> None:
    table, blocks, hi, lo = chained(tables, count)
    rows, broken = table.get_chain(hi, lo, blocks, 7, 99)
    assert blocks.id[rows].tolist() == list(range(100, 100 + count))
    assert not broken
    for at in {0, count // 2, count - 1}:
        for column, value in ((blocks.parent, 5), (blocks.namespace, 8)):
            kept = column[rows[at]]
            column[rows[at]] = value
            found, broken = table.get_chain(hi, lo, blocks, 7, 99)
            assert found.tolist() == rows[:at].tolist()
            assert broken
            column[rows[at]] = kept
    table.remove(rows[-1:], blocks.hash_hi, blocks.hash_lo)
    found, broken = table.get_chain(hi, lo, blocks, 7, 99)
    assert found.tolist() == rows[:-1].tolist()
    assert not broken


def test_a_chain_begins_with_its_parent_and_in_its_namespace(tables: Tables) -> None:
    table, blocks, hi, lo = chained(tables, 3)
    for namespace, parent in ((7, 98), (7, 0), (6, 99)):
        rows, broken = table.get_chain(hi, lo, blocks, namespace, parent)
        assert rows.tolist() == []
        assert broken
    rows, broken = table.get_chain(hi[:0], lo[:0], blocks, 7, 99)
    assert rows.tolist() == []
    assert not broken
    rows, _ = table.get_chain(hi[1:], lo[1:], blocks, 7, 100)
    assert blocks.id[rows].tolist() == [101, 102]


def test_many_keys_come_and_go(tables: Tables) -> None:
    count = 1 << 17
    hi, lo = np.random.default_rng(1).integers(0, 2**64, (2, count), np.uint64)
    table, rows = tables(1024), np.arange(count)
    table.put(rows, hi, lo)
    assert (table.get(hi, lo, hi, lo) == rows).all()
    table.remove(rows[::2], hi, lo)
    found = table.get(hi, lo, hi, lo)
    assert (found[::2] == -1).all()
    assert (found[1::2] == rows[1::2]).all()
    table.put(rows[::2], hi, lo)
    assert (table.get(hi, lo, hi, lo) == rows).all()
    assert len(table) == count


def test_keys_and_rows_may_be_strided(tables: Tables) -> None:
    halves = np.arange(40, dtype=np.uint64).reshape(20, 2)
    hi, lo = halves[:, 0].copy(), halves[:, 1].copy()
    table = tables(64)
    table.put(np.arange(20)[::2], hi, lo)
    found = table.get(halves[:, 0], halves[:, 1], hi, lo)
    assert found.tolist() == [row if row % 2 == 0 else -1 for row in range(20)]


def test_native_and_numpy_find_and_remove_what_the_other_has_put() -> None:
    hi, lo = np.random.default_rng(1).integers(0, 2**64, (2, 300), np.uint64)
    native, ours = NativePlaces(load({}), 512), Places(512)
    for one, other in ((native, ours), (ours, native)):
        other.values = one.values
        one.put(np.arange(300), lo)
        assert other.get(hi, lo, hi, lo).tolist() == list(range(300))
        assert other.remove(np.arange(0, 300, 2), lo).all()
        expected = [row if row % 2 else -1 for row in range(300)]
        assert one.get(hi, lo, hi, lo).tolist() == expected
        assert one.remove(np.arange(300), lo).tolist() == [bool(row % 2) for row in range(300)]
        assert not one.values.any()


def test_rows_that_are_in_no_column_are_refused_before_memory_is_touched() -> None:
    places = NativePlaces(load({}), 16)
    hi, lo = np.arange(8, dtype=np.uint64), np.arange(8, dtype=np.uint64)
    for rows in (np.array([0, 8]), np.array([0, -1])):
        for change in (places.put, places.remove):
            with pytest.raises(InvariantViolation, match="rows are in its columns"):
                change(rows, lo)
    assert not places.values.any()
    places.put(np.array([7]), lo)
    with pytest.raises(InvariantViolation, match="rows are in its columns"):
        places.get(hi, lo, hi[:4], lo[:4])
