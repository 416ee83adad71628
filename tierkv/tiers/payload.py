"""The memory that a RAM tier's slots lie in: host memory behind a file, or a GPU's.

Pool p has the region [p * region_bytes, (p + 1) * region_bytes).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from typing import Protocol

import numpy as np

from tierkv.core.ids import U8
from tierkv.core.spec import slot_stride
from tierkv.errors import InvariantViolation, require
from tierkv.gpu import Gpu, GpuMemory, GpuRows
from tierkv.pages import ask_for_huge_pages
from tierkv.tiers.linux import punch_hole
from tierkv.tiers.numa import NodePolicy

log = logging.getLogger(__name__)

_STAT_BLOCK = 512


class Payload(Protocol):
    """What an arena asks of the memory. ``fd``: what workers map. ``close`` may be called twice."""

    fd: int
    on_gpu: Gpu | None
    """The GPU that it lies on; None: it is host memory."""

    @property
    def size_bytes(self) -> int:
        """How much workers map of it."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def host(self, pool: int) -> U8:
        """The pool's region in this process, u8 [region_bytes].

        Raises OSError, and InvariantViolation if it is not host memory.
        """
        ...

    def gpu(self, pool: int, block_bytes: int) -> GpuRows | None:
        """The pool's slots for blocks of that size if they lie on a GPU, else None."""
        ...

    def free(self, start: int, stop: int) -> None:
        """Give memory of bytes ``start`` to ``stop`` back; they hold nothing. Raises OSError."""

    def close(self) -> None:
        """Unmap it, and close ``fd``. Views handed out keep their own mapping alive."""


class FilePayload:
    """Host memory: a sparse file, of which only touched pages exist. See Payload.

    Huge pages are asked for, and NUMA nodes chosen, when a region is mapped.
    """

    def __init__(self, fd: int, region_bytes: int, numa: NodePolicy | None) -> None:
        """``numa``: on which nodes new pages shall lie; None: where they are first written."""
        self.fd = fd
        self.on_gpu: Gpu | None = None
        self._region_bytes = region_bytes
        self._numa = numa
        self._maps: dict[int, mmap.mmap] = {}

    @property
    def size_bytes(self) -> int:
        """See Payload."""
        return os.fstat(self.fd).st_size

    @property
    def used_bytes(self) -> int:
        """See Payload."""
        return os.fstat(self.fd).st_blocks * _STAT_BLOCK

    def host(self, pool: int) -> U8:
        """See Payload."""
        if pool not in self._maps:
            offset = pool * self._region_bytes
            self._maps[pool] = mmap.mmap(self.fd, self._region_bytes, offset=offset)
            ask_for_huge_pages(self.host(pool))
            choose_nodes(self.host(pool), self._numa)
        return np.frombuffer(self._maps[pool], np.uint8)

    def gpu(self, pool: int, block_bytes: int) -> GpuRows | None:
        """See Payload."""
        return None

    def free(self, start: int, stop: int) -> None:
        """See Payload."""
        punch_hole(self.fd, start, stop - start)

    def close(self) -> None:
        """See Payload."""
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # a view is still held: it goes with that
                mapped.close()
        self._maps.clear()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class GpuPayload:
    """Memory of a GPU, all of it taken from the start, with the region of one pool. See Payload."""

    def __init__(self, fd: int, memory: GpuMemory, budget_bytes: int) -> None:
        self.fd = fd
        self.on_gpu: Gpu | None = memory.gpu
        self._memory: GpuMemory | None = memory
        self._budget_bytes = budget_bytes

    @property
    def size_bytes(self) -> int:
        """See Payload."""
        return 0 if self._memory is None else self._memory.size_bytes

    @property
    def used_bytes(self) -> int:
        """See Payload."""
        return self.size_bytes

    def host(self, pool: int) -> U8:
        """See Payload."""
        raise InvariantViolation("the slots of this arena are memory of a GPU, not of the host")

    def gpu(self, pool: int, block_bytes: int) -> GpuRows | None:
        """See Payload."""
        require(pool == 0, "a GPU's memory holds pool 0 alone")
        if self._memory is None:
            raise InvariantViolation("the GPU's memory was given back")
        stride = slot_stride(block_bytes)
        return GpuRows(self._memory, 0, self._budget_bytes // stride, stride, block_bytes)

    def free(self, start: int, stop: int) -> None:
        """See Payload. There is nothing to give back: nobody else could have it."""

    def close(self) -> None:
        """See Payload."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            os.close(self.fd)
            self.fd = -1


def choose_nodes(mapped: U8, numa: NodePolicy | None) -> None:
    """Let new pages of a mapping go where the policy says; a refusal is only worth a warning."""
    if numa is None:
        return
    try:
        numa.apply(mapped)
    except OSError as error:
        log.warning("memory of the RAM tiers does not go to %s: %s", numa, error)
