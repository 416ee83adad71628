"""Token ids in every form a worker has them, and what is wrong with those it should not have."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from tierkv.client.tokens import token_array
from tierkv.errors import InvalidArgument


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        array("i", [1, 2, 3]),
        array("Q", [1, 2, 3]),
        np.array([1, 2, 3], np.int64),
        np.array([1, 9, 2, 9, 3, 9], np.uint16)[::2],
        torch.tensor([1, 2, 3]),
        [np.int64(1), np.uint8(2), 3],
        [torch.tensor(1), 2, 3],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_forms(ids):
    found = token_array(ids, 1000)
    assert found.dtype == np.uint32
    assert found.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ids", [[], (), np.empty(0, np.int64), np.empty(0), torch.tensor([])])
def test_no_tokens(ids):
    assert token_array(ids).shape == (0,)


def test_the_largest_id():
    assert token_array([2**32 - 1]).tolist() == [2**32 - 1]
    assert token_array(np.array([2**32 - 1])).tolist() == [2**32 - 1]


@pytest.mark.parametrize(
    ("ids", "vocab_size", "index"),
    [
        ([1, 2, -1], 0, 2),
        ([1, 2**32], 0, 1),
        ([1, 5, 9], 5, 1),
        ([1, 2.0], 0, 1),
        ([1, None], 0, 1),
        (["a"], 0, 0),
        (np.array([1, -5]), 0, 1),
        (np.array([1, 2**33]), 0, 1),
        (np.array([1, 7, 8]), 7, 1),
        (np.array([2**63], np.uint64), 0, 0),
        (np.array([1.0, 2.0]), 0, 0),
        (np.array([True]), 0, 0),
        (array("d", [1.0]), 0, 0),
        (torch.tensor([3, 4, -2]), 0, 2),
        (torch.tensor([0.5]), 0, 0),
    ],
)
def test_the_error_names_the_first_wrong_index(ids, vocab_size, index):
    with pytest.raises(InvalidArgument, match=rf"token_ids\[{index}\]"):
        token_array(ids, vocab_size)


@pytest.mark.parametrize("ids", ["123", b"123", 5, None, np.array([[1]]), {"a": 1}, np.array(3)])
def test_what_is_no_sequence_of_integers(ids):
    with pytest.raises(InvalidArgument, match="token"):
        token_array(ids)
