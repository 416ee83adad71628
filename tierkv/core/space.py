"""Columns that get longer where they are: address space is set aside, memory comes when touched.

To double an array by copying takes seconds at the size of a full disk tier, and twice the memory
meanwhile.
"""

from __future__ import annotations

import mmap
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import I64

Number = TypeVar("Number", bound=np.generic)

STEP = 4096
"""Columns get longer by so many elements at a time."""

AHEAD = 65_536
"""How many elements of a column should have their memory before they are needed."""

Memory = npt.NDArray[Any]
"""An array of which only the memory matters."""

_HUGE_BYTES = 2 << 20
# The mmap module has this name from Python 3.13 on. It keeps the kernel from refusing more than
# there is memory for.
_MAP_NORESERVE = 0x4000


def zeros(count: int, dtype: type[Number]) -> npt.NDArray[Number]:
    """``count`` zeros, shape [count], whose memory comes when it is touched."""
    size = count * np.dtype(dtype).itemsize
    if size <= _HUGE_BYTES:
        return np.zeros(count, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    # Small stores stay small; big ones are spared most misses of the TLB.
    memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_BYTES)
    return np.frombuffer(memory, dtype, count)


def column(capacity: int, dtype: type[Number]) -> npt.NDArray[Number]:
    """An empty column with room for ``capacity`` elements."""
    try:
        return zeros(capacity, dtype)[:0]
    except OSError:
        # A kernel that counts address space as if it were memory: it will grow by copying.
        return np.zeros(0, dtype)


def stretched(column: npt.NDArray[Number], count: int) -> npt.NDArray[Number]:
    """The column with at least ``count`` elements, the new ones zero unless it was longer before.

    It shares its memory with ``column``, so long as that has room; else it is a copy with twice the
    room.
    """
    if count <= len(column):
        return column
    length = -(-count // STEP) * STEP
    room = column.base
    if not isinstance(room, np.ndarray) or len(room) < count:
        room = zeros(max(length, 2 * len(column)), column.dtype.type)
        room[: len(column)] = column
    return room[:length]


def ahead(column: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The elements that the column gets next, as far as it has room, for its memory to be there."""
    room = column.base
    if not isinstance(room, np.ndarray):
        return column[:0]
    return room[len(column) : len(column) + AHEAD]


def widest(numbers: I64) -> int:
    """How long a column must be to have an element for each of these numbers."""
    return int(numbers.max(initial=-1)) + 1
