"""Compiled kernels on disk, so that each is compiled once per machine.

A file is a magic line, the SHA-256 of the image, and the image. It appears whole or not at all; a
torn or damaged one counts as absent. Processes need not know of each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

VARIABLE = "TIERKV_KERNEL_CACHE"
"""Environment variable: another directory."""

LIMIT_BYTES = 256 << 20
"""What is kept at most, unless asked otherwise: a kernel is 20 to 100 KiB."""

_MAGIC = b"tierkv kernel 1\n"
_DIGEST_BYTES = 32
_SUFFIX = ".kernel"


def default_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """$TIERKV_KERNEL_CACHE, else tierkv/kernels in the user's cache (XDG base directories)."""
    if asked := environ.get(VARIABLE):
        return Path(asked)
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the specification says to ignore such a value
        base = Path.home() / ".cache"
    return base / "tierkv/kernels"


def key_of(parts: Iterable[str]) -> str:
    """The key of all that a kernel is made from; parts are told apart."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


class KernelCache:
    """A directory of images."""

    def __init__(self, directory: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.directory = directory or default_directory()
        self.limit_bytes = limit_bytes

    def get(self, key: str) -> bytes | None:
        """The image, None if there is none that is whole. Its use is noted."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        head, image = content[: len(_MAGIC) + _DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
        if head != _MAGIC + hashlib.sha256(image).digest():
            return None
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(path)
        return image

    def put(self, key: str, image: bytes) -> None:
        """Keep an image, and remove those unused for longest if it is too much. Raises OSError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(image).digest() + image)
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._shrink(keep=self._path(key))

    def sizes(self) -> dict[Path, int]:
        """Bytes of each file, the one unused for longest first."""
        found = []
        for path in self.directory.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        return {path: size for _, path, size in sorted(found)}

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _shrink(self, keep: Path) -> None:
        sizes = self.sizes()
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self.limit_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
