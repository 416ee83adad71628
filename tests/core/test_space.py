"""Columns keep what they hold while they get longer, in their room and beyond it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core import space
from tierkv.core.space import STEP, ahead, column, stretched

lengths = st.lists(st.integers(0, 5 * STEP), max_size=8)


@given(lengths, st.sampled_from([0, 1, STEP, 3 * STEP, 1 << 22]))
def test_what_was_written_stays_and_what_is_new_is_zero(wanted, room) -> None:
    one = column(room, np.uint32)
    written: list[int] = []
    for count in wanted:
        old = one
        one = stretched(one, count)
        assert len(one) >= max(count, len(old))
        assert one.tolist() == written + [0] * (len(one) - len(written))
        if len(one) <= room and len(old):
            assert np.shares_memory(one, old)
        written = list(range(len(written), len(written) + len(one)))
        one[:] = written


def test_a_copy_of_a_column_grows_apart_from_it() -> None:
    one = stretched(column(8 * STEP, np.int64), STEP)
    one[:] = 7
    other = stretched(one.copy(), 2 * STEP)
    one[:] = 8
    assert set(other.tolist()) == {0, 7}


def test_what_comes_next_is_the_memory_that_the_column_gets() -> None:
    one = stretched(column(1 << 20, np.uint64), STEP)
    coming = ahead(one)
    assert len(coming) == space.AHEAD
    longer = stretched(one, STEP + 1)
    assert np.shares_memory(longer[STEP:], coming)
    full = stretched(column(STEP, np.uint64), STEP)
    assert not len(ahead(full))


def test_a_kernel_that_refuses_address_space_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    one = stretched(column(1 << 30, np.uint64), 3)
    one[:3] = [1, 2, 3]
    assert stretched(one, 2 * STEP)[:3].tolist() == [1, 2, 3]
