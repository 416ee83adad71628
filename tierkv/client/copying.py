"""Whole blocks in and out by copy: rows of bytes, and checksums kept until blocks are sealed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import U8, Bool
from tierkv.core.prefix import HASH_BYTES
from tierkv.errors import InvalidArgument
from tierkv.native.pages import PagedBlocks, Pages

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


def paged_blocks(pages: Any, ids: Any, block_bytes: int, *, writable: bool = False) -> PagedBlocks:
    """The blocks ``ids`` of ``pages``: integers [n], each the number of a block there.

    Raises InvalidArgument if the pages of a block are not ``block_bytes`` long together, an id is
    none of a block, or, ``writable``, blocks cannot be copied there or two would lie in one place.
    """
    if not isinstance(pages, Pages):
        raise InvalidArgument(f"pages is {_kind(pages)}; make a tierkv.Pages of the arrays")
    if pages.block_bytes != block_bytes:
        raise InvalidArgument(
            f"the pages of a block have {pages.block_bytes} bytes together; blocks of this "
            f"namespace have {block_bytes}"
        )
    if writable and not pages.writable:
        raise InvalidArgument("pages are read-only; blocks are copied into them")
    numbers = np.asarray(ids)
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
        raise InvalidArgument(
            f"ids is {numbers.dtype} {list(numbers.shape)}; it must be integers [blocks]"
        )
    outside = (numbers < 0) | (numbers >= len(pages))
    if outside.any():
        n = int(outside.argmax())
        raise InvalidArgument(f"ids[{n}] is {numbers[n]}; pages have blocks 0 to {len(pages) - 1}")
    if writable:
        _check_distinct(numbers)
    return PagedBlocks(pages, numbers.astype(np.uint32))


def _check_distinct(ids: npt.NDArray[Any]) -> None:
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    if same.any():
        n = int(same.argmax())
        raise InvalidArgument(
            f"ids[{order[n]}] and ids[{order[n + 1]}] are both {ids[order[n]]}; one would be "
            "copied over the other"
        )


def _kind(value: object) -> str:
    return type(value).__name__


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
