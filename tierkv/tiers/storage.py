"""The file operations of the disk tier, as an interface that tests can replace.

All errors are ``OSError``. Calls may come from several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

_BUFFERS_MAX = 1024
"""Buffers that one vectored call takes on Linux (IOV_MAX)."""

Buffers = Sequence[memoryview]
"""One-dimensional, contiguous, unsigned bytes; writable where they are read into."""


class BlockStorage(Protocol):
    """What the disk tier asks of a file system."""

    def open(self, path: str, *, create: bool = False) -> int:
        """Open a file for reading and writing; ``create`` makes a missing one. Returns an fd."""

    def close(self, fd: int) -> None:
        """Close an fd."""

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> None:
        """Write all of the buffers, one after the other."""

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Fill the buffers one after the other; returns the bytes read, fewer only at the end."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Make a file's content and size durable."""

    def fsync_dir(self, path: str) -> None:
        """Make a directory's entries durable."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve space in a file, growing it if need be; old bytes stay, new ones are zero."""

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, atomically, replacing what had it."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, in no order."""
        ...

    def size(self, path: str) -> int:
        """Length of a file in bytes."""
        ...

    def mkdir(self, path: str) -> None:
        """Make a directory; its parent must exist."""


class OsStorage:
    """The machine's own file system. Every bulk call frees the GIL."""

    def open(self, path: str, *, create: bool = False) -> int:
        """See ``BlockStorage``."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)

    def close(self, fd: int) -> None:
        """See ``BlockStorage``."""
        os.close(fd)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> None:
        """See ``BlockStorage``."""
        rest = list(buffers)
        while rest:
            done = os.pwritev(fd, rest[:_BUFFERS_MAX], offset)
            offset += done
            rest = _after(rest, done)

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """See ``BlockStorage``."""
        rest = list(buffers)
        total = 0
        while rest:
            done = os.preadv(fd, rest[:_BUFFERS_MAX], offset + total)
            if done == 0:
                break
            total += done
            rest = _after(rest, done)
        return total

    def fdatasync(self, fd: int) -> None:
        """See ``BlockStorage``."""
        os.fdatasync(fd)

    def fsync_dir(self, path: str) -> None:
        """See ``BlockStorage``."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """See ``BlockStorage``."""
        os.posix_fallocate(fd, offset, length)

    def rename(self, source: str, target: str) -> None:
        """See ``BlockStorage``."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """See ``BlockStorage``."""
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        """See ``BlockStorage``."""
        return os.listdir(path)

    def size(self, path: str) -> int:
        """See ``BlockStorage``."""
        return os.stat(path).st_size

    def mkdir(self, path: str) -> None:
        """See ``BlockStorage``."""
        os.mkdir(path, 0o700)


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers behind their first ``done`` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
