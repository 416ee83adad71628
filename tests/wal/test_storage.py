"""The file-system seam: both storages keep one contract, and what the simulated one can lose."""

from __future__ import annotations

import errno
import os
from random import Random

import pytest
from tierkv_wal import RealStorage, SimulatedStorage


@pytest.fixture(params=["real", "simulated"])
def place(request, tmp_path):
    """A storage and an empty directory in it."""
    if request.param == "real":
        return RealStorage(), str(tmp_path)
    storage = SimulatedStorage()
    storage.mkdir("/place")
    return storage, "/place"


def test_bytes_written_are_read(place):
    storage, directory = place
    fd = storage.open(f"{directory}/file", create=True)
    storage.pwrite(fd, b"abcdef", 1000)
    storage.pwritev(fd, [b"XY", bytearray(b"Z"), memoryview(b"123")], 1002)
    assert storage.size(f"{directory}/file") == 1008
    assert storage.pread(fd, 4, 999) == b"\0abX"
    assert storage.pread(fd, 100, 1000) == b"abXYZ123"
    assert storage.pread(fd, 100, 2000) == b""
    storage.fdatasync(fd)
    storage.drop_cache(fd)
    first, second = bytearray(3), bytearray(10)
    assert storage.preadv(fd, [first, second], 1000) == 8
    assert (first, second) == (b"abX", b"YZ123" + bytes(5))
    storage.close(fd)


def test_more_buffers_than_one_call_takes(place):
    storage, directory = place
    fd = storage.open(f"{directory}/file", create=True)
    storage.pwritev(fd, [bytes([i % 256]) * 3 for i in range(3000)], 0)
    buffers = [bytearray(3) for _ in range(3000)]
    assert storage.preadv(fd, buffers, 0) == 9000
    assert all(buffer == bytes([i % 256]) * 3 for i, buffer in enumerate(buffers))
    storage.close(fd)


def test_fallocate_grows_with_zeros_and_keeps_what_is_there(place):
    storage, directory = place
    fd = storage.open(f"{directory}/file", create=True)
    storage.pwrite(fd, b"abc", 0)
    storage.fallocate(fd, 0, 5000)
    storage.fallocate(fd, 0, 100)
    assert storage.pread(fd, 9999, 0) == b"abc" + bytes(4997)
    storage.close(fd)


def test_names_are_made_moved_and_removed(place):
    storage, directory = place
    storage.mkdir(f"{directory}/sub")
    storage.close(storage.open(f"{directory}/b", create=True))
    fd = storage.open(f"{directory}/a", create=True)
    storage.pwrite(fd, b"a", 0)
    assert storage.listdir(directory) == ["a", "b", "sub"]
    storage.rename(f"{directory}/a", f"{directory}/sub/b")
    storage.rename(f"{directory}/sub/b", f"{directory}/b")
    assert storage.listdir(directory) == ["b", "sub"]
    assert storage.size(f"{directory}/b") == 1
    storage.unlink(f"{directory}/b")
    storage.fsync_dir(directory)
    assert storage.listdir(directory) == ["sub"]
    assert storage.pread(fd, 9, 0) == b"a"  # the open file lives on without a name
    storage.close(fd)


def test_truncate_empties_a_file(place):
    storage, directory = place
    fd = storage.open(f"{directory}/file", create=True)
    storage.pwrite(fd, b"old content", 0)
    storage.close(fd)
    fd = storage.open(f"{directory}/file", truncate=True)
    storage.pwrite(fd, b"x", 3)
    assert storage.pread(fd, 100, 0) == b"\0\0\0x"
    storage.close(fd)


def test_errors_are_those_of_the_operating_system(place):
    storage, directory = place
    missing = f"{directory}/missing"
    for call in (storage.open, storage.size, storage.unlink, storage.listdir, storage.fsync_dir):
        with pytest.raises(FileNotFoundError):
            call(missing)
    with pytest.raises(FileNotFoundError):
        storage.rename(missing, f"{directory}/other")
    with pytest.raises(FileNotFoundError):
        storage.open(f"{missing}/file", create=True)
    with pytest.raises(FileExistsError):
        storage.mkdir(directory)
    storage.close(storage.open(f"{directory}/file", create=True))
    fd = storage.open(f"{directory}/file", writable=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        storage.pwrite(fd, b"x", 0)
    storage.fdatasync(fd)
    storage.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        storage.close(fd)


def test_short_reads_and_writes_are_completed(tmp_path, monkeypatch):
    pwrite, pwritev, pread, preadv = os.pwrite, os.pwritev, os.pread, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:5], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: pwritev(fd, [data[0][:5]], at))
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 5), at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: preadv(fd, [data[0][:5]], at))
    storage = RealStorage()
    fd = storage.open(str(tmp_path / "file"), create=True)
    storage.pwrite(fd, b"0123456789abc", 0)
    storage.pwritev(fd, [b"DEFGHIJ", b"", b"KL"], 13)
    assert storage.pread(fd, 100, 0) == b"0123456789abcDEFGHIJKL"
    buffers = [bytearray(7), bytearray(20)]
    assert storage.preadv(fd, buffers, 0) == 22
    assert b"".join(buffers) == b"0123456789abcDEFGHIJKL" + bytes(5)
    storage.close(fd)


def test_writeback_that_is_begun_changes_nothing_and_never_fails(place):
    storage, directory = place
    fd = storage.open(f"{directory}/file", create=True)
    storage.pwrite(fd, b"abc", 0)
    storage.start_writeback(fd, 0, 3)
    storage.start_writeback(fd, 1 << 20, 1)  # where nothing is
    assert storage.pread(fd, 10, 0) == b"abc"
    assert storage.size(f"{directory}/file") == 3
    storage.fdatasync(fd)
    storage.close(fd)


# --- the simulated crash -------------------------------------------------------------------------


def _images(storage: SimulatedStorage, path: str, mode: str = "power") -> set[bytes | None]:
    """What the file can hold after a crash; None = it is not there."""
    found: set[bytes | None] = set()
    for seed in range(200):
        after = storage.crash(Random(seed), mode)
        try:
            fd = after.open(path)
        except FileNotFoundError:
            found.add(None)
        else:
            found.add(after.pread(fd, 1 << 20, 0))
    return found


@pytest.fixture
def disk():
    """A storage with a durable, empty /d/file."""
    storage = SimulatedStorage()
    storage.mkdir("/d")
    storage.fsync_dir("/")
    fd = storage.open("/d/file", create=True)
    storage.fsync_dir("/d")
    return storage, fd


def test_power_loss_leaves_any_subset_of_unsynced_sectors(disk):
    storage, fd = disk
    storage.fallocate(fd, 0, 1024)
    storage.fdatasync(fd)
    a, b, zero = b"a" * 512, b"b" * 512, bytes(512)
    storage.pwrite(fd, a + b, 0)
    assert _images(storage, "/d/file") == {zero + zero, a + zero, zero + b, a + b}
    assert _images(storage, "/d/file", "kill") == {a + b}
    storage.fdatasync(fd)
    assert _images(storage, "/d/file") == {a + b}


def test_power_loss_leaves_any_version_of_a_sector(disk):
    storage, fd = disk
    storage.pwrite(fd, b"1111", 0)
    storage.fdatasync(fd)
    storage.pwrite(fd, b"2", 1)
    storage.pwrite(fd, b"3", 2)
    assert _images(storage, "/d/file") == {b"1111", b"1211", b"1231"}


def test_power_loss_may_undo_a_change_of_size(disk):
    storage, fd = disk
    storage.pwrite(fd, b"abc", 0)
    assert _images(storage, "/d/file") == {b"", b"\0\0\0", b"abc"}


def test_a_killed_process_leaves_its_writes_as_volatile_as_they_were(disk):
    storage, fd = disk
    storage.pwrite(fd, b"abc", 0)
    after = storage.crash(Random(0), "kill")
    assert _images(after, "/d/file") == {b"", b"\0\0\0", b"abc"}


def test_names_reach_the_device_in_order_and_with_their_directory(disk):
    storage, fd = disk
    storage.pwrite(fd, b"abc", 0)
    storage.fdatasync(fd)
    storage.mkdir("/d/sub")
    storage.rename("/d/file", "/d/sub/file")
    names = set()
    for seed in range(100):
        after = storage.crash(Random(seed), "power")
        sub = after.listdir("/d/sub") if "sub" in after.listdir("/d") else []
        names.add((tuple(after.listdir("/d")), tuple(sub)))
    assert names == {(("file",), ()), (("file", "sub"), ()), (("sub",), ("file",))}
    storage.fsync_dir("/d")
    assert _images(storage, "/d/sub/file") == {b"abc"}


def test_files_of_an_unsynced_directory_are_gone_with_it():
    storage = SimulatedStorage()
    storage.mkdir("/new")
    fd = storage.open("/new/file", create=True)
    storage.pwrite(fd, b"abc", 0)
    storage.fdatasync(fd)
    storage.fsync_dir("/new")
    assert _images(storage, "/new/file") == {None, b"abc"}
    storage.fsync_dir("/")
    assert _images(storage, "/new/file") == {b"abc"}


def test_a_failed_sync_loses_the_writes_though_the_cache_shows_them(disk):
    storage, fd = disk
    storage.fallocate(fd, 0, 3)
    storage.fdatasync(fd)
    storage.pwrite(fd, b"abc", 0)
    storage.inject(OSError(errno.EIO, "I/O error"), "fdatasync")
    with pytest.raises(OSError, match="I/O error"):
        storage.fdatasync(fd)
    storage.fdatasync(fd)  # reports success, as Linux does
    assert storage.pread(fd, 3, 0) == b"abc"
    assert _images(storage, "/d/file") == {bytes(3)}
    storage.drop_cache(fd)
    assert storage.pread(fd, 3, 0) == bytes(3)


def test_faults_come_at_the_call_they_are_meant_for_and_once(disk):
    storage, fd = disk
    storage.inject(OSError(errno.ENOSPC, "full"), "pwrite", nth=2, written_bytes=2)
    storage.pwrite(fd, b"1", 0)
    storage.fdatasync(fd)
    with pytest.raises(OSError, match="full"):
        storage.pwrite(fd, b"234", 1)
    storage.pwrite(fd, b"5", 3)
    assert storage.pread(fd, 9, 0) == b"1235"
    storage.inject(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        storage.listdir("/d")
    assert storage.listdir("/d") == ["file"]
