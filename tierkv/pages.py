"""Pages of shared memory: taken or mapped before somebody needs them, and huge ones asked for.

Every call releases the interpreter lock, which the methods of ``mmap`` hold. Offsets and lengths
are bytes of the mapping (or the file) that is named.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np

from tierkv.core.ids import U8

PAGE_BYTES = 4096

PIECE_BYTES = 2 << 20
PIECE_S = 0.001
"""How many pages one system call takes or maps: a huge page, or more if that goes fast. Meanwhile
no other thread of the process can map or unmap anything."""

# From asm-generic/mman-common.h.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

# From linux/fs.h.
_PAGEMAP_SCAN = 0xC0606610
_PAGEMAP_SCAN_ARG = struct.Struct("<12Q")
_PAGE_IS_HUGE = 1 << 6

_REGIONS = 64
_SCAN_BYTES = 64 << 20


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library; calls of it leave their error in ``ctypes.get_errno()``."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    """Raise the OSError of a C call that failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def populate(
    mapped: U8, start: int, stop: int, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Make the pages of bytes ``start`` to ``stop`` exist, and map them; no byte changes.

    As if the first byte of each page was written over with itself. ``is_stopped`` is asked now
    and then. ``mapped`` (u8 [n]) begins at a page.

    Raises OSError: EFAULT if the file system is full, ENOMEM, EINVAL before Linux 5.14.
    """
    stop = min(_up(stop), mapped.nbytes)
    at = start // PAGE_BYTES * PAGE_BYTES
    piece = PIECE_BYTES
    while at < stop and not is_stopped():
        after = min((at // PIECE_BYTES) * PIECE_BYTES + piece, stop)
        began_s = time.perf_counter()
        _advise(mapped, at, after, _MADV_POPULATE_WRITE)
        piece = piece * 2 if time.perf_counter() - began_s < PIECE_S / 2 else PIECE_BYTES
        at = after


def backed_ranges(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of bytes ``start`` to ``stop`` of a sparse file that have pages, in order.

    Raises OSError.
    """
    at = start
    while at < stop:
        try:
            first = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no more data
                return
            raise
        if first >= stop:
            return
        at = min(os.lseek(fd, first, os.SEEK_HOLE), stop)
        yield first, at


def ask_for_huge_pages(mapped: U8) -> bool:
    """Ask for huge pages where this process takes pages of a mapping; False if refused."""
    try:
        _advise(mapped, 0, mapped.nbytes, _MADV_HUGEPAGE)
    except OSError:
        return False
    return True


def huge_bytes(mapped: U8, start: int, stop: int) -> int:
    """How much of bytes ``start`` to ``stop`` this process has mapped as huge pages.

    Raises OSError, before Linux 6.7 for sure.
    """
    regions = np.zeros((_REGIONS, 3), np.uint64)  # start, end, categories
    base, found = mapped.ctypes.data, 0
    at, end = base + start, base + stop
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        while at < end:
            request = bytearray(
                _PAGEMAP_SCAN_ARG.pack(
                    _PAGEMAP_SCAN_ARG.size, 0, at, min(at + _SCAN_BYTES, end), 0,
                    regions.ctypes.data, _REGIONS, 0, 0, _PAGE_IS_HUGE, 0, _PAGE_IS_HUGE,
                )
            )  # fmt: skip
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, request)
            found += int((regions[:count, 1] - regions[:count, 0]).sum())
            at = _PAGEMAP_SCAN_ARG.unpack(request)[4]
    return found


def _advise(mapped: U8, start: int, stop: int, advice: int) -> None:
    address = ctypes.c_void_p(mapped.ctypes.data + start)
    check(libc().madvise(address, ctypes.c_size_t(stop - start), advice))


def _up(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
