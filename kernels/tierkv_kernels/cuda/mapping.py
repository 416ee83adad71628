"""Device memory that another process can map: one allocation at one address.

The virtual memory management of the CUDA driver: memory is created, exported as a POSIX file
descriptor, imported elsewhere, and mapped into reserved addresses.
"""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from tierkv_kernels.cuda import bindings
from tierkv_kernels.cuda.driver import Context, Device
from tierkv_kernels.errors import BackendUnavailable


def _properties(device: Device) -> bindings.MemAllocationProp:
    return bindings.MemAllocationProp(
        type=bindings.ALLOCATION_PINNED,
        requestedHandleTypes=bindings.HANDLE_POSIX_FD,
        location=bindings.MemLocation(bindings.LOCATION_DEVICE, device.ordinal),
    )


def granularity(device: Device) -> int:
    """Bytes that the size of a mapping is a multiple of.

    Raises BackendUnavailable if the device cannot share memory by descriptor, DriverError.
    """
    for which in (bindings.VIRTUAL_MEMORY_SUPPORTED, bindings.POSIX_FD_SUPPORTED):
        if not device.attribute(which):
            raise BackendUnavailable(f"{device.name} cannot share its memory by file descriptor")
    size = c_size_t()
    device.calls.cuMemGetAllocationGranularity(
        byref(size), _properties(device), bindings.GRANULARITY_RECOMMENDED
    )
    return size.value


class Mapping:
    """Memory of one device, mapped to be read and written; addresses stay until ``close``."""

    def __init__(self, context: Context, allocation: int, nbytes: int) -> None:
        """Maps an allocation and owns it from now on, even if this raises. See below."""
        self.context, self.calls, self.nbytes = context, context.calls, nbytes
        self._allocation = allocation
        self.address = 0
        reserved, mapped = c_uint64(), False
        try:
            self.calls.cuMemAddressReserve(byref(reserved), nbytes, 0, 0, 0)
            self.calls.cuMemMap(reserved, nbytes, 0, allocation, 0)
            mapped = True
            access = bindings.MemAccessDesc(
                bindings.MemLocation(bindings.LOCATION_DEVICE, context.device.ordinal),
                bindings.ACCESS_READ_WRITE,
            )
            self.calls.cuMemSetAccess(reserved, nbytes, byref(access), 1)
        except BaseException:
            self._undo(reserved.value, mapped)
            raise
        self.address = reserved.value

    @classmethod
    def create(cls, context: Context, nbytes: int) -> Mapping:
        """New memory of ``nbytes`` or a little more, see ``granularity``: ``mapping.nbytes``.

        Raises DriverError (with OUT_OF_MEMORY, too) and BackendUnavailable.
        """
        unit = granularity(context.device)
        nbytes = -(-nbytes // unit) * unit
        allocation = c_uint64()
        properties = _properties(context.device)
        context.calls.cuMemCreate(byref(allocation), nbytes, properties, 0)
        return cls(context, allocation.value, nbytes)

    @classmethod
    def open(cls, context: Context, fd: int, nbytes: int) -> Mapping:
        """Memory that another process created and exported; the descriptor stays the caller's.

        nbytes: the exporter's ``mapping.nbytes``.
        """
        allocation = c_uint64()
        context.calls.cuMemImportFromShareableHandle(
            byref(allocation), c_void_p(fd), bindings.HANDLE_POSIX_FD
        )
        return cls(context, allocation.value, nbytes)

    def export_fd(self) -> int:
        """A new file descriptor of the memory; it keeps the memory alive until closed."""
        fd = c_int(-1)
        self.calls.cuMemExportToShareableHandle(
            byref(fd), self._allocation, bindings.HANDLE_POSIX_FD, 0
        )
        return fd.value

    def close(self) -> None:
        """Unmap. The memory itself goes with its last mapping and descriptor, in any process."""
        if self.address:
            self._undo(self.address, mapped=True)
            self.address = 0

    def _undo(self, address: int, mapped: bool) -> None:
        if mapped:
            self.calls.cuMemUnmap(address, self.nbytes)
        if address:
            self.calls.cuMemAddressFree(address, self.nbytes)
        self.calls.cuMemRelease(self._allocation)
