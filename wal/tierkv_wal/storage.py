"""The seam between a store and the file system: everything durable goes through a ``Storage``.

``RealStorage`` is the operating system; ``tierkv_wal.simulated`` is a file system that can lose
power. Paths are plain strings, descriptors plain integers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFERS_MAX = 1024
"""Buffers one vectored call may take (IOV_MAX on Linux)."""

_SYNC_FILE_RANGE_WRITE = 2  # from linux/fs.h; Python's ``os`` lacks the call


class Storage(Protocol):
    """Durable I/O. Every method raises OSError as the operating system does.

    Reads and writes are whole: a write loops until all bytes are taken, a read stops short only
    at the end of the file. What is written survives the process at once, but power loss only
    after ``fdatasync`` of the file and, for a name made, moved or removed, ``fsync_dir`` of its
    directory.
    """

    def open(
        self,
        path: str,
        *,
        create: bool = False,
        truncate: bool = False,
        writable: bool = True,
        direct: bool = False,
    ) -> int:
        """Open a file; returns its descriptor. ``create`` makes it if it is not there.

        ``direct``: past the page cache (O_DIRECT). Offset, address and length of every buffer
        must then be whole pages. Such writes need a sync as any others do.
        """
        ...

    def close(self, fd: int) -> None:
        """Give the descriptor back. Syncs nothing."""
        ...

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of ``data`` at ``offset``. It must be C-contiguous and of a plain format."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all buffers one behind the other, starting at ``offset``."""
        ...

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end of the file."""
        ...

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill the writable buffers in order; returns the bytes read, fewer only at the end."""
        ...

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Let the device begin with written bytes, so that ``fdatasync`` has less to wait for.

        Makes nothing durable. Never fails: what the device refuses, ``fdatasync`` tells.
        """
        ...

    def fdatasync(self, fd: int) -> None:
        """Make the file's bytes, size and allocation durable (not its name)."""
        ...

    def drop_cache(self, fd: int) -> None:
        """Forget clean cached pages, so that later reads show what the device holds."""
        ...

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space, growing the file if need be; new bytes are zero, old ones stay."""
        ...

    def size(self, path: str) -> int:
        """Bytes in the file."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Move a file to another name on the same file system, replacing what is there."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def mkdir(self, path: str) -> None:
        """Make a directory; its parent must exist."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Sorted names in a directory."""
        ...

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...


class RealStorage:
    """The operating system's files."""

    def open(
        self,
        path: str,
        *,
        create: bool = False,
        truncate: bool = False,
        writable: bool = True,
        direct: bool = False,
    ) -> int:
        flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
        flags |= os.O_CREAT if create else 0
        flags |= os.O_TRUNC if truncate else 0
        flags |= os.O_DIRECT if direct else 0
        return os.open(path, flags, 0o640)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        left = memoryview(data).cast("B")
        while left:
            written = os.pwrite(fd, left, offset)
            offset += written
            left = left[written:]

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        while left:
            written = os.pwritev(fd, left[:_BUFFERS_MAX], offset)
            offset += written
            left = _skip(left, written)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        left = [memoryview(buffer).cast("B") for buffer in buffers]
        total = 0
        while left:
            count = os.preadv(fd, left[:_BUFFERS_MAX], offset + total)
            if not count:
                break
            total += count
            left = _skip(left, count)
            if left and offset + total >= os.fstat(fd).st_size:
                # A direct read refuses to go on from an end that is no whole page.
                break
        return total

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        # Without the flags that wait the call leaves the file's error for fdatasync to report.
        _libc().sync_file_range(
            fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE
        )

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def drop_cache(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _skip(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``buffers`` after their first ``count`` bytes; empty ones go too."""
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []
