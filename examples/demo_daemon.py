"""A daemon of our own for the demo: started, killed and started again in a private folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import tierkv
from tierkv.errors import TierkvError, Unavailable

SHM = Path("/dev/shm")
START_TIMEOUT_S = 60.0


class DemoDaemon:
    """``tierkv serve`` on small tiers of ``device_bytes``, ``host_bytes`` and ``disk_bytes``.

    All files lie in ``folder``, but the RAM tiers' in a folder on tmpfs if that has the room; both
    are removed at the end. A context manager: whatever happens, no process is left running.
    """

    def __init__(self, device_bytes: int, host_bytes: int, disk_bytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tierkv-demo-"))
        self.arenas = _arena_folder(self.folder, device_bytes + host_bytes)
        self.socket = str(self.folder / "tierkv.sock")
        self._log = self.folder / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = {
            "server.socket": self.socket,
            "server.state_dir": str(self.folder / "state"),
            "arena.dir": str(self.arenas),
            "device.bytes": str(device_bytes),
            "host.bytes": str(host_bytes),
            "disk.bytes": str(disk_bytes),
            "disk.segment_bytes": str(min(disk_bytes, 256 << 20)),
            "metrics.tcp": "",
        }

    def launch(self) -> None:
        """Start the process; does not wait for it."""
        command = [sys.executable, "-m", "tierkv", "serve"]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)

    def start(self) -> float:
        """Start and wait until it serves; returns the seconds that took, process start included."""
        began_s = time.perf_counter()
        self.launch()
        self.wait_until_serving()
        return time.perf_counter() - began_s

    def wait_until_serving(self) -> None:
        """Return once a worker can connect. Raises Unavailable with the daemon's last words."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with tierkv.connect(self.socket, timeout_s=1.0, reconnect_s=1.0):
                    return
            except TierkvError as error:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise Unavailable(f"the daemon does not serve: {self._last_words()}") from error

    def kill(self) -> None:
        """kill -9, and wait until the kernel has cleaned up."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ask it to end, and wait."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def forget_ram(self) -> None:
        """Lose the RAM tiers and the page cache, as a reboot would. The daemon must be stopped."""
        shutil.rmtree(self.arenas, ignore_errors=True)
        for segment in (self.folder / "state" / "data").glob("*.seg"):
            fd = os.open(segment, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        shutil.rmtree(self.arenas, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return lines[-1] if lines else "it said nothing"


def _arena_folder(folder: Path, needed_bytes: int) -> Path:
    """A folder on tmpfs if that has room to spare, else one beside everything else."""
    if SHM.is_dir() and os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > 2 * needed_bytes:
        return Path(tempfile.mkdtemp(prefix="tierkv-demo-", dir=SHM))
    return folder / "arenas"
