"""A log on a simulated file system, and short ways to use it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tierkv_wal import End, Frame, SimulatedStorage, WalReader, WalWriter

UUID = bytes(range(16))
SMALL_SEGMENT = 8192  # 64 slots behind the header


class Log:
    """The directory of one log and what its tests do to it."""

    directory = "/store/wal"
    uuid = UUID

    def __init__(self, storage: SimulatedStorage | None = None) -> None:
        if storage is None:
            storage = SimulatedStorage()
            for path in ("/store", "/store/wal", "/store/quarantine"):
                storage.mkdir(path)
            storage.fsync_dir("/")
            storage.fsync_dir("/store")
        self.storage = storage

    def reader(self, after_lsn: int | None = 0) -> WalReader:
        return WalReader(self.storage, self.directory, self.uuid, after_lsn)

    def read(self, after_lsn: int | None = 0) -> tuple[list[Frame], End]:
        reader = self.reader(after_lsn)
        frames = list(reader.frames())
        return frames, reader.end

    def writer(self, after_lsn: int = 0, segment_bytes: int = SMALL_SEGMENT) -> WalWriter:
        reader = self.reader(after_lsn)
        for _ in reader.frames():
            pass
        return reader.writer(reader.epoch + 1, segment_bytes)

    def segments(self) -> list[str]:
        names = self.storage.listdir(self.directory)
        return [f"{self.directory}/{name}" for name in names if name.endswith(".wal")]

    def content(self, path: str) -> bytes:
        fd = self.storage.open(path)
        data = self.storage.pread(fd, self.storage.size(path), 0)
        self.storage.close(fd)
        return data

    def replace(self, path: str, data: bytes) -> None:
        """Give a file other content, durably."""
        fd = self.storage.open(path, create=True, truncate=True)
        self.storage.pwrite(fd, data, 0)
        self.storage.fdatasync(fd)
        self.storage.close(fd)

    def flip(self, path: str, byte: int, bit: int = 0) -> None:
        data = bytearray(self.content(path))
        data[byte] ^= 1 << bit
        self.replace(path, bytes(data))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture(scope="session")
def new_log() -> type[Log]:
    """Makes logs; for tests that need many of them."""
    return Log


@pytest.fixture(scope="session")
def make_records() -> Callable[[int], bytes]:
    """Makes n records that differ from all made before."""
    counter = itertools.count(1)

    def make(count: int) -> bytes:
        return b"".join(next(counter).to_bytes(8, "little") * 8 for _ in range(count))

    return make
