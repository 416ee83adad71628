"""The functions of the CUDA driver library that this package calls, as ctypes.

Names, types and numbers are those of cuda.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

from tierkv_kernels.errors import BackendUnavailable, DriverError

OUT_OF_MEMORY = 2
NO_DEVICE = 100
NOT_READY = 600

MULTIPROCESSORS = 16
L2_CACHE_BYTES = 38
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76
SHARED_BYTES_PER_MULTIPROCESSOR = 81
PAGEABLE_MEMORY_ACCESS = 88
SHARED_BYTES_PER_BLOCK_OPTIN = 97
VIRTUAL_MEMORY_SUPPORTED = 102
POSIX_FD_SUPPORTED = 103
"""CUdevice_attribute."""

FUNCTION_LOCAL_BYTES = 3
FUNCTION_REGISTERS = 4
FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8
"""CUfunction_attribute."""

STREAM_NON_BLOCKING = 1
EVENT_DEFAULT = 0
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_DEVICEMAP = 2

ALLOCATION_PINNED = 1
HANDLE_POSIX_FD = 1
LOCATION_DEVICE = 1
ACCESS_READ_WRITE = 3
GRANULARITY_RECOMMENDED = 1


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", MemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", c_ubyte * 8),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", c_int))


_DEVICE = c_int
_ADDRESS = c_uint64
_HANDLE = c_void_p
_ALLOCATION = c_uint64
_PROP = POINTER(MemAllocationProp)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_DEVICE), c_int),
    "cuDeviceGetName": (c_char_p, c_int, _DEVICE),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _DEVICE),
    "cuDeviceGetUuid_v2": (c_char_p, _DEVICE),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _DEVICE),
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), _DEVICE),
    "cuDevicePrimaryCtxRelease_v2": (_DEVICE,),
    "cuCtxGetCurrent": (POINTER(_HANDLE),),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (POINTER(_HANDLE),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuModuleLoadData": (POINTER(_HANDLE), c_char_p),
    "cuModuleUnload": (_HANDLE,),
    "cuModuleGetFunction": (POINTER(_HANDLE), _HANDLE, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, _HANDLE),
    "cuFuncSetAttribute": (_HANDLE, c_int, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), _HANDLE, c_int, c_size_t),
    "cuLaunchKernel": (_HANDLE, *[c_uint] * 7, _HANDLE, c_void_p, c_void_p),
    "cuStreamCreate": (POINTER(_HANDLE), c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamQuery": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuEventCreate": (POINTER(_HANDLE), c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (POINTER(c_float), _HANDLE, _HANDLE),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, _HANDLE),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), _PROP, c_int),
    "cuMemCreate": (POINTER(_ALLOCATION), c_size_t, _PROP, c_uint64),
    "cuMemRelease": (_ALLOCATION,),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, c_uint64),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _ALLOCATION, c_uint64),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, _ALLOCATION, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(_ALLOCATION), c_void_p, c_int),
}
"""What each function takes; all return a CUresult."""

_NAMING = ("cuGetErrorName", "cuGetErrorString")


def load(path: str) -> SimpleNamespace:
    """The library's functions, by name. Raises BackendUnavailable.

    Each raises DriverError when the call fails. NOT_READY is no failure: queries return it.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise BackendUnavailable(f"no CUDA driver: {error}") from error
    for name in (*SIGNATURES, *_NAMING):
        if not hasattr(library, name):
            raise BackendUnavailable(f"the CUDA driver {path} is too old: it lacks {name}")
    for name in _NAMING:
        getattr(library, name).argtypes = (c_int, POINTER(c_char_p))

    def explain(function: str, code: int) -> str:
        text = c_char_p()
        if getattr(library, function)(code, ctypes.byref(text)) or not text.value:
            return "unknown"
        return text.value.decode()

    def check(code: int, function: Any, _: tuple[Any, ...]) -> int:
        if code not in (0, NOT_READY):
            name, text = (explain(naming, code) for naming in _NAMING)
            raise DriverError(function.__name__, code, name, text)
        return code

    calls = SimpleNamespace()
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = arguments, c_int, check
        setattr(calls, name, function)
    return calls
