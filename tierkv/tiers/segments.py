"""The preallocated files that hold the slots of one pool of the disk tier.

Slot s lies in segment s // slots_per_segment, a file named after the geometry of its blocks:
``<block bytes>x<block tokens>-<segment:08x>.seg``. So the files say themselves how to read them,
whatever number the pool has today. The last segment is shorter when the slots do not fill it.
Segments are made at their first write.

Threads: any thread may call any method, except that ``close`` must be the last call of all.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading

from tierkv.core.state import PoolShape
from tierkv.errors import TierFailed, TierFull
from tierkv.tiers.storage import BlockStorage

_DRAFT_SUFFIX = ".tmp"
_NAME = re.compile(r"([1-9][0-9]*)x([1-9][0-9]*)-([0-9a-f]{8})\.seg(\.tmp)?")


def shapes_present(storage: BlockStorage, directory: str) -> list[PoolShape]:
    """Geometries of which the directory has segments, in no order. Raises OSError."""
    names = map(_NAME.fullmatch, storage.listdir(directory))
    return list({PoolShape(int(name[1]), int(name[2])) for name in names if name})


class Segments:
    """The segment files of one pool."""

    def __init__(
        self,
        directory: str,
        shape: PoolShape,
        *,
        slot_bytes: int,
        slot_count: int,
        slots_per_segment: int,
        storage: BlockStorage,
        direct: bool,
    ) -> None:
        """Find the pool's segments and remove unfinished ones. Raises TierFailed.

        ``direct``: the fds are for reads and writes past the page cache.
        """
        self.slots_per_segment = slots_per_segment
        self._directory = directory
        self._prefix = f"{shape.block_bytes}x{shape.block_tokens}"
        self._slot_bytes = slot_bytes
        self._slot_count = slot_count
        self._storage = storage
        self._direct = direct
        self._fds: dict[int, int] = {}
        self._writable: set[int] = set()
        self._files = threading.Lock()
        self._syncing = threading.Lock()
        self._sync_failure: TierFull | TierFailed | None = None
        try:
            self._present = self._find()
            if self._present:
                # An earlier process may have died before it made their names durable.
                storage.fsync_dir(directory)
        except OSError as error:
            raise tier_error(error, "list the segments of", directory) from error
        # Nor did it necessarily sync what it wrote.
        self._dirty = set(self._present)

    def present(self) -> list[int]:
        """Numbers of the segments that exist, ascending."""
        with self._files:
            return sorted(self._present)

    def fd_to_read(self, segment: int) -> int | None:
        """The segment's fd, or None if it does not exist. Raises OSError."""
        with self._files:
            if segment not in self._present:
                return None
            return self._open(segment)

    def fd_to_write(self, segment: int) -> int:
        """The segment's fd; makes the segment, or what an old one lacks in length, if need be.

        Raises TierFull or TierFailed.

        Crash: a segment gets its name when all its space is reserved and durable; before that only
        a draft exists, which the next start removes.
        """
        path = self.path(segment)
        with self._files:
            try:
                if segment not in self._present:
                    self._create(path, self._size(segment))
                    self._present.add(segment)
                elif segment not in self._writable and self._storage.size(path) < self._size(
                    segment
                ):
                    self._storage.fallocate(self._open(segment), 0, self._size(segment))
                    self._dirty.add(segment)
                self._writable.add(segment)
                return self._open(segment)
            except OSError as error:
                raise tier_error(error, "make the segment", path) from error

    def mark_dirty(self, segment: int) -> None:
        """Say that a write to the segment has returned and the next ``sync`` must cover it."""
        with self._files:
            self._dirty.add(segment)

    def sync(self) -> None:
        """Make durable what was marked dirty before this call, by this thread or any other.

        Raises TierFailed: what was written since the last sync may then be lost. The system calls
        such pages clean, so trying again would prove nothing; every later call raises as well.
        """
        # A second caller waits for the first: its segments may be in the set that one took.
        with self._syncing:
            if self._sync_failure is not None:
                raise self._sync_failure
            with self._files:
                dirty, self._dirty = self._dirty, set()
            for segment in dirty:
                try:
                    with self._files:
                        fd = self._open(segment)
                    self._storage.fdatasync(fd)
                except OSError as error:
                    self._sync_failure = tier_error(error, "sync", self.path(segment))
                    raise self._sync_failure from error

    def close(self) -> None:
        """Close all files."""
        with self._files:
            for fd in self._fds.values():
                self._storage.close(fd)
            self._fds.clear()

    def path(self, segment: int) -> str:
        """The path of a segment."""
        return f"{self._directory}/{self._prefix}-{segment:08x}.seg"

    def _size(self, segment: int) -> int:
        slots = min(self.slots_per_segment, self._slot_count - segment * self.slots_per_segment)
        return slots * self._slot_bytes

    def _find(self) -> set[int]:
        found = set()
        for name in self._storage.listdir(self._directory):
            match = _NAME.fullmatch(name)
            if match is None or f"{match[1]}x{match[2]}" != self._prefix:
                continue
            if match[4]:
                self._storage.unlink(f"{self._directory}/{name}")
            else:
                found.add(int(match[3], 16))
        return found

    def _open(self, segment: int) -> int:
        fd = self._fds.get(segment)
        if fd is None:
            fd = self._fds[segment] = self._storage.open(self.path(segment), direct=self._direct)
        return fd

    def _create(self, path: str, size_bytes: int) -> None:
        storage, draft = self._storage, path + _DRAFT_SUFFIX
        try:
            fd = storage.open(draft, create=True)
            try:
                storage.fallocate(fd, 0, size_bytes)
                storage.fdatasync(fd)
            finally:
                storage.close(fd)
            storage.rename(draft, path)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one that tells why
                storage.unlink(draft)
            raise
        storage.fsync_dir(self._directory)


def tier_error(error: OSError, doing: str, path: str) -> TierFull | TierFailed:
    """The typed error for a failed file operation: TierFull if space is what it lacks."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TierFull(
            f"cannot {doing} {path}: the file system is full; free space or lower disk.bytes",
            path=path,
        )
    return TierFailed(f"cannot {doing} {path}: {error}", path=path)
