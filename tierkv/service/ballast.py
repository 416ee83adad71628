"""Room kept back in the state directory, so that a recovery works on a full disk.

A recovery makes a log segment and commits to the index before it may remove anything. Where others
have filled the file system up, this file is what it can give up for that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
from collections.abc import Callable, Iterator
from typing import TypeVar

from tierkv_wal import Storage

from tierkv.errors import TierFailed, TierFull

log = logging.getLogger(__name__)
T = TypeVar("T")

NAME = "reserve.bin"
_DRAFT = "reserve.tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT)

INDEX_BYTES = 4 << 20
"""What a commit to the index may take, generously: LMDB writes each changed page anew."""

INDEX_BYTES_MIN = 256 << 10
"""Where there is no room for so much, less is better than nothing, down to this."""


class Ballast:
    """The file: room for a new log segment and a commit to the index."""

    def __init__(self, storage: Storage, state_dir: str, segment_bytes: int) -> None:
        self.size_bytes = segment_bytes + INDEX_BYTES
        self._storage = storage
        self._directory = state_dir
        self._path = posixpath.join(state_dir, NAME)
        self._draft = posixpath.join(state_dir, _DRAFT)

    def fill(self) -> int:
        """Make the file, or a larger one than is there, as far as there is room.

        Returns how many bytes it holds back now: ``size_bytes``, less on a disk that is nearly
        full, 0 for nothing. Raises OSError for anything but a lack of room.

        Crash: the old file or the new one, and maybe a draft beside it.
        """
        present = self._present_bytes()
        for size_bytes in self._sizes():
            if present >= size_bytes:
                break
            try:
                self._make(size_bytes)
            except OSError as error:
                # A part of it would only take the last of the room.
                with contextlib.suppress(OSError):
                    self._storage.unlink(self._draft)
                if error.errno not in _FULL:
                    raise
            else:
                return size_bytes
        return present

    def spend(self) -> bool:
        """Give the room up; False if there was none. Raises OSError.

        Crash: the file is there, or is not.
        """
        present = set(self._storage.listdir(self._directory)) & {NAME, _DRAFT}
        for name in present:
            self._storage.unlink(posixpath.join(self._directory, name))
        return bool(present)

    def backing(self, recover: Callable[[], T]) -> T:
        """Run a recovery; where it fails for lack of room, spend the ballast and run it again.

        Raises what the recovery raises, TierFull if there is not enough room even then.

        Crash: as in the recovery, which changes nothing old before it succeeds.
        """
        try:
            return recover()
        except (OSError, TierFull, TierFailed) as error:
            if not self._lacks_room(error):
                raise
            if not self.spend():
                raise self._too_full(error) from error
            log.warning("no room to recover, trying again without the ballast: %s", error)
        try:
            return recover()
        except (OSError, TierFull, TierFailed) as error:
            if not self._lacks_room(error):
                raise
            raise self._too_full(error) from error

    def _present_bytes(self) -> int:
        if NAME in self._storage.listdir(self._directory):
            return self._storage.size(self._path)
        return 0

    def _sizes(self) -> Iterator[int]:
        """From what it should hold back to the least that makes sense."""
        index_bytes = INDEX_BYTES
        while index_bytes >= INDEX_BYTES_MIN:
            yield self.size_bytes - INDEX_BYTES + index_bytes
            index_bytes //= 2

    def _make(self, size_bytes: int) -> None:
        storage = self._storage
        fd = storage.open(self._draft, create=True)
        try:
            storage.fallocate(fd, 0, size_bytes)
            storage.fdatasync(fd)
        finally:
            storage.close(fd)
        storage.rename(self._draft, self._path)
        storage.fsync_dir(self._directory)

    def _lacks_room(self, error: OSError | TierFull | TierFailed) -> bool:
        """What is free must tell: LMDB may report a full disk as an I/O error, and a tier's file
        system may be full while this one is not."""
        if _errno_of(error) == errno.EDQUOT:
            return True
        file_system = os.statvfs(self._directory)
        return file_system.f_bavail * file_system.f_frsize < self.size_bytes

    def _too_full(self, error: Exception) -> TierFull:
        return TierFull(
            f"no room to recover in {self._directory}, which is as it was: {error}. Free "
            f"{self.size_bytes} bytes on that file system (quarantine/ there may be deleted), then "
            "start again",
            path=self._directory,
        )


def _errno_of(error: BaseException) -> int | None:
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None
