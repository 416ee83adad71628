"""Whole blocks in and out by copy: rows of bytes, and checksums kept until blocks are sealed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import U8, Bool
from tierkv.core.prefix import HASH_BYTES
from tierkv.errors import InvalidArgument

I32 = npt.NDArray[np.int32]
NO_SLOT = -1


def rows_of(name: str, data: Any, block_bytes: int, *, writable: bool = False) -> U8:
    """``data`` as u8 [n, block_bytes], sharing its memory.

    Raises InvalidArgument, calling it ``name``, unless it is whole blocks in contiguous memory.
    """
    rows = data if _is_rows(data, block_bytes) else _flat(name, data).reshape(-1)
    if rows.size % block_bytes:
        raise InvalidArgument(
            f"{name} has {rows.size} bytes; it must be whole blocks of {block_bytes} bytes"
        )
    if writable and not rows.flags.writeable:
        raise InvalidArgument(f"{name} is read-only; blocks are copied into it")
    return rows.reshape(-1, block_bytes) if rows.ndim == 1 else rows


def _is_rows(data: Any, block_bytes: int) -> bool:
    """Whether it has the shape already; there may be gaps between the rows then."""
    return (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.ndim == 2
        and data.shape[1] == block_bytes
        and (data.strides[1] == 1 or block_bytes == 1)
        and data.strides[0] >= 0
    )


def _flat(name: str, data: Any) -> U8:
    try:
        view = memoryview(data)
        if not view.c_contiguous:
            raise InvalidArgument(f"{name} is not contiguous: make a contiguous copy")
        return np.frombuffer(view, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(
            f"{name} is {type(data).__name__}, which has no bytes to share ({error}); of a torch "
            "tensor pass tensor.view(torch.uint8).numpy()"
        ) from error


class WrittenSums:
    """Checksums of blocks that were copied in whole and are not sealed yet, by block index.

    A block counts as written only in the slot that it was written to.
    """

    def __init__(self) -> None:
        self._slots: I32 = np.empty(0, np.int32)
        self._sums: U8 = np.empty((0, HASH_BYTES), np.uint8)

    def remember(self, first: int, slots: I32, sums: U8) -> None:
        """Blocks from ``first`` on lie in ``slots`` [n] and have these ``sums`` (u8 [n, 16])."""
        end = first + len(slots)
        missing = end - len(self._slots)
        if missing > 0:
            self._slots = np.concatenate([self._slots, np.full(missing, NO_SLOT, np.int32)])
            self._sums = np.concatenate([self._sums, np.empty((missing, HASH_BYTES), np.uint8)])
        self._slots[first:end] = slots
        self._sums[first:end] = sums

    def forget(self, first: int, count: int) -> None:
        """These blocks are written to in another way."""
        self._slots[first : first + count] = NO_SLOT

    def forget_all(self) -> None:
        """The slots may be another's from now on."""
        self._slots[:] = NO_SLOT

    def find(self, first: int, slots: I32) -> tuple[U8, Bool]:
        """Sums of blocks from ``first`` on that lie in ``slots``, and which are known, [n] both."""
        sums, known = np.empty((len(slots), HASH_BYTES), np.uint8), np.zeros(len(slots), np.bool_)
        there = self._slots[first : first + len(slots)]
        known[: len(there)] = there == slots[: len(there)]
        sums[: len(there)] = self._sums[first : first + len(there)]
        return sums, known
