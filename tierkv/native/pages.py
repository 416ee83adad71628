"""An engine's own memory, where a block lies in pieces: a page in each of several arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tierkv.core.ids import U8, U32
from tierkv.errors import InvalidArgument
from tierkv.native.memory import address


class _Array(ctypes.Structure):
    """What the library takes of an array."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_size_t), ("bytes", ctypes.c_size_t))


class _Pages(ctypes.Structure):
    """What it takes of all of them. Keeps the descriptions of the arrays, not their memory."""

    _fields_ = (
        ("arrays", ctypes.POINTER(_Array)),
        ("count", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
    )


class Pages:
    """Memory of an engine as pieces of blocks: block b is row b of each array, one after another.

    ``arrays``: u8 [blocks, page bytes] each. The bytes of a row are contiguous; between rows there
    may be gaps, as there are when an engine keeps several layers in one allocation. Make it once
    for memory that stays: it keeps the arrays, and copies nothing. Of a CPU tensor, pass
    ``tensor.view(torch.uint8).numpy()`` with the engine's block as the first axis.

    Raises InvalidArgument for arrays that are not like this.
    """

    def __init__(self, arrays: Iterable[U8]) -> None:
        self.arrays = list(arrays)
        if not self.arrays:
            raise InvalidArgument("pages have no arrays; pass at least one")
        for n, array in enumerate(self.arrays):
            _check(n, array)
        self.block_bytes = sum(array.shape[1] for array in self.arrays)
        """Of all pages of a block together."""
        self.writable = all(array.flags.writeable for array in self.arrays)
        """Whether blocks may be copied into them."""
        self._blocks = min(len(array) for array in self.arrays)

    def __len__(self) -> int:
        """How many blocks have a page in every array."""
        return self._blocks

    def __repr__(self) -> str:
        sizes = f"{self.block_bytes} bytes each in {len(self.arrays)} arrays"
        return f"<Pages of {len(self)} blocks, {sizes}>"

    def of(self, block: int) -> list[U8]:
        """The pages of a block, u8 [page bytes] each."""
        return [array[block] for array in self.arrays]

    @cached_property
    def described(self) -> ctypes.Structure:
        """What the library takes; the arrays must live as long as that."""
        return _described(self.arrays)


def _check(n: int, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(
            f"pages[{n}] is {type(array).__name__}; it must be a numpy array of uint8: of a CPU "
            "tensor pass tensor.view(torch.uint8).numpy()"
        )
    if array.dtype != np.uint8 or array.ndim != 2 or not array.shape[1]:
        raise InvalidArgument(
            f"pages[{n}] is {array.dtype} {list(array.shape)}; it must be uint8 [blocks, page "
            "bytes]"
        )
    if array.strides[0] < 0 or (array.strides[1] != 1 and array.shape[1] > 1):
        raise InvalidArgument(
            f"pages[{n}] has strides {list(array.strides)}; the bytes of a row must be contiguous, "
            "and rows ascend"
        )


@dataclass(frozen=True, slots=True)
class PagedBlocks:
    """Some blocks of ``pages``, by their numbers there (u32 [n]), which exist."""

    pages: Pages
    ids: U32

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> PagedBlocks:
        return PagedBlocks(self.pages, self.ids[part])


Rows = U8 | PagedBlocks
"""Blocks in an engine's memory: u8 [n, block bytes] with contiguous rows, or in pages."""


def described(rows: Rows) -> ctypes.Structure:
    """What the library takes of memory that blocks lie in; it must live as long as that."""
    return rows.pages.described if isinstance(rows, PagedBlocks) else _described([rows])


def _described(arrays: list[U8]) -> ctypes.Structure:
    parts = [_Array(address(array), array.strides[0], array.shape[1]) for array in arrays]
    block_bytes = sum(array.shape[1] for array in arrays)
    return _Pages((_Array * len(parts))(*parts), len(parts), block_bytes)


def block_bytes_of(rows: Rows) -> int:
    """Bytes of one block."""
    width: int = rows.pages.block_bytes if isinstance(rows, PagedBlocks) else rows.shape[1]
    return width
