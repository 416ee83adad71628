"""Pieces of memory, as system calls take them: address and bytes (struct iovec), u64 [n, 2].

They keep no memory alive: whoever makes them holds on to it for as long as they are used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tierkv.core.ids import U8, U64
from tierkv.errors import require
from tierkv.native.loops import Slots
from tierkv.tiers.storage import Buffers


def pieces_of(matrix: U8, rows: Slots) -> U64:
    """Rows of a contiguous matrix. Raises InvariantViolation for rows that are not there."""
    require(matrix.flags.c_contiguous, "rows lie one after the other")
    inside = len(rows) == 0 or 0 <= int(rows.min()) <= int(rows.max()) < len(matrix)
    require(inside, "the matrix has these rows")
    pieces = np.empty((len(rows), 2), np.uint64)
    pieces[:, 0] = matrix.ctypes.data + rows.astype(np.int64) * matrix.shape[1]
    pieces[:, 1] = matrix.shape[1]
    return pieces


def buffers_of(pieces: U64) -> Buffers:
    """The same memory as Python sees it."""
    return [memoryview(_of_size(size)(address)).cast("B") for address, size in pieces.tolist()]


@functools.lru_cache(16)
def _of_size(size_bytes: int) -> Callable[[int], Any]:
    """Makes arrays of this size at addresses: to ask ctypes for their type takes its time."""
    return (ctypes.c_ubyte * size_bytes).from_address
