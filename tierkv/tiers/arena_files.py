"""Arenas as named files on a RAM file system: they are found again by name."""

from __future__ import annotations

import os
from pathlib import Path

from tierkv.tiers.arena import ArenaFds


class ArenaFiles:
    """``NAME.arena`` (payload) and ``NAME.table`` in one directory. See ArenaHome."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def find(self, name: str) -> ArenaFds | None:
        """See ArenaHome."""
        try:
            table = _open(self._table(name))
        except FileNotFoundError:
            return None
        try:
            return ArenaFds(_open(self._payload(name)), table)
        except FileNotFoundError:
            os.close(table)
            return None

    def free_bytes(self) -> int:
        """See ArenaHome: what the file system has free."""
        self._directory.mkdir(parents=True, exist_ok=True)
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize

    def make(self, name: str, payload_bytes: int, table: bytes) -> ArenaFds:
        """See ArenaHome.

        Crash: the table appears, complete, only after the payload file it describes.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        payload_fd = _create(self._payload(name), payload_bytes, b"")
        try:
            return ArenaFds(payload_fd, _create(self._table(name), len(table), table))
        except OSError:
            os.close(payload_fd)
            raise

    def drop(self, name: str) -> None:
        """See ArenaHome."""
        # The table first: without it nothing is ever taken over.
        for path in (self._table(name), self._payload(name)):
            path.unlink(missing_ok=True)

    def _payload(self, name: str) -> Path:
        return self._directory / f"{name}.arena"

    def _table(self, name: str) -> Path:
        return self._directory / f"{name}.table"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _create(path: Path, size_bytes: int, content: bytes) -> int:
    draft = path.with_name(path.name + ".tmp")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
        os.pwrite(fd, content, 0)
        draft.rename(path)
    except OSError:
        os.close(fd)
        raise
    return fd
