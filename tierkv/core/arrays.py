"""What numpy lacks, or is slow at, on big arrays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import Bool

Integer = TypeVar("Integer", bound=np.integer[Any])

_FEW = 64
"""So many values are faster looked at one by one than by a handful of calls of numpy."""


def indices(mask: Bool) -> npt.NDArray[np.int64]:
    """Where the mask is true, ascending. Several times faster than ``np.flatnonzero`` on few."""
    return mask.nonzero()[0]


def some(mask: Bool) -> bool:
    """Whether the mask is true anywhere. Faster than ``mask.any()``, as is ``every``."""
    return bool(np.count_nonzero(mask))


def every(mask: Bool) -> bool:
    """Whether the mask is true everywhere."""
    return int(np.count_nonzero(mask)) == mask.size


def leading(mask: Bool) -> int:
    """How many values are true before the first that is not."""
    return len(mask) if every(mask) else int(mask.argmin())


def first_of_runs(values: npt.NDArray[np.integer[Any]]) -> Bool:
    """Which values differ from the one before them, shape [n]."""
    first = np.ones(len(values), np.bool_)
    first[1:] = values[1:] != values[:-1]
    return first


def runs(values: npt.NDArray[np.integer[Any]]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of equal values."""
    if len(values) <= _FEW:
        end = 0
        for _, run in groupby(values.tolist()):
            start, end = end, end + len(list(run))
            yield start, end
        return
    starts = indices(first_of_runs(values)).tolist()
    yield from pairwise([*starts, len(values)])


def distinct(values: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """The values in ascending order, each once.

    By sorting: ``np.unique`` of numpy 2.4 hashes, which takes twenty times as long for half a
    million integers. It also imports masked arrays when it is first called.
    """
    ordered = np.sort(values)
    return ordered[first_of_runs(ordered)]


def first_of_each(values: npt.NDArray[Integer]) -> npt.NDArray[np.int64]:
    """Where each value is for the first time, ascending."""
    order = np.argsort(values, kind="stable")
    return np.sort(order[first_of_runs(values[order])])


def numbered(
    values: npt.NDArray[Integer],
) -> tuple[npt.NDArray[Integer], npt.NDArray[np.int64]]:
    """The values in ascending order, each once, and which of these each one is, shape [n]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = first_of_runs(ordered)
    which = np.empty(len(values), np.int64)
    which[order] = np.cumsum(first) - 1
    return ordered[first], which


def take(values: npt.NDArray[np.void], at: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Some of a structured array's values, which are whole 8-byte words; a copy.

    As integers: numpy picks from structured arrays many times slower.
    """
    words = values.view("<u8").reshape(len(values), values.dtype.itemsize // 8)
    return words.take(at, axis=0).reshape(-1).view(values.dtype)
