"""Which of the engine's blocks make up which of tierkv's."""

from __future__ import annotations

import numpy as np

from tierkv.integrations.vllm.geometry import GONE, Column, Geometry

ONE_GROUP = Geometry(32, (32,), (Column(0, 0, 1),), (("a",),))
TWO_GROUPS = Geometry(
    64, (64, 32), (Column(0, 0, 1), Column(1, 0, 2), Column(1, 1, 2)), (("a",), ("b",), ("b",))
)


def test_rows_of_one_group_are_its_table() -> None:
    """From and to the blocks that are asked for."""
    rows = ONE_GROUP.rows([[5, 6, 7, 8]], 1, 3)
    assert rows.tolist() == [[6], [7]]
    assert rows.dtype == np.int32


def test_a_group_with_smaller_blocks_has_several_columns() -> None:
    """Its parts in order."""
    rows = TWO_GROUPS.rows([[5, 6], [11, 12, 13, 14]], 0, 2)
    assert rows.tolist() == [[5, 11, 12], [6, 13, 14]]


def test_null_blocks_are_gone() -> None:
    """A window has left them."""
    assert TWO_GROUPS.rows([[5], [0, 12]], 0, 1).tolist() == [[5, GONE, 12]]


def test_a_table_that_ends_early_leaves_blocks_gone() -> None:
    """What the engine has no block for cannot be saved."""
    assert ONE_GROUP.rows([[5]], 0, 3).tolist() == [[5], [GONE], [GONE]]
    assert TWO_GROUPS.rows([[5, 6], [11, 12, 13]], 1, 2).tolist() == [[6, 13, GONE]]


def test_a_step_writes_behind_what_is_computed() -> None:
    """The block that is being filled, and all behind it, of every group."""
    assert ONE_GROUP.written([[5, 6, 7]], 33) == [6, 7]
    assert ONE_GROUP.written([[5, 6, 7]], 64) == [7]
    assert TWO_GROUPS.written([[5, 6], [11, 12, 13]], 64) == [6, 13]
