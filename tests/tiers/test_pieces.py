"""Pieces of memory: the same bytes, whether by address or as Python sees them."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.errors import InvariantViolation
from tierkv.tiers.pieces import buffers_of, pieces_of


def test_pieces_are_the_rows_themselves() -> None:
    matrix = np.arange(60, dtype=np.uint8).reshape(6, 10)
    pieces = pieces_of(matrix, np.array([4, 0, 5], np.uint32))
    assert pieces[:, 1].tolist() == [10] * 3
    assert np.diff(pieces[:, 0].astype(np.int64)).tolist() == [-40, 50]
    first, second, third = buffers_of(pieces)
    assert (first.tolist(), second.tolist()) == (matrix[4].tolist(), matrix[0].tolist())
    third[:] = bytes(10)
    assert not matrix[5].any()
    assert buffers_of(pieces_of(matrix, np.zeros(0, np.int64))) == []


@pytest.mark.parametrize("rows", [[6], [0, -1]])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    with pytest.raises(InvariantViolation):
        pieces_of(np.zeros((6, 10), np.uint8), np.array(rows))


def test_rows_with_gaps_between_them_are_refused() -> None:
    with pytest.raises(InvariantViolation):
        pieces_of(np.zeros((6, 10), np.uint8)[:, :5], np.array([1]))
