"""Blocks of a GPU for those who only know host memory: a few at a time, in a window onto them.

A window is used like an arena. It takes the place of the GPU's in copies to and from disk, and
where checksums are computed.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections.abc import Iterator

import numpy as np
from tierkv_kernels.errors import DriverError

from tierkv.core.ids import U8, U32, Bool
from tierkv.errors import InvariantViolation
from tierkv.gpu import Gpu, GpuRows
from tierkv.tiers.arena import Arena
from tierkv.tiers.entry import Entries, blank_entries

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
"""Enough for a GPU's bus to be busy nearly all the time; a larger block gets a larger window."""


class Window:
    """Room for some slots of one pool of an arena on a GPU, numbered from 0 on, in host memory.

    Implements ``Blocks``, for that pool.
    """

    def __init__(self, arena: Arena, pool: int, rows: GpuRows, count: int, memory: U8) -> None:
        self._arena, self._pool, self._rows = arena, pool, rows
        stride = rows.stride
        self._memory = memory[: count * stride].reshape(count, stride)
        self._table = blank_entries(count, arena.block_tokens(pool))
        self.numbers = np.arange(count, dtype=np.uint32)
        """All slots here."""

    def fetch(self, slots: U32) -> None:
        """Take entries and payload from these slots of the arena, one for each here.

        Raises GpuFailed.
        """
        self._table[:] = self._arena.table(self._pool)[slots]
        self._rows.fetch(slots, self.payload(self._pool), self.numbers)

    def store(self, slots: U32, good: Bool) -> None:
        """Put what is ``good`` (shape [n]) into these slots of the arena. Raises GpuFailed.

        Crash: an entry is written after its payload.
        """
        chosen = np.flatnonzero(good)
        self._rows.store(slots[chosen], self.payload(self._pool), chosen)
        self._arena.table(self._pool)[slots[chosen]] = self._table[chosen]

    def slots(self, pool: int) -> U8:
        """See Blocks."""
        self._check(pool)
        return self._memory

    def payload(self, pool: int) -> U8:
        """See Blocks."""
        self._check(pool)
        return self._memory[:, : self._rows.width]

    def table(self, pool: int) -> Entries:
        """See Blocks."""
        self._check(pool)
        return self._table

    def block_bytes(self, pool: int) -> int:
        """See Blocks."""
        self._check(pool)
        return self._rows.width

    def empty(self, pool: int, slots: U32) -> None:
        """See Blocks."""
        self._check(pool)
        self._table[slots] = np.zeros((), self._table.dtype)

    def _check(self, pool: int) -> None:
        if pool != self._pool:
            raise InvariantViolation(f"a window onto pool {self._pool} was used for pool {pool}")


class Windows:
    """Makes windows. Their memory is pinned where the system allows it, and used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[U8] = []

    def onto(self, arena: Arena, pool: int, count: int) -> Iterator[tuple[Window, slice]]:
        """Windows for so many slots together, one after the other, and which of them are its.

        A window is not used after the next one was asked for.
        """
        rows = arena.gpu(pool)
        if rows is None:
            raise InvariantViolation("host memory needs no window")
        step = max(1, WINDOW_BYTES // rows.stride)
        with self._memory(rows.memory.gpu, step * rows.stride) as memory:
            for first in range(0, count, step):
                part = slice(first, min(first + step, count))
                yield Window(arena, pool, rows, part.stop - first, memory), part

    @contextlib.contextmanager
    def _memory(self, gpu: Gpu, size_bytes: int) -> Iterator[U8]:
        with self._lock:
            memory = self._idle.pop() if self._idle else None
        if memory is None or memory.nbytes < size_bytes:
            memory = _pinned(gpu, max(size_bytes, WINDOW_BYTES))
        try:
            yield memory
        finally:
            # Also after a failure: were it unmapped, the GPU would still use its old pages in place
            # of what is mapped at that address next.
            with self._lock:
                self._idle.append(memory)


def _pinned(gpu: Gpu, size_bytes: int) -> U8:
    """Memory that begins at a page, pinned for the life of the process if that is allowed."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    try:
        gpu.pin(memory)
    except DriverError as error:
        log.warning("copies to and from the GPU are slower than they could be: %s", error)
    return memory
