"""Linux calls on files that Python's ``os`` lacks or spells long."""

from __future__ import annotations

import ctypes
import os

from tierkv.pages import check, libc

# From linux/falloc.h and linux/magic.h.
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_TMPFS_MAGIC = 0x01021994
_STATFS_BYTES_MAX = 512


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give a byte range of a file back to the file system; it then reads as zeroes.

    Raises OSError.
    """
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    check(libc().fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable: those made, moved or removed. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def takes_direct_io(directory: str | os.PathLike[str]) -> bool:
    """Whether files in a directory can be read and written past the page cache.

    Asks by a file without a name, of which nothing is left.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open(directory, flags, 0o600))
    except OSError:
        return False
    return True


def is_tmpfs(place: str | os.PathLike[str] | int) -> bool:
    """Whether a path or a descriptor is of a tmpfs, whose content ends with the running kernel.

    A memfd is: the kernel has a tmpfs of its own for them. Raises OSError.
    """
    answer = ctypes.create_string_buffer(_STATFS_BYTES_MAX)
    if isinstance(place, int):
        failed = libc().fstatfs(place, answer)
    else:
        failed = libc().statfs(os.fsencode(place), answer)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(place))
    # The file system's type is the first word of the struct on every 64-bit Linux.
    return int.from_bytes(answer.raw[:8], "little") == _TMPFS_MAGIC
