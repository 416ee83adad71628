"""A small file system of its own that a test can fill up."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

FILLER_BYTES = 64 << 10


class SmallDisk:
    """A mounted tmpfs or ext4. A context manager: it is unmounted and gone at the end.

    Needs root. A deleted file of an ext4 may give its blocks back a moment later only.
    """

    def __init__(self, kind: str, size_bytes: int) -> None:
        self._kind = kind
        self._size_bytes = size_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="tierkv-disk-"))
        self.path = self._folder / "mounted"
        self._filler = self.path / "filler"

    def fill_up(self) -> None:
        """Leave no room for a single page."""
        with self._filler.open("ab") as file:
            step = FILLER_BYTES
            while step >= 512:
                try:
                    os.write(file.fileno(), bytes(step))
                    os.fsync(file.fileno())
                except OSError:
                    step //= 2

    def make_room(self) -> None:
        """Undo ``fill_up``."""
        self._filler.unlink()

    def __enter__(self) -> Self:
        self.path.mkdir()
        image = self._folder / "image"
        if self._kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", f"size={self._size_bytes}", "tmpfs", self.path)
        else:
            with image.open("wb") as file:
                file.truncate(self._size_bytes)
            _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
            _run("mount", "-o", "loop", image, self.path)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("umount", self.path)
        shutil.rmtree(self._folder)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
