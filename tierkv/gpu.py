"""Memory of a GPU that processes share, and copies between it and host memory. Needs no torch.

The daemon makes it and hands out its descriptor; workers map it. Blocks lie in rows, as in a RAM
tier: row ``r`` begins at ``address + r * stride``. Every copy has its own stream, so it waits for
no kernel of anybody's, and has ended when the call returns.

Any thread may call anything at any time, on different rows.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tierkv_kernels.cuda.driver import Context, Driver, Event, Stream
from tierkv_kernels.cuda.mapping import Mapping
from tierkv_kernels.errors import BackendUnavailable, DriverError

from tierkv.core.ids import I64, U8
from tierkv.errors import require

Rows = npt.NDArray[np.integer]
"""Row numbers, shape [n], of any integer type."""


class GpuFailed(Exception):
    """The GPU refused a copy. After most errors its driver refuses all that this process asks."""


class _Lane(NamedTuple):
    """A stream, and what tells that its copies are done: the CPU is the engines' meanwhile."""

    stream: Stream
    done: Event


class Gpu:
    """One GPU, ready for copies. ``name`` is its model, ``identity`` (16 bytes) this very card.

    It owns the context, and gives it back when nobody uses it any more.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.name = context.device.name
        self.identity = context.device.uuid
        self._lanes: list[_Lane] = []
        self._lending = threading.Lock()
        self._issuing = threading.Lock()
        """Held while copies are given to the GPU, or memory is pinned."""
        self.edges: list[int] = []
        """Addresses where pinned memory begins or ends, in order."""
        weakref.finalize(self, _give_back, context, self._lanes).atexit = False

    @classmethod
    def open(cls, index: int) -> Gpu:
        """The GPU of that number, from 0. Raises BackendUnavailable, DriverError."""
        driver = Driver()
        count = driver.device_count()
        if not 0 <= index < count:
            raise BackendUnavailable(f"there is no GPU {index}; this process sees {count}")
        return cls(driver.device(index).context())

    @classmethod
    def find(cls, identity: bytes) -> Gpu:
        """The GPU that another process calls so. Raises BackendUnavailable, DriverError."""
        driver = Driver()
        for index in range(driver.device_count()):
            if driver.device(index).uuid == identity:
                return cls(driver.device(index).context())
        raise BackendUnavailable(
            f"this process does not see the GPU {identity.hex()}: look at CUDA_VISIBLE_DEVICES"
        )

    @property
    def index(self) -> int:
        """Its number in this process, which is torch's as well."""
        return self.context.device.ordinal

    def free_bytes(self) -> int:
        """Memory of it that nobody has. Raises DriverError."""
        with self.context:
            return self.context.free_bytes()

    def settle(self) -> None:
        """Wait until all that this process has given to the GPU is done. Raises GpuFailed."""
        with _failing("wait for the GPU"), self.context:
            self.context.synchronize()

    def pin(self, memory: U8) -> None:
        """Let copies to and from this host memory be direct; it begins and ends at pages.

        Its pages are taken and stay until ``unpin``. Raises DriverError.
        """
        start = memory.ctypes.data
        with self._issuing, self.context:
            self.context.register_host(start, memory.nbytes)
            self.edges = sorted([*self.edges, start, start + memory.nbytes])

    def unpin(self, memory: U8) -> None:
        """Undo ``pin``, when no copy uses the memory any more. Raises DriverError."""
        start = memory.ctypes.data
        with self._issuing, self.context:
            self.context.unregister_host(start)
            for edge in (start, start + memory.nbytes):
                self.edges.remove(edge)

    @contextlib.contextmanager
    def copying(self) -> Iterator[Stream]:
        """A stream for some copies, which have ended when this has. Raises GpuFailed."""
        with _failing("copy blocks of the GPU"), self.context:
            with self._lending:
                lane = self._lanes.pop() if self._lanes else None
            lane = lane or _Lane(self.context.stream(), self.context.event(sleeping=True))
            try:
                with self._issuing:
                    yield lane.stream
                    lane.stream.record(lane.done)
                lane.done.synchronize()
            except BaseException:
                # Whatever went wrong: no copy may touch memory that the caller takes back.
                lane.stream.synchronize()
                raise
            with self._lending:
                self._lanes.append(lane)


class GpuMemory:
    """One allocation, mapped in this process until ``close`` or until nobody uses it."""

    def __init__(self, gpu: Gpu, mapping: Mapping) -> None:
        self.gpu = gpu
        self._mapping = mapping
        self._unmapping = weakref.finalize(self, _unmap, gpu, mapping)
        self._unmapping.atexit = False

    @classmethod
    def make(cls, gpu: Gpu, size_bytes: int) -> GpuMemory:
        """New memory, of that size or a little more. Raises BackendUnavailable, DriverError."""
        with gpu.context:
            return cls(gpu, Mapping.create(gpu.context, size_bytes))

    @classmethod
    def attach(cls, gpu: Gpu, fd: int, size_bytes: int) -> GpuMemory:
        """Memory behind another process's descriptor, which stays the caller's.

        ``size_bytes``: what it calls ``size_bytes``. Raises DriverError.
        """
        with gpu.context:
            return cls(gpu, Mapping.open(gpu.context, fd, size_bytes))

    @property
    def address(self) -> int:
        """Where it begins, in this process, on the GPU."""
        return self._mapping.address

    @property
    def size_bytes(self) -> int:
        """How much there is."""
        return self._mapping.nbytes

    def export_fd(self) -> int:
        """A new descriptor for other processes; the caller closes it. Raises DriverError."""
        with self.gpu.context:
            return self._mapping.export_fd()

    def close(self) -> None:
        """Unmap it. The memory itself goes with its last mapping and descriptor."""
        self._unmapping()


@dataclass(frozen=True, slots=True, eq=False)
class GpuRows:
    """``count`` rows of ``stride`` bytes from byte ``offset`` of the memory on.

    The first ``width`` bytes of each are copied.
    """

    memory: GpuMemory
    offset: int
    count: int
    stride: int
    width: int

    def __post_init__(self) -> None:
        end = self.offset + self.count * self.stride
        require(self.offset >= 0 and self.width <= self.stride, "a row lies in its slot")
        require(end <= self.memory.size_bytes, "the rows lie in the memory")

    def __len__(self) -> int:
        return self.count

    @property
    def address(self) -> int:
        """Where row 0 begins."""
        return self.memory.address + self.offset

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """All slots as u8 [count, stride], for torch, CuPy and others; the memory stays ours.

        https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        """
        return {
            "shape": (self.count, self.stride),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def fetch(self, rows: Rows, host: U8, at: Rows) -> None:
        """Copy rows [n] into rows ``at`` [n] of host memory (u8 [m, width]). Raises GpuFailed."""
        self._check(rows, host, at)
        with self.memory.gpu.copying() as stream:
            for device, address, size_bytes in self._pieces(rows, host, at):
                stream.copy_to_host(address, device, size_bytes)

    def store(self, rows: Rows, host: U8, at: Rows) -> None:
        """Copy rows ``at`` [n] of host memory (u8 [m, width]) into rows [n]. Raises GpuFailed."""
        self._check(rows, host, at)
        with self.memory.gpu.copying() as stream:
            for device, address, size_bytes in self._pieces(rows, host, at):
                stream.copy_to_device(device, address, size_bytes)

    def _check(self, rows: Rows, host: U8, at: Rows) -> None:
        require(host.ndim == 2 and host.shape[1] == self.width, "rows are as wide on both sides")
        require(len(rows) == len(at), "one row here for each there")
        for numbers, count in ((rows, self.count), (at, len(host))):
            inside = not len(numbers) or 0 <= numbers.min() <= numbers.max() < count
            require(inside, "the memory has these rows")

    def _pieces(self, rows: Rows, host: U8, at: Rows) -> Iterator[tuple[int, int, int]]:
        """Address there, address here, and bytes of each copy; neighbours share one."""
        if not len(rows):
            return
        there, here = rows.astype(np.int64), at.astype(np.int64)
        begins = np.ones(len(there), np.bool_)
        if self.stride == self.width == host.strides[0]:
            begins[1:] = (np.diff(there) != 1) | (np.diff(here) != 1)
        firsts: I64 = np.flatnonzero(begins)
        sizes = np.diff(np.append(firsts, len(there))) * self.width
        devices = self.address + there[firsts] * self.stride
        addresses = host.ctypes.data + here[firsts] * host.strides[0]
        edges = self.memory.gpu.edges
        for device, start, size in zip(
            devices.tolist(), addresses.tolist(), sizes.tolist(), strict=True
        ):
            # The driver refuses memory of which a part is pinned.
            inner = edges[bisect_right(edges, start) : bisect_left(edges, start + size)]
            for one, other in pairwise([start, *inner, start + size]):
                yield device + one - start, one, other - one


def _give_back(context: Context, lanes: list[_Lane]) -> None:
    with contextlib.suppress(DriverError):
        with context:
            while lanes:
                lane = lanes.pop()
                lane.stream.close()
                lane.done.close()
        context.close()


def _unmap(gpu: Gpu, mapping: Mapping) -> None:
    # A driver that has failed unmaps nothing; the memory goes with the process then.
    with contextlib.suppress(DriverError), gpu.context:
        gpu.context.synchronize()  # somebody's kernel may still be at work there
        mapping.close()


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except DriverError as error:
        raise GpuFailed(f"cannot {what}: {error}") from error
