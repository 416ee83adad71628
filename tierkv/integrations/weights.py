"""Which weights a model has: their bytes, whatever the path they lie under."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import xxhash

from tierkv.config.paths import home
from tierkv.errors import InvalidArgument

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
"""Files of a model's folder that have weights in them."""

PIECE_BYTES = 16 << 20
THREADS = 4

SETTLED_S = 2.0
"""A file that changed so recently may change again without a difference that ``stat`` shows."""

REMEMBERED_MAX = 4096
"""Files whose digests are kept, the latest ones."""


def weights_fingerprint(path: str | os.PathLike[str], memory: Path | None = None) -> str:
    """A digest (32 hex digits) of all weights in the folder or file ``path``.

    Every byte is read, once: digests are remembered in the file ``memory`` (None: nowhere) under
    the file's inode, size and times of change, so that a restart need not read them again.

    Raises InvalidArgument if there are no weights.
    """
    folder = Path(path)
    files = [folder] if folder.is_file() else _weight_files(folder)
    if not files:
        raise InvalidArgument(
            f"{folder} has no weights: a folder with {', '.join(SUFFIXES)} files is wanted"
        )
    remembered = _recall(memory)
    now_ns = time.time_ns()
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda file: _digest_of(file, remembered), files))
    digest = xxhash.xxh3_128()
    for file, (stamp, file_digest) in zip(files, found, strict=True):
        name = "" if file == folder else file.relative_to(folder).as_posix()
        digest.update(f"{name}\0{file_digest}\0".encode())
        remembered.pop(stamp.text, None)
        if now_ns - stamp.latest_ns > SETTLED_S * 1e9:
            remembered[stamp.text] = file_digest
    _remember(memory, remembered)
    return digest.hexdigest()


def memory_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where digests of weights are remembered: in the user's cache folder."""
    cache = environ.get("XDG_CACHE_HOME") or f"{home(environ).rstrip('/')}/.cache"
    return Path(cache) / "tierkv" / "weights.json"


class _Stamp(NamedTuple):
    """What ``stat`` tells of a file's content: a change of content changes it."""

    text: str
    latest_ns: int

    @classmethod
    def of(cls, fd: int) -> _Stamp:
        stat = os.fstat(fd)
        fields = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        return cls("-".join(map(str, fields)), max(stat.st_mtime_ns, stat.st_ctime_ns))


def _weight_files(folder: Path) -> list[Path]:
    found: Iterable[Path] = folder.rglob("*") if folder.is_dir() else ()
    return sorted(file for file in found if file.suffix in SUFFIXES and file.is_file())


def _digest_of(file: Path, remembered: Mapping[str, str]) -> tuple[_Stamp, str]:
    try:
        with file.open("rb") as opened:
            fd = opened.fileno()
            stamp = _Stamp.of(fd)
            digest = remembered.get(stamp.text) or _digest_of_content(fd)
            if _Stamp.of(fd) != stamp:
                raise InvalidArgument(f"{file} changed while it was read: start again")
            return stamp, digest
    except OSError as error:
        raise InvalidArgument(f"the weights {file} cannot be read: {error}") from error


def _digest_of_content(fd: int) -> str:
    digest = xxhash.xxh3_128()
    if size := os.fstat(fd).st_size:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content, memoryview(content) as view:
            for start in range(0, size, PIECE_BYTES):
                with view[start : start + PIECE_BYTES] as piece:
                    digest.update(piece)
    return digest.hexdigest()


def _recall(memory: Path | None) -> dict[str, str]:
    if memory is None:
        return {}
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(memory: Path | None, digests: dict[str, str]) -> None:
    """Best effort: what is not remembered is read again."""
    if memory is None:
        return
    kept = dict(list(digests.items())[-REMEMBERED_MAX:])
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, memory)
