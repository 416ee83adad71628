"""The state directory: who owns it, which store it is, and the sizes it was made with.

LOCK         flock'ed for the daemon's life
FORMAT       JSON, one page: format version, store uuid, segment size, sizes chosen, xxh3_64
wal/         the log           index/   checkpoints (LMDB)
data/        segment files (elsewhere if disk.dir says so)
quarantine/  what recovery refused, kept for inspection
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from tierkv.errors import ConfigError, CorruptionError, NotReady
from tierkv.tiers.linux import sync_directory

FORMAT_VERSION = 1
FORMAT_NAME = "FORMAT"


class StoreFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the FORMAT file says. Sizes in bytes."""

    version: int
    store: str
    disk_segment_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def store_uuid(self) -> bytes:
        """The store's identity, 16 bytes: in every log segment and arena."""
        return uuid.UUID(self.store).bytes


class _Version(msgspec.Struct):
    """What every format has, whatever else it says."""

    version: int


class StateDirectory:
    """The directory, locked for this process. Made by ``open``."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.wal = path / "wal"
        self.index = path / "index"
        self.quarantine = path / "quarantine"
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path) -> Self:
        """Make the directory if need be and lock it.

        Raises NotReady if another process holds it, ConfigError if it cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock_fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot use {path} as server.state_dir: {error.strerror}; choose another, "
                "or make it writable"
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            raise NotReady(
                f"{path} is in use by another tierkv process; stop it, or choose another "
                "server.state_dir",
                state="locked",
            ) from None
        directory = cls(path, lock_fd)
        for name in ("wal", "quarantine"):
            (path / name).mkdir(exist_ok=True)
        return directory

    def read_format(self) -> StoreFormat | None:
        """The FORMAT file, None where there is none. Raises CorruptionError, ConfigError."""
        return read_format(self.path)

    def write_format(self, content: StoreFormat) -> None:
        """Replace the FORMAT file.

        Crash: the old file or the new one, whole.
        """
        body = msgspec.json.encode(content)
        check = xxhash.xxh3_64_hexdigest(body).encode()
        draft = self.path / (FORMAT_NAME + ".tmp")
        with draft.open("wb") as file:
            file.write(body + b"\n" + check + b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self.path / FORMAT_NAME)
        sync_directory(self.path)

    def set_aside(self, path: Path) -> Path | None:
        """Move a file or directory into the quarantine; returns where it is now."""
        if not path.exists():
            return None
        number = 0
        while (target := self.quarantine / f"{path.name}.{number}").exists():
            number += 1
        path.rename(target)
        return target

    def close(self) -> None:
        """Unlock."""
        os.close(self._lock_fd)


def read_format(state_dir: Path) -> StoreFormat | None:
    """What a store's FORMAT file says, None where there is none.

    Raises CorruptionError if it is damaged, ConfigError if a newer tierkv made it.
    """
    path = state_dir / FORMAT_NAME
    try:
        body, _, check = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if xxhash.xxh3_64_hexdigest(body).encode() != check.strip():
        raise CorruptionError(
            f"{path} is damaged; move {state_dir} aside to start with an empty cache",
            path=str(path),
            offset=0,
        )
    version = msgspec.json.decode(body, type=_Version).version
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path} is of format {version}, this tierkv knows {FORMAT_VERSION}: "
            "use the newer version, or move the directory aside"
        )
    return msgspec.json.decode(body, type=StoreFormat)


def recorded_sizes(state_dir: Path) -> dict[str, int]:
    """Sizes the store was made with, by configuration key; empty where there is no store.

    A damaged file counts as none: the daemon will say so when it opens the store.
    """
    try:
        content = read_format(state_dir)
    except (CorruptionError, ConfigError, OSError):
        return {}
    if content is None:
        return {}
    return {
        "device.bytes": content.device_bytes,
        "host.bytes": content.host_bytes,
        "disk.bytes": content.disk_bytes,
    }


def new_store(
    *, disk_segment_bytes: int, device_bytes: int, host_bytes: int, disk_bytes: int
) -> StoreFormat:
    """The format of a store that does not exist yet."""
    return StoreFormat(
        version=FORMAT_VERSION,
        store=str(uuid.uuid4()),
        disk_segment_bytes=disk_segment_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )
