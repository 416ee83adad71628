"""The file operations of the disk tier, as an interface that tests can replace.

All errors are ``OSError``. Calls may come from several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffers = Sequence[memoryview]
"""One-dimensional, contiguous, unsigned bytes; writable where they are read into."""


class BlockStorage(Protocol):
    """What the disk tier asks of a file system. ``tierkv_wal.RealStorage`` is one."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> int:
        """Open a file for reading and writing; ``create`` makes a missing one. Returns an fd.

        ``direct``: past the page cache. Offset, address and length of every buffer must then be
        whole pages.
        """

    def close(self, fd: int) -> None:
        """Close an fd."""

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> None:
        """Write all of the buffers, one after the other."""

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        """Fill the buffers one after the other; returns the bytes read, fewer only at the end."""
        ...

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Let the device begin with written bytes. Makes nothing durable, and never fails."""

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
