"""Doubt: it holds for the block that was doubted, in the device tier, until it is checked."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.core.blocks import Blocks
from tierkv.core.doubt import Doubt
from tierkv.core.ids import Tier

ROWS = 20


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.fixture
def blocks() -> Blocks:
    """Every row holds a block with a device copy."""
    blocks = Blocks()
    every = np.arange(ROWS)
    blocks.id[every] = every + 100
    blocks.place(every, Tier.DEVICE, every.astype(np.uint32))
    return blocks


@pytest.fixture
def doubt(blocks: Blocks) -> Doubt:
    return Doubt(blocks)


def test_what_is_added_is_in_doubt_beside_what_was(doubt: Doubt) -> None:
    doubt.add(rows(4))
    assert doubt.among(np.arange(ROWS)).tolist() == [4]
    doubt.mark(rows(9, 2))
    assert doubt.among(np.arange(ROWS)).tolist() == [2, 9]
    doubt.add(rows(15, 9, 0))
    doubt.add(rows())
    assert doubt.among(rows(15, 3, 9, 2, 0)).tolist() == [15, 9, 2, 0]
    assert doubt.leading_sound(rows(1, 3, 5, 9, 7)) == 3
    doubt.clear(rows(9, 0, 15, 2, 3))
    assert doubt.among(np.arange(ROWS)).tolist() == []
    doubt.add(rows(9))
    assert doubt.among(np.arange(ROWS)).tolist() == [9]


def test_another_block_in_its_row_is_not(doubt: Doubt, blocks: Blocks) -> None:
    doubt.add(rows(3, 5))
    blocks.id[3] = 500
    assert doubt.among(rows(3, 5)).tolist() == [5]
    doubt.add(rows(3))
    assert doubt.among(rows(3, 5)).tolist() == [3, 5]


def test_nor_is_one_that_is_no_longer_there(doubt: Doubt, blocks: Blocks) -> None:
    doubt.add(rows(3, 5))
    blocks.unplace(rows(3), Tier.DEVICE)
    assert doubt.among(rows(3, 5)).tolist() == [5]


def test_what_was_checked_takes_no_memory(doubt: Doubt) -> None:
    for number in range(ROWS):
        doubt.add(rows(number))
        doubt.clear(rows(number))
    assert len(doubt._rows) <= 1
