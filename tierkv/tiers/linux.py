"""Linux calls that Python's ``os`` and ``mmap`` lack, make while holding the GIL, or spell long."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

from tierkv.core.ids import U8
from tierkv.core.spec import PAGE

# From linux/falloc.h, asm-generic/mman-common.h and linux/magic.h.
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MADV_HUGEPAGE = 14
_TMPFS_MAGIC = 0x01021994
_STATFS_BYTES_MAX = 512


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give a byte range of a file back to the file system; it then reads as zeroes.

    Raises OSError.
    """
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    failed = _libc().fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable: those made, moved or removed. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def advise_huge_pages(mapped: U8) -> bool:
    """Ask for huge pages behind a page-aligned mapping; False if the kernel refuses."""
    address = ctypes.c_void_p(mapped.ctypes.data)
    return bool(_libc().madvise(address, ctypes.c_size_t(mapped.nbytes), _MADV_HUGEPAGE) == 0)


def takes_direct_io(directory: str | os.PathLike[str]) -> bool:
    """Whether files in a directory can be read and written past the page cache, in whole pages."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags, 0o600)
    except OSError:
        return False
    try:
        os.ftruncate(fd, PAGE)
        with mmap.mmap(-1, PAGE) as page:
            return os.preadv(fd, [page], 0) == PAGE
    except OSError:
        return False
    finally:
        os.close(fd)


def is_tmpfs(place: str | os.PathLike[str] | int) -> bool:
    """Whether a path or a descriptor is of a tmpfs, whose content ends with the running kernel.

    A memfd is: the kernel has a tmpfs of its own for them. Raises OSError.
    """
    answer = ctypes.create_string_buffer(_STATFS_BYTES_MAX)
    if isinstance(place, int):
        failed = _libc().fstatfs(place, answer)
    else:
        failed = _libc().statfs(os.fsencode(place), answer)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(place))
    # The file system's type is the first word of the struct on every 64-bit Linux.
    return int.from_bytes(answer.raw[:8], "little") == _TMPFS_MAGIC
