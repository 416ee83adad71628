"""Counts the starts that died before they served: a cache may start cold, it may not loop.

What makes one recovery die makes the next one die as well, if it is what lies on disk. After some
in a row nothing of it is trusted any more: the log, the index, the store's FORMAT and its notes of
what was deleted go into the quarantine. The next store has another identity, so slots that the old
one wrote, on disk or in memory, are as good as never written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.errors import ConfigError, NotReady, TierFailed, TierFull
from tierkv.service import deleted
from tierkv.service.store import FORMAT_NAME, StateDirectory

log = logging.getLogger(__name__)

NAME = "STARTS"
"""The file in the state directory: how many starts in a row have died."""

FAILURES_MAX = 3

_OF_THE_MACHINE = (ConfigError, NotReady, TierFull, TierFailed, OSError, MemoryError)
"""Failures that tell nothing against what is on disk: they do not count."""


class Attempts:
    """The starts on one state directory.

    Crash: a start counts as failed from before it reads anything until it serves.
    """

    def __init__(self, directory: StateDirectory) -> None:
        self._directory = directory
        self._failed = _read(directory.path / NAME)

    def set_aside(self, on_repeated_failure: str) -> list[Path]:
        """If too many starts have failed, what made them fail; returns where it is now.

        Crash: all of it is set aside, or the next start goes on with that.

        Raises ConfigError if the configuration wants a person to look first; TierFailed.
        """
        if self._failed < FAILURES_MAX:
            return []
        directory = self._directory
        if on_repeated_failure == "refuse":
            raise ConfigError(
                f"{self._failed} starts in a row died before they served, and "
                f'recovery.on_repeated_failure is "refuse": see the log of those starts and '
                f"`tierkv verify`; remove {directory.path / NAME} to try again, or write "
                '"cold" to start with an empty cache'
            )
        # What was deleted is said by ids, which the new store gives out again.
        names = (FORMAT_NAME, deleted.NAME)
        untrusted = (directory.wal, directory.index, *(directory.path / name for name in names))
        try:
            moved = [directory.set_aside(path) for path in untrusted]
            directory.make_folders()
        except OSError as error:
            raise TierFailed(
                f"cannot set aside the log and the index in {directory.path}: {error}",
                path=str(directory.path),
            ) from error
        aside = [path for path in moved if path is not None]
        log.critical(
            "%d starts in a row died before they served: the cache starts EMPTY, the log and the "
            "index are set aside: %s",
            self._failed,
            ", ".join(map(str, aside)) or "there were none",
        )
        self._failed = 0
        return aside

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A start, until ``served``. It fails if the process dies, or by what is on disk."""
        self._write(self._failed + 1)
        try:
            yield
        except _OF_THE_MACHINE:
            self.forgive()
            raise

    def served(self) -> None:
        """The start is over and well."""
        self._failed = 0
        self._write(0)

    def forgive(self) -> None:
        """Whatever becomes of this start, it is not the fault of what is on disk."""
        self._write(self._failed)

    def _write(self, failed: int) -> None:
        try:
            self._directory.replace(NAME, f"{failed}\n".encode())
        except OSError as error:
            log.warning("cannot note that a start began or ended: %s", error)


def _read(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
