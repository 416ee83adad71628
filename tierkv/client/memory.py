"""A pool's slots as a worker uses them, in host memory or on a GPU. All copies have ended when
the call returns, and free the GIL."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tierkv.core.ids import U8
from tierkv.errors import InvalidArgument, Unavailable
from tierkv.gpu import GpuRows
from tierkv.native.loops import Loops, Slots
from tierkv.native.pages import PagedBlocks, Rows

PIECE_BYTES = 16 << 20
"""Blocks of a GPU that are hashed pass through so much host memory."""


class PoolMemory(Protocol):
    """Slots of blocks of one size. ``len`` says how many; rows are u8 [n, block_bytes], or pages.

    ``kept``: what others have made of the view; it goes with this.
    """

    kept: dict[str, Any]

    @property
    def view(self) -> U8 | GpuRows:
        """All slots with their padding, for those who write into them: [slots, stride]."""
        ...

    def __len__(self) -> int: ...

    def copy_in(self, slots: Slots, rows: Rows) -> U8:
        """Copy rows into slots; their checksums, u8 [n, 16]."""
        ...

    def copy_out(self, slots: Slots, rows: Rows) -> None:
        """Copy slots into rows."""

    def checksums(self, slots: Slots) -> U8:
        """Checksums of what the slots hold, u8 [n, 16]."""
        ...

    def settle(self) -> None:
        """Wait for all that this process is still writing into slots.

        Before the daemon is told of it, or gives the slots to others. Raises GpuFailed.
        """


class HostPool:
    """Host memory. See PoolMemory."""

    def __init__(self, loops: Loops, view: U8, block_bytes: int) -> None:
        self.kept: dict[str, Any] = {}
        self._view = view
        self.payload = view[:, :block_bytes]
        """The slots without their padding."""
        self._loops = loops

    @property
    def view(self) -> U8:
        """See PoolMemory."""
        return self._view

    def __len__(self) -> int:
        return len(self._view)

    def copy_in(self, slots: Slots, rows: Rows) -> U8:
        """See PoolMemory."""
        return self._loops.copy_in(self.payload, slots, rows)

    def copy_out(self, slots: Slots, rows: Rows) -> None:
        """See PoolMemory."""
        self._loops.copy_out(self.payload, slots, rows)

    def checksums(self, slots: Slots) -> U8:
        """See PoolMemory."""
        return self._loops.checksums(self.payload, slots)

    def settle(self) -> None:
        """See PoolMemory: a write to host memory has ended when it returns."""


class GpuPool:
    """Memory of a GPU. See PoolMemory.

    Who changes rows while they are copied in gets checksums that do not fit: nobody will be given
    such a block.
    """

    def __init__(self, loops: Loops, view: GpuRows) -> None:
        self.kept: dict[str, Any] = {}
        self._view = view
        self._loops = loops

    @property
    def view(self) -> GpuRows:
        """See PoolMemory."""
        return self._view

    def __len__(self) -> int:
        return len(self._view)

    def copy_in(self, slots: Slots, rows: Rows) -> U8:
        """See PoolMemory."""
        rows, here = in_one_piece(rows), np.arange(len(rows))
        self._view.store(slots, rows, here)
        return self._loops.checksums(rows, here)

    def copy_out(self, slots: Slots, rows: Rows) -> None:
        """See PoolMemory."""
        self._view.fetch(slots, in_one_piece(rows), np.arange(len(rows)))

    def checksums(self, slots: Slots) -> U8:
        """See PoolMemory."""
        step = max(1, PIECE_BYTES // self._view.width)
        rows = np.empty((min(step, len(slots)), self._view.width), np.uint8)
        sums = [np.empty((0, 16), np.uint8)]
        for first in range(0, len(slots), step):
            part = slots[first : first + step]
            self.copy_out(part, rows[: len(part)])
            sums.append(self._loops.checksums(rows, np.arange(len(part))))
        return np.concatenate(sums)

    def settle(self) -> None:
        """See PoolMemory."""
        self._view.memory.gpu.settle()


def in_one_piece(rows: Rows) -> U8:
    """Rows as a GPU copies them. Raises InvalidArgument for pages."""
    if isinstance(rows, PagedBlocks):
        raise InvalidArgument(
            "the daemon's device tier is on a GPU, which copies no pages of host memory; use write "
            "and read, or sequence.write_blocks and read_blocks"
        )
    return rows


class GonePool:
    """In place of a GPU's memory while no daemon is there: whatever needs it raises Unavailable.

    The next daemon may need that memory, which is free only when nobody maps it. See PoolMemory.
    """

    def __init__(self, count: int) -> None:
        self.kept: dict[str, Any] = {}
        self._count = count

    @property
    def view(self) -> GpuRows:
        """See PoolMemory."""
        raise self._gone()

    def __len__(self) -> int:
        return self._count

    def copy_in(self, slots: Slots, rows: Rows) -> U8:
        """See PoolMemory."""
        raise self._gone()

    def copy_out(self, slots: Slots, rows: Rows) -> None:
        """See PoolMemory."""
        raise self._gone()

    def checksums(self, slots: Slots) -> U8:
        """See PoolMemory."""
        raise self._gone()

    def settle(self) -> None:
        """See PoolMemory: it was waited for before the memory was given back."""

    def _gone(self) -> Unavailable:
        return Unavailable("the daemon is away, and the memory of its GPU with it")
