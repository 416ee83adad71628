"""Test support: a real daemon process, and what a person or a monitor sees of it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tierkv
from tierkv.errors import TierkvError

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
WAIT_S = 30.0
"""Longest wait for something that must happen; only a failing test reaches it."""

SETTINGS = {
    "device.bytes": "8MiB",
    "host.bytes": "4MiB",
    "disk.bytes": "64MiB",
    "disk.segment_bytes": "16MiB",
    "wal.segment_bytes": "1MiB",
    "metrics.tcp": "",
}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that runs this checkout and no machine's configuration."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "wal", "kernels")),
        "OMP_NUM_THREADS": "1",
        "TIERKV_CONFIG": os.devnull,
        **(extra or {}),
    }


def run_cli(
    *arguments: str, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``tierkv ARGUMENTS`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tierkv", *arguments],
        env=environment(extra),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """The first true value of ``condition``; fails after a while."""
    deadline = time.monotonic() + WAIT_S
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(0.01)


class Daemon:
    """``tierkv serve`` in folders of its own; a context manager that leaves nothing behind.

    ``settings`` come on top of ``SETTINGS``. ``launcher`` stands before the command.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        extra: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tierkv-t-", dir="/tmp"))
        self.arenas = self.folder / "arenas"
        if os.access(SHM, os.W_OK):
            self.arenas = Path(tempfile.mkdtemp(prefix="tierkv-t-", dir=SHM))
        self.socket = self.folder / "s"
        self.metrics_socket = self.folder / "m"
        self.state = self.folder / "state"
        self.log = self.folder / "log"
        self.settings = {
            "server.state_dir": str(self.state),
            "server.socket": str(self.socket),
            "metrics.socket": str(self.metrics_socket),
            "arena.dir": str(self.arenas),
            **SETTINGS,
            **(settings or {}),
        }
        self._extra = extra
        self._launcher = launcher
        self._pass_fds = pass_fds
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def flags(self) -> list[str]:
        """``--set`` options that make any command use this daemon's configuration."""
        return [
            part for key, value in self.settings.items() for part in ("--set", f"{key}={value}")
        ]

    def launch(self) -> None:
        """Start the process; does not wait."""
        command = [*self._launcher, sys.executable, "-m", "tierkv", "serve", *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=environment(self._extra),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._pass_fds,
            )

    def start(self) -> Daemon:
        """Start and wait until it serves."""
        self.launch()
        until(self._serves, f"for a daemon: {self.said()}")
        return self

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended: {self.said()}"
        try:
            with tierkv.connect(self.socket, timeout_s=1.0, reconnect_s=1.0):
                return True
        except TierkvError:
            return False

    def connect(self, name: str = "test") -> tierkv.Client:
        """A client that waits for nothing long."""
        return tierkv.connect(self.socket, timeout_s=10, reconnect_s=WAIT_S, name=name)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status, once the process has ended."""
        assert self.process is not None
        return self.process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def get(self, path: str, tcp_port: int = 0, accept: str = "*/*") -> tuple[int, str]:
        """Status and body of an HTTP GET, over the Unix socket or a loopback port."""
        connection = http.client.HTTPConnection("127.0.0.1", tcp_port or 1, timeout=WAIT_S)
        if not tcp_port:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.connect(str(self.metrics_socket))
        try:
            connection.request("GET", path, headers={"Accept": accept})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics by name and labels as they stand there."""
        status, page = self.get("/metrics")
        assert status == 200
        return samples(page)

    def status(self) -> dict[str, Any]:
        """The document of /status.json."""
        status, body = self.get("/status.json")
        assert status == 200
        document: dict[str, Any] = json.loads(body)
        return document

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.arenas, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running(settings: Mapping[str, str] | None = None, **options: Any) -> Iterator[Daemon]:
    """A daemon that serves."""
    with Daemon(settings, **options) as daemon:
        yield daemon.start()


def samples(page: str) -> dict[str, float]:
    """A Prometheus text page as {"name{label="x"}": value}."""
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}
