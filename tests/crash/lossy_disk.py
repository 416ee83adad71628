"""A real file system on a loop device that loses power: what it had not written is gone.

``FS_IOC_SHUTDOWN`` without a flush of the journal makes a file system forget everything that has
not reached its device, names and sizes included, as a power cut does; mounting it again replays
the journal.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

IMAGE_BYTES = 320 << 20
"""mkfs.xfs refuses less than 300 MiB. The image is sparse: only what is written takes room."""

MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}

CLOSING_S = 30.0
"""Longest wait for files of the dead to be closed; only a failing test reaches it."""

_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = (2).to_bytes(4, "little")
_WRITE_AND_WAIT = 1 | 2 | 4
_libc = ctypes.CDLL(None, use_errno=True)


def why_not(kind: str) -> str:
    """What this machine lacks for a lossy disk of that kind; empty if nothing."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.access("/dev/loop-control", os.W_OK):
        return "there are no loop devices (/dev/loop-control)"
    for tool in (MAKE[kind][0], "mount", "umount"):
        if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            return f"there is no {tool}; install e2fsprogs, xfsprogs and mount"
    return ""


class LossyDisk:
    """A mounted file system at ``path``. A context manager: nothing stays mounted or attached."""

    def __init__(self, kind: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tierkv-power-"))
        self._image = self._folder / "image"
        self.path = self._folder / "mounted"
        self._kind = kind

    def lose_power(self) -> None:
        """From here on nothing reaches the device. Whoever uses the file system gets EIO."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def power_up(self) -> None:
        """Mount what is left. Nobody may have a file open on it but processes that were killed."""
        self._unmount()
        self._mount()

    def _unmount(self) -> None:
        # The kernel closes the files of a dead process's io_uring some time after it is gone.
        deadline = time.monotonic() + CLOSING_S
        while _libc.umount2(os.fsencode(self.path), 0):
            number = ctypes.get_errno()
            if number != errno.EBUSY or time.monotonic() > deadline:
                raise OSError(number, os.strerror(number), str(self.path))
            time.sleep(0.005)

    def write_back_some(self, chance: random.Random) -> None:
        """Let the kernel write some of what it has not yet: any pages, at times the journal."""
        for path in sorted(self.path.rglob("*")):
            if not path.is_file() or chance.random() < 0.3:
                continue
            fd = os.open(path, os.O_RDWR)
            try:
                size = os.fstat(fd).st_size
                for _ in range(chance.randint(1, 4)):
                    offset = chance.randrange(size // 4096 + 1) * 4096
                    _write_back(fd, offset, chance.choice((4096, 65536, 1 << 20)))
            finally:
                os.close(fd)
        if chance.random() < 0.5:
            # A sync of any file commits the journal, and with it sizes and names of all others.
            bystander = os.open(self.path / "bystander", os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(bystander, b"x")
                os.fsync(bystander)
            finally:
                os.close(bystander)

    def __enter__(self) -> Self:
        try:
            self.path.mkdir()
            with self._image.open("wb") as image:
                image.truncate(IMAGE_BYTES)
            _run(*MAKE[self._kind], self._image)
            self._mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        while self.path.is_mount():
            _run("umount", "--lazy", self.path)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _mount(self) -> None:
        # Attached this way the loop device goes when the file system is unmounted.
        _run("mount", "-t", self._kind, "-o", "loop", self._image, self.path)


def _run(*command: str | Path) -> None:
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    done = subprocess.run(
        [str(part) for part in command],
        env=dict(os.environ, PATH=path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"


def _write_back(fd: int, offset: int, length: int) -> None:
    result = _libc.sync_file_range(
        fd, ctypes.c_int64(offset), ctypes.c_int64(length), _WRITE_AND_WAIT
    )
    if result:
        raise OSError(ctypes.get_errno(), "sync_file_range")
