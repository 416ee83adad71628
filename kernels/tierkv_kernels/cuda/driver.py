"""The CUDA driver: devices, contexts, streams, events, modules, memory and launches.

Thin objects over the C functions, in their words. Addresses are integers. Except where it says
otherwise, a call acts on the context that is current in its thread, and raises DriverError.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

from tierkv_kernels.cuda import bindings
from tierkv_kernels.errors import BackendUnavailable, DriverError

VARIABLE = "TIERKV_LIBCUDA"
"""Environment variable: the path of another driver library."""

DEFAULT_PATH = "libcuda.so.1"

Arguments = ctypes.Array[c_void_p]


class Driver:
    """A CUDA driver library that is ready for use."""

    def __init__(self, path: str | None = None) -> None:
        """path: of the library; None: $TIERKV_LIBCUDA, else the system's.

        Raises BackendUnavailable if there is none, or it finds no device.
        """
        self.path = path or os.environ.get(VARIABLE) or DEFAULT_PATH
        self.calls = bindings.load(self.path)
        try:
            self.calls.cuInit(0)
        except DriverError as error:
            raise BackendUnavailable(f"no CUDA device: {error}") from error

    @property
    def version(self) -> tuple[int, int]:
        """Of CUDA, the newest that the driver supports."""
        number = c_int()
        self.calls.cuDriverGetVersion(byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def device_count(self) -> int:
        """How many devices this process may use."""
        count = c_int()
        self.calls.cuDeviceGetCount(byref(count))
        return count.value

    def device(self, ordinal: int) -> Device:
        """The device with that number, from 0."""
        handle = c_int()
        self.calls.cuDeviceGet(byref(handle), ordinal)
        return Device(self.calls, handle.value, ordinal)


class Device:
    """A device; its calls need no context."""

    def __init__(self, calls: SimpleNamespace, handle: int, ordinal: int) -> None:
        self.calls, self.handle, self.ordinal = calls, handle, ordinal

    def attribute(self, which: int) -> int:
        """A CUdevice_attribute; those in use have names in ``bindings``."""
        value = c_int()
        self.calls.cuDeviceGetAttribute(byref(value), which, self.handle)
        return value.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.calls.cuDeviceGetName(text, len(text), self.handle)
        return text.value.decode()

    @property
    def uuid(self) -> bytes:
        """16 bytes that name this very card, in every process."""
        text = ctypes.create_string_buffer(16)
        self.calls.cuDeviceGetUuid_v2(text, self.handle)
        return text.raw

    @property
    def arch(self) -> str:
        """As the compiler calls it, such as "sm_90"."""
        major = self.attribute(bindings.COMPUTE_CAPABILITY_MAJOR)
        return f"sm_{major}{self.attribute(bindings.COMPUTE_CAPABILITY_MINOR)}"

    @property
    def total_bytes(self) -> int:
        size = c_size_t()
        self.calls.cuDeviceTotalMem_v2(byref(size), self.handle)
        return size.value

    def context(self) -> Context:
        """The primary context, the one that torch uses too. Close it after use."""
        return Context(self)


class Context:
    """A device's primary context. ``with context:`` makes it current in this thread."""

    def __init__(self, device: Device) -> None:
        self.device, self.calls = device, device.calls
        handle = c_void_p()
        self.calls.cuDevicePrimaryCtxRetain(byref(handle), device.handle)
        self.handle = handle.value

    def close(self) -> None:
        """Give it back. What was made in it must be closed before."""
        self.calls.cuDevicePrimaryCtxRelease_v2(self.device.handle)

    def __enter__(self) -> Context:
        self.calls.cuCtxPushCurrent_v2(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.cuCtxPopCurrent_v2(byref(c_void_p()))

    def is_current(self) -> bool:
        """Whether it is this thread's."""
        handle = c_void_p()
        self.calls.cuCtxGetCurrent(byref(handle))
        return handle.value == self.handle

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        free, total = c_size_t(), c_size_t()
        self.calls.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value

    def synchronize(self) -> None:
        """Wait in this thread until all that this process gave to the device is done."""
        self.calls.cuCtxSynchronize()

    def stream(self) -> Stream:
        """A new stream, which does not wait for the default one."""
        handle = c_void_p()
        self.calls.cuStreamCreate(byref(handle), bindings.STREAM_NON_BLOCKING)
        return Stream(self.calls, handle.value or 0)

    def event(self, *, timing: bool = False, sleeping: bool = False) -> Event:
        """A new event; without timing it is cheaper.

        sleeping: who waits for it leaves the CPU to others, and wakes up some microseconds later.
        """
        handle = c_void_p()
        flags = bindings.EVENT_DEFAULT if timing else bindings.EVENT_DISABLE_TIMING
        if sleeping:
            flags |= bindings.EVENT_BLOCKING_SYNC
        self.calls.cuEventCreate(byref(handle), flags)
        return Event(self.calls, handle.value or 0)

    def module(self, image: bytes) -> Module:
        """Load a cubin or PTX."""
        handle = c_void_p()
        self.calls.cuModuleLoadData(byref(handle), image)
        return Module(self.calls, handle.value or 0)

    def allocate(self, nbytes: int) -> int:
        """The address of new memory on the device, for ``free``."""
        address = c_uint64()
        self.calls.cuMemAlloc_v2(byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        self.calls.cuMemFree_v2(address)

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin host memory, which makes copies asynchronous and fast; begins and ends at pages.

        Kernels may use it, too.
        """
        flags = bindings.HOST_REGISTER_PORTABLE | bindings.HOST_REGISTER_DEVICEMAP
        self.calls.cuMemHostRegister_v2(address, nbytes, flags)

    def unregister_host(self, address: int) -> None:
        self.calls.cuMemHostUnregister(address)


class Event:
    """A point in a stream that others can wait for. Not recorded yet, it counts as reached."""

    def __init__(self, calls: SimpleNamespace, handle: int) -> None:
        self.calls, self.handle = calls, handle

    def is_reached(self) -> bool:
        reached: bool = self.calls.cuEventQuery(self.handle) == 0
        return reached

    def synchronize(self) -> None:
        """Wait for it in this thread; the GIL is free meanwhile."""
        self.calls.cuEventSynchronize(self.handle)

    def seconds_since(self, earlier: Event) -> float:
        """Both with timing, and reached."""
        milliseconds = c_float()
        self.calls.cuEventElapsedTime(byref(milliseconds), earlier.handle, self.handle)
        return milliseconds.value / 1000

    def close(self) -> None:
        self.calls.cuEventDestroy_v2(self.handle)


class Stream:
    """Work in order. What is given to it returns at once; sizes are in bytes.

    Memory that a copy uses must live, and its source stay as it is, until the copy is done.
    """

    def __init__(self, calls: SimpleNamespace, handle: int) -> None:
        self.calls, self.handle = calls, handle

    def copy_to_device(self, device: int, host: int, nbytes: int) -> None:
        self.calls.cuMemcpyHtoDAsync_v2(device, host, nbytes, self.handle)

    def copy_to_host(self, host: int, device: int, nbytes: int) -> None:
        self.calls.cuMemcpyDtoHAsync_v2(host, device, nbytes, self.handle)

    def copy_on_device(self, target: int, source: int, nbytes: int) -> None:
        self.calls.cuMemcpyDtoDAsync_v2(target, source, nbytes, self.handle)

    def fill(self, device: int, byte: int, nbytes: int) -> None:
        self.calls.cuMemsetD8Async(device, byte, nbytes, self.handle)

    def record(self, event: Event) -> None:
        """The event is reached when all that was given to the stream so far is done."""
        self.calls.cuEventRecord(event.handle, self.handle)

    def wait(self, event: Event) -> None:
        """What is given to the stream from now on waits for the event, even another stream's."""
        self.calls.cuStreamWaitEvent(self.handle, event.handle, 0)

    def is_done(self) -> bool:
        done: bool = self.calls.cuStreamQuery(self.handle) == 0
        return done

    def synchronize(self) -> None:
        """Wait in this thread until all is done; the GIL is free meanwhile."""
        self.calls.cuStreamSynchronize(self.handle)

    def close(self) -> None:
        self.calls.cuStreamDestroy_v2(self.handle)


class Module:
    """Loaded kernels."""

    def __init__(self, calls: SimpleNamespace, handle: int) -> None:
        self.calls, self.handle = calls, handle

    def function(self, name: str) -> Function:
        """The kernel of that name, extern "C"."""
        handle = c_void_p()
        self.calls.cuModuleGetFunction(byref(handle), self.handle, name.encode())
        return Function(self, handle.value or 0)

    def close(self) -> None:
        self.calls.cuModuleUnload(self.handle)


class Function:
    """A kernel."""

    def __init__(self, module: Module, handle: int) -> None:
        self.module, self.calls, self.handle = module, module.calls, handle

    def attribute(self, which: int) -> int:
        """A CUfunction_attribute; those in use have names in ``bindings``."""
        value = c_int()
        self.calls.cuFuncGetAttribute(byref(value), which, self.handle)
        return value.value

    def allow_shared(self, nbytes: int) -> None:
        """Let launches ask for so much dynamic shared memory; needed above 48 KiB."""
        self.calls.cuFuncSetAttribute(
            self.handle, bindings.FUNCTION_MAX_DYNAMIC_SHARED_BYTES, nbytes
        )

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        """How many of its thread blocks a multiprocessor runs at once."""
        count = c_int()
        self.calls.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            byref(count), self.handle, threads, shared_bytes
        )
        return count.value

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Arguments,
    ) -> None:
        """Run it. stream: its handle, 0 for the default one. The arguments are read at once."""
        self.calls.cuLaunchKernel(
            self.handle, *grid, threads, 1, 1, shared_bytes, stream, arguments, None
        )


def arguments_of(*values: Any) -> Arguments:
    """What ``launch`` takes, for a kernel with these ctypes values as parameters.

    It points to them: keep them, change them in place, and use it again for the next launch.
    """
    return (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
