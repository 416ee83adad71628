"""The state directory: who owns it, which store it is, and the sizes it was made with.

LOCK         flock'ed for the daemon's life
FORMAT       JSON, one page: format version, store uuid, segment size, sizes chosen, xxh3_64
wal/         the log           index/   checkpoints (LMDB)
data/        segment files (elsewhere if disk.dir says so)
DELETED      what operators deleted, for an index that is made anew
STARTS       how many starts in a row died before they served
quarantine/  what recovery refused, kept for inspection
"""

from __future__ import annotations

import fcntl
import os
import pwd
import uuid
from pathlib import Path
from typing import Self

import msgspec
import xxhash
from tierkv_wal import RealStorage, Storage

from tierkv.errors import ConfigError, CorruptionError, NotReady

FORMAT_VERSION = 2
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
    """The directory, locked for this process. Made by ``open``.

    ``storage`` is where all its files lie but the lock. Without a ``lock_fd`` nothing is locked:
    for a storage that no other process can see.
    """

    def __init__(self, path: Path, storage: Storage, lock_fd: int | None = None) -> None:
        self.path = path
        self.wal = path / "wal"
        self.index = path / "index"
        self.quarantine = path / "quarantine"
        self._storage = storage
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path, storage: Storage | None = None) -> Self:
        """Make the directory if need be and lock it.

        Raises NotReady if another process holds it, ConfigError if it cannot be made.
        """
        storage = storage or RealStorage()
        try:
            _make_directories(storage, path)
            lock_fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            raise NotReady(
                f"{path} is in use by another tierkv process; stop it, or choose another "
                "server.state_dir",
                state="locked",
            ) from None
        directory = cls(path, storage, lock_fd)
        try:
            directory.make_folders()
        except OSError as error:
            directory.close()
            raise _unusable(path, error) from error
        return directory

    def require_owner(self) -> None:
        """Raise ConfigError for a user who is not the store's.

        Files that another user makes in it would keep the daemon out.
        """
        owner = self.path.stat().st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to {_user(owner)}, and this is {_user(os.geteuid())}: run it "
                f"as {_user(owner)}, else the daemon could not open what it makes"
            )

    def make_folders(self) -> None:
        """Make the folders of a store that are not there, durably. Raises OSError."""
        present = self._storage.listdir(str(self.path))
        missing = [folder for folder in (self.wal, self.quarantine) if folder.name not in present]
        for folder in missing:
            self._storage.mkdir(str(folder))
        if missing:
            self._storage.fsync_dir(str(self.path))

    def read_format(self) -> StoreFormat | None:
        """The FORMAT file, None where there is none. Raises CorruptionError, ConfigError."""
        return read_format(self.path, self._storage)

    def write_format(self, content: StoreFormat) -> None:
        """Replace the FORMAT file.

        Crash: the old file or the new one, whole.
        """
        body = msgspec.json.encode(content)
        check = xxhash.xxh3_64_hexdigest(body).encode()
        self.replace(FORMAT_NAME, body + b"\n" + check + b"\n")

    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file of the directory. Raises OSError.

        Crash: the old file or the new one, whole.
        """
        draft = str(self.path / f"{name}.tmp")
        storage = self._storage
        fd = storage.open(draft, create=True, truncate=True)
        try:
            storage.pwrite(fd, content, 0)
            storage.fdatasync(fd)
        finally:
            storage.close(fd)
        storage.rename(draft, str(self.path / name))
        storage.fsync_dir(str(self.path))

    def set_aside(self, path: Path) -> Path | None:
        """Move a file or directory of the store into the quarantine; returns where it is now.

        Crash: it is where it was, or in the quarantine.
        """
        storage = self._storage
        if path.name not in storage.listdir(str(path.parent)):
            return None
        target = self._free_place(path)
        storage.rename(str(path), str(target))
        storage.fsync_dir(str(self.quarantine))
        storage.fsync_dir(str(path.parent))
        return target

    def copy_aside(self, path: Path) -> Path:
        """Copy a small file into the quarantine; returns where the copy is. Raises OSError.

        Crash: the file is as it was.
        """
        storage, target = self._storage, self._free_place(path)
        source_fd = storage.open(str(path), writable=False)
        try:
            content = storage.pread(source_fd, storage.size(str(path)), 0)
        finally:
            storage.close(source_fd)
        target_fd = storage.open(str(target), create=True)
        try:
            storage.pwrite(target_fd, content, 0)
            storage.fdatasync(target_fd)
        finally:
            storage.close(target_fd)
        storage.fsync_dir(str(self.quarantine))
        return target

    def _free_place(self, path: Path) -> Path:
        """Where in the quarantine there is nothing yet."""
        taken = set(self._storage.listdir(str(self.quarantine)))
        number = 0
        while f"{path.name}.{number}" in taken:
            number += 1
        return self.quarantine / f"{path.name}.{number}"

    def close(self) -> None:
        """Unlock."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def _make_directories(storage: Storage, path: Path) -> None:
    """Make a directory and those above it that are missing, each durable in its parent."""
    if path.is_dir():
        return
    _make_directories(storage, path.parent)
    storage.mkdir(str(path))
    storage.fsync_dir(str(path.parent))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {path} as server.state_dir: {error.strerror}; choose another, or make it "
        "writable"
    )


def read_format(state_dir: Path, storage: Storage | None = None) -> StoreFormat | None:
    """What a store's FORMAT file says, None where there is none.

    Raises CorruptionError if it is damaged, ConfigError if another version made it.
    """
    path = state_dir / FORMAT_NAME
    storage = storage or RealStorage()
    try:
        fd = storage.open(str(path), writable=False)
    except FileNotFoundError:
        return None
    try:
        body, _, check = storage.pread(fd, storage.size(str(path)), 0).partition(b"\n")
    finally:
        storage.close(fd)
    if xxhash.xxh3_64_hexdigest(body).encode() != check.strip():
        raise CorruptionError(
            f"{path} is damaged; move {state_dir} aside to start with an empty cache",
            path=str(path),
            offset=0,
        )
    version = msgspec.json.decode(body, type=_Version).version
    if version != FORMAT_VERSION:
        which = "newer" if version > FORMAT_VERSION else "older"
        raise ConfigError(
            f"{path} is of format {version}, this tierkv knows {FORMAT_VERSION}: "
            f"use the {which} version, or move the directory aside to start with an empty cache"
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
