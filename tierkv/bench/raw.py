"""The ceilings on files: plain system calls on the file system that the disk tier is on."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from tierkv.bench.ceilings import program
from tierkv.bench.harness import Bench
from tierkv.core.ids import U8, U32

CALL_BYTES = 8 << 20
"""Bytes of one system call: what the daemon merges into one."""

FRAME_BYTES = 192
"""A frame of the log with two records: what a small request writes."""


class _Preallocated:
    """A file of a fixed size while the context lasts."""

    def __init__(self, bench: Bench, size_bytes: int, flags: int = 0) -> None:
        self._path = bench.folder / f"raw-{type(self).__name__}"
        self._size_bytes = size_bytes
        self._flags = flags

    def __enter__(self) -> Self:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | self._flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._size_bytes)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)
        self._path.unlink()


class RawLog(_Preallocated):
    """The ceiling: one pwrite a request into a preallocated file, and the mode's sync."""

    def __init__(self, bench: Bench, mode: str) -> None:
        super().__init__(bench, 16 << 20)
        self._sync = mode == "power"
        self.name = "pwrite + fdatasync" if self._sync else "pwrite"
        self._frame = bytes(FRAME_BYTES)
        self._at = 0

    def append(self) -> None:
        """Write one frame behind the last one."""
        os.pwrite(self._fd, self._frame, self._at)
        self._at = (self._at + FRAME_BYTES) % (self._size_bytes - FRAME_BYTES)

    def sync(self) -> None:
        """Make them durable, in mode power."""
        if self._sync:
            os.fdatasync(self._fd)


class RawFile(_Preallocated):
    """The ceiling: the same slots, gathered from memory, a few MiB a call, then one sync."""

    def __init__(self, bench: Bench, payload: U8, slot: int, *, batches: int) -> None:
        super().__init__(bench, batches * len(payload) * slot)
        self._bench = bench
        self._batch_bytes = len(payload) * slot
        self._next = 0
        per_call = max(1, CALL_BYTES // slot)
        header = memoryview(bytes(slot - payload.shape[1]))
        self._calls = [
            [part for block in payload[at : at + per_call] for part in (header, block.data)]
            for at in range(0, len(payload), per_call)
        ]

    def write(self) -> float:
        """Seconds to write and sync the payload where the oldest one lies, on the server's CPU."""
        return self._bench.on(self._bench.two_cores.server, self._write)

    def _write(self) -> None:
        offset = begin = self._next
        for buffers in self._calls:
            offset += os.pwritev(self._fd, buffers, offset)
        os.fdatasync(self._fd)
        if offset != begin + self._batch_bytes:
            raise RuntimeError(f"{offset - begin} of {self._batch_bytes} bytes were written")
        self._next = offset % self._size_bytes


class DirectFile(_Preallocated):
    """The ceiling of a spill: O_DIRECT, 2 MiB a call, one fdatasync for every 8 calls."""

    CALL_BYTES = 2 << 20
    CALLS_PER_SYNC = 8

    def __init__(self, bench: Bench, batch_bytes: int, *, batches: int) -> None:
        self._bench = bench
        self._batch_bytes = batch_bytes
        self._next = 0
        # O_DIRECT wants memory at page boundaries.
        self._payload = mmap.mmap(-1, self.CALL_BYTES)
        self._payload.write(os.urandom(self.CALL_BYTES))
        direct = 0 if _is_in_memory(bench.folder) else os.O_DIRECT
        self.name = "O_DIRECT pwrite, a sync per 8" if direct else "pwrite, a sync per 8"
        super().__init__(bench, batches * batch_bytes, direct)

    def write(self) -> float:
        """Seconds to write and sync a batch where the oldest one lies, on the server's CPU."""
        return self._bench.on(self._bench.two_cores.server, self._write)

    def _write(self) -> None:
        end = self._next + self._batch_bytes
        for call, offset in enumerate(range(self._next, end, self.CALL_BYTES), start=1):
            if os.pwrite(self._fd, self._payload, offset) != self.CALL_BYTES:
                raise RuntimeError("a write was cut short")
            if call % self.CALLS_PER_SYNC == 0:
                os.fdatasync(self._fd)
        os.fdatasync(self._fd)
        self._next = end % self._size_bytes


class Fio:
    """What fio(1) makes of the same: sequential writes of 2 MiB, one fdatasync for every 8."""

    name = "fio"

    def __init__(self, bench: Bench, batch_bytes: int) -> None:
        self._bench = bench
        self._batch_bytes = batch_bytes
        path = bench.folder / "raw-fio"
        direct = 0 if _is_in_memory(bench.folder) else 1
        size = bench.pick(512 << 20, 16 << 20)  # it counts milliseconds
        self._command = ["fio", "--name=spill", f"--filename={path}", f"--size={size}"]
        self._command += ["--rw=write", f"--bs={DirectFile.CALL_BYTES}", f"--direct={direct}"]
        self._command += [f"--fdatasync={DirectFile.CALLS_PER_SYNC}", "--output-format=json"]

    @staticmethod
    def is_there() -> bool:
        """Whether it is installed."""
        return shutil.which("fio") is not None

    def write(self) -> float:
        """Seconds for as much as a batch has, on the server's CPU."""
        cpu = self._bench.two_cores.server
        process = self._bench.spawn(cpu, self._command, stdout=subprocess.PIPE)
        said = process.communicate()[0]
        if self._bench.reap(process):
            raise RuntimeError("fio failed")
        (job,) = msgspec.json.decode(said)["jobs"]
        return float(self._batch_bytes / job["write"]["bw_bytes"])


class RingFile:
    """The ceiling of reads from disk: whole slots by io_uring in C, past the page cache.

    ``slots`` (u32) of each file are read in this order, one file after the other, DEPTH at a time.
    """

    DEPTH = 32
    name = "io_uring in C"

    def __init__(self, bench: Bench, slots: Mapping[Path, U32], slot_bytes: int) -> None:
        self.bytes = sum(map(len, slots.values())) * slot_bytes
        self._bench = bench
        self._slot = slot_bytes
        self._offsets = {
            path: (here.astype(np.uint64) * slot_bytes).tobytes() for path, here in slots.items()
        }
        self._program = program(bench.folder, "ring_read")

    def is_there(self) -> bool:
        """Whether there is a compiler, a kernel that grants a ring, and O_DIRECT."""
        return self._program is not None and all(
            self._run(path, bytes(8)) is not None for path in self._offsets
        )

    def read(self) -> float:
        """Seconds to read all slots, on the server's CPU."""
        spent = [self._run(path, offsets) for path, offsets in self._offsets.items() if offsets]
        if None in spent:
            raise RuntimeError("io_uring has failed")
        return sum(one for one in spent if one is not None)

    def _run(self, path: Path, offsets: bytes) -> float | None:
        command = [str(self._program), str(path), str(self._slot), str(self.DEPTH)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = self._bench.spawn(self._bench.two_cores.server, command, **pipes)
        said = process.communicate(offsets)[0]
        return None if self._bench.reap(process) else float(said)


def first_slots(files: list[Path], slot_bytes: int, count: int) -> dict[Path, U32]:
    """The first ``count`` slots of files that hold nothing but slots."""
    found = {}
    for path in files:
        here = min(count, path.stat().st_size // slot_bytes)
        found[path] = np.arange(here, dtype=np.uint32)
        count -= here
    return found


def _is_in_memory(folder: Path) -> bool:
    """Whether the file system refuses O_DIRECT, as those in memory do."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return True
    finally:
        path.unlink(missing_ok=True)
    return False


def drop_page_cache(files: list[Path]) -> None:
    """Make the next read of these files come from the device; they must be clean."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read(files: list[Path], size_bytes: int, buffer: memoryview) -> None:
    """preadv the first ``size_bytes`` of the files, one after the other."""
    left = size_bytes
    for path in files:
        fd, offset = os.open(path, os.O_RDONLY), 0
        while left and (got := os.preadv(fd, [buffer[: min(len(buffer), left)]], offset)):
            offset += got
            left -= got
        os.close(fd)
    if left:
        raise RuntimeError(f"{left} bytes are missing in {files}")
