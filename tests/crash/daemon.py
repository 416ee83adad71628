"""A real daemon process on a small store of its own, to be killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import tierkv
from tierkv.client.sync import Client
from tierkv.config.load import load
from tierkv.config.resolve import this_environment
from tierkv.config.schema import Config
from tierkv.errors import Unavailable
from tierkv.service.store import recorded_sizes
from tierkv.service.verify import VerifyReport, verify

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
START_S = 30.0
"""Longest wait for a start; only a failing test reaches it."""


def python_environment() -> dict[str, str]:
    """The environment of a process that shall run this checkout's code."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "wal", "kernels"))
    return dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1")


class Daemon:
    """``tierkv serve`` with small tiers. A context manager: nothing is left running or lying about.

    ``settings`` override the defaults below (``wal__durability="power"``); ``mortal`` makes
    ``kill_at_write`` work.
    """

    def __init__(self, *, mortal: bool = False, **settings: str) -> None:
        self.module = "tests.crash.mortal" if mortal else "tierkv"
        self.folder = Path(tempfile.mkdtemp(prefix="tierkv-crash-"))
        shm = SHM.is_dir() and os.access(SHM, os.W_OK)
        self.arenas = Path(tempfile.mkdtemp(prefix="tierkv-crash-", dir=SHM if shm else None))
        self.state = self.folder / "state"
        self.data = self.state / "data"
        self.quarantine = self.state / "quarantine"
        self.socket = str(self.folder / "sock")
        self.log = self.folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.settings = {
            "server.state_dir": str(self.state),
            "server.socket": self.socket,
            "arena.dir": str(self.arenas),
            "device.bytes": "8MiB",
            "host.bytes": "4MiB",
            "disk.bytes": "64MiB",
            "disk.segment_bytes": "16MiB",
            "metrics.tcp": "",
        } | {key.replace("__", "."): value for key, value in settings.items()}

    @property
    def pid(self) -> int:
        """The process that was launched last."""
        assert self.process is not None
        return self.process.pid

    @property
    def config(self) -> Config:
        """The configuration the daemon runs with."""
        environment = this_environment(lambda state_dir: recorded_sizes(Path(state_dir)))
        return load(None, environment, self.settings).config

    def launch(self) -> None:
        """Start the process; does not wait for it."""
        given = [f"--set={key}={value}" for key, value in self.settings.items()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "serve", *given],
                cwd=ROOT,
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def start(self) -> None:
        """Start and return once it serves."""
        self.launch()
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Return once a worker can connect; fails with the daemon's last words."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(Unavailable):
                self.connect(timeout_s=0.2, reconnect_s=0.2).close()
                return
            assert self.process.poll() is None, f"the daemon ended: {self.last_words()}"
            assert time.monotonic() < deadline, f"the daemon does not serve: {self.last_words()}"

    def kill(self) -> None:
        """kill -9, and wait until the kernel has cleaned up."""
        assert self.process is not None
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL, f"it ended before: {self.last_words()}"

    def kill_at_write(self) -> None:
        """Let it kill itself right before its next write to the log, and wait for that."""
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.wait(START_S) == -signal.SIGKILL, self.last_words()

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(START_S)

    def restart(self) -> None:
        """kill -9, and start again."""
        self.kill()
        self.start()

    def connect(self, *, timeout_s: float = 10.0, reconnect_s: float = 30.0) -> Client:
        """A worker's connection."""
        return tierkv.connect(self.socket, timeout_s=timeout_s, reconnect_s=reconnect_s)

    def forget_ram(self) -> None:
        """Lose the RAM tiers, as a reboot would. The daemon must be down."""
        shutil.rmtree(self.arenas)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of the metrics page."""
        for line in self._page("/metrics").splitlines():
            found, _, value = line.rpartition(" ")
            if found.startswith(name) and all(f'{k}="{v}"' in found for k, v in labels.items()):
                return float(value)
        raise AssertionError(f"there is no metric {name} {labels}")

    def verify(self) -> VerifyReport:
        """Check the stopped store, every payload included."""
        return verify(self.config, deep=True)

    def last_words(self) -> str:
        """The end of the daemon's log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-12:]) or "it said nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.arenas, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _page(self, path: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(START_S)
            connection.connect(str(self.folder / "metrics.sock"))
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
            received = b""
            while data := connection.recv(65536):
                received += data
        return received.decode().partition("\r\n\r\n")[2]
