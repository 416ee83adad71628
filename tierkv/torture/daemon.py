"""A daemon process of one's own, on a store of its own, to be killed and started again."""

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
from collections.abc import Mapping
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

SHM = Path("/dev/shm")
START_S = 30.0
"""Longest wait for a start or an end; only a broken daemon comes to it."""


class Broken(Exception):
    """What never happens to sound software: a daemon or a worker ended by itself, or hangs."""


class Daemon:
    """``python -m MODULE serve`` with the store in ``folder``. A context manager.

    At its end no process runs any more, and its sockets and RAM tiers are gone; ``folder`` is the
    caller's. ``settings`` are those of the configuration, by key ("device.bytes"). ``environment``
    is that of the process, and of workers on it.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str],
        *,
        module: str = "tierkv",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self.environment = dict(os.environ if environment is None else environment)
        self.folder = folder
        self.state = folder / "state"
        self.data = self.state / "data"
        self.quarantine = self.state / "quarantine"
        self.log = folder / "daemon.log"
        own = f"{folder.name}-"
        shm = SHM.is_dir() and os.access(SHM, os.W_OK)
        self.arenas = Path(tempfile.mkdtemp(prefix=own, dir=SHM if shm else None))
        # Not in `folder`: the path of a socket must be short.
        self._sockets = Path(tempfile.mkdtemp(prefix=own))
        self.socket = str(self._sockets / "sock")
        self.process: subprocess.Popen[bytes] | None = None
        self.settings = {
            "server.state_dir": str(self.state),
            "server.socket": self.socket,
            "arena.dir": str(self.arenas),
            "disk.dir": str(self.data),
            "metrics.tcp": "",
            **settings,
        }

    @property
    def pid(self) -> int:
        """The process that was launched last."""
        return self._launched.pid

    @property
    def config(self) -> Config:
        """The configuration the daemon runs with."""
        environment = this_environment(lambda state_dir: recorded_sizes(Path(state_dir)))
        own = environment._replace(variables=self.environment)
        return load(None, own, self.settings).config

    def launch(self, *under: str) -> None:
        """Start the process; does not wait for it.

        ``under``: a command that runs the daemon in a way of its own, and in its own process.
        """
        self.process = self._spawn(self.module, subprocess.DEVNULL, *under)

    def start(self) -> None:
        """Start and return once it serves. Raises as ``wait_until_serving``."""
        self.launch()
        self.wait_until_serving()

    def wait_until_serving(self) -> None:
        """Return once a worker can connect. Raises Broken with the daemon's last words."""
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(Unavailable):
                self.connect(timeout_s=0.2, reconnect_s=0.2).close()
                return
            if self._launched.poll() is not None:
                raise Broken(f"the daemon ended: {self.last_words()}")
            if time.monotonic() > deadline:
                raise Broken(f"the daemon does not serve: {self.last_words()}")

    def kill(self) -> None:
        """kill -9, and wait until the kernel has cleaned up. Raises Broken if it ended before."""
        self._launched.kill()
        self.expect_killed()

    def expect_killed(self) -> None:
        """Wait until it dies of kill -9. Raises Broken if it ends otherwise."""
        if self._ended() != -signal.SIGKILL:
            raise Broken(f"the daemon ended before it was killed: {self.last_words()}")

    def stop(self) -> int:
        """Ask it to end; returns its exit code. Raises Broken if it does not end."""
        self._launched.terminate()
        return self._ended()

    def restart(self) -> None:
        """kill -9, and start again."""
        self.kill()
        self.start()

    def connect(self, *, timeout_s: float = 10.0, reconnect_s: float = 30.0) -> Client:
        """A worker's connection."""
        return tierkv.connect(self.socket, timeout_s=timeout_s, reconnect_s=reconnect_s)

    def forget_ram(self) -> None:
        """Lose the RAM tiers, as a reboot would. The daemon must be down."""
        if self.arenas.exists():  # it may have died before it made them
            shutil.rmtree(self.arenas)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of the metrics page. Raises KeyError."""
        for line in self._page("/metrics").splitlines():
            found, _, value = line.rpartition(" ")
            if found.startswith(name) and all(f'{k}="{v}"' in found for k, v in labels.items()):
                return float(value)
        raise KeyError(f"there is no metric {name} {labels}")

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
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _spawn(self, module: str, stdin: int, *under: str) -> subprocess.Popen[bytes]:
        given = [f"--set={key}={value}" for key, value in self.settings.items()]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*under, sys.executable, "-m", module, "serve", *given],
                env=self.environment,
                stdin=stdin,
                stderr=log,
                # Ctrl-C is for whoever started it; the daemon is ended by name.
                start_new_session=True,
            )

    def _ended(self) -> int:
        try:
            return self._launched.wait(START_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"the daemon does not end: {self.last_words()}") from None

    @property
    def _launched(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise Broken("the daemon was not launched")
        return self.process

    def _page(self, path: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(START_S)
            connection.connect(str(self._sockets / "metrics.sock"))
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
            received = b""
            while data := connection.recv(65536):
                received += data
        return received.decode().partition("\r\n\r\n")[2]
