"""A service manager in miniature: it keeps a daemon's descriptors and passes them to the next."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.crash.daemon import ROOT, Daemon, python_environment
from tierkv.config.resolve import ARENA_FDS

FDS_MAX = 8
ARENAS = list(ARENA_FDS)

PASS_DESCRIPTORS = """
import os, sys
end = sys.argv.index("--")
fds = [*map(int, sys.argv[1:end])]
# Where none of them lies: the process that calls may have many open.
beyond = max([100, *fds]) + 1
aside = [os.dup2(fd, beyond + k) for k, fd in enumerate(fds)]
for fd in {*fds}:
    os.close(fd)
for k, fd in enumerate(aside):
    os.dup2(fd, 3 + k, inheritable=True)
    os.close(fd)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[end + 1], sys.argv[end + 1:])
"""
"""Does with descriptors what systemd does: from 3 on, for this pid alone."""


class Supervisor:
    """Reads notifications (sd_notify(3)) and obeys FDSTORE, FDSTOREREMOVE and BARRIER.

    A context manager. ``stored`` is the descriptor store, by name. ``deaf_after``: so many
    messages are obeyed; the others are taken, but lost.
    """

    def __init__(self, path: Path, deaf_after: int | None = None) -> None:
        self.path = str(path)
        self.stored: dict[str, list[int]] = {}
        self.deaf_after = deaf_after
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self.path)
        self._thread = threading.Thread(target=self._listen)

    def forget(self, *names: str) -> None:
        """Lose what is stored under these names; without names, everything."""
        for name in names or list(self.stored):
            for fd in self.stored.pop(name):
                os.close(fd)

    def passed_on(self) -> list[tuple[str, int]]:
        """What the next process gets, in order."""
        return [(name, fd) for name, fds in self.stored.items() for fd in fds]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._sock.close()
        self.forget()

    def _listen(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, FDS_MAX)
            if not data:
                return
            lines = data.decode().split("\n")
            kept = self.deaf_after != 0 and self._obey(lines, fds)
            if self.deaf_after:
                self.deaf_after -= 1
            for fd in () if kept else fds:
                os.close(fd)

    def _obey(self, lines: list[str], fds: list[int]) -> bool:
        """Whether the descriptors are stored.

        As they are: a copy of each would be there twice for a moment, and tests count.
        """
        (name,) = [line[7:] for line in lines if line.startswith("FDNAME=")] or ["stored"]
        if "FDSTOREREMOVE=1" in lines:
            if name in self.stored:
                self.forget(name)
        elif "FDSTORE=1" in lines:
            self.stored.setdefault(name, []).extend(fds)
            return True
        return False


class SupervisedDaemon(Daemon):
    """A daemon whose service manager is a Supervisor.

    ``sockets``: listening ones that each process inherits before what is stored, as (name, fd).
    """

    def __init__(
        self, supervisor: Supervisor, sockets: Sequence[tuple[str, int]] = (), **settings: str
    ) -> None:
        super().__init__(**settings)
        self.supervisor = supervisor
        self.sockets = list(sockets)

    def launch(self) -> None:
        """Start the process as the supervisor would; does not wait for it."""
        passed_on = self.sockets + self.supervisor.passed_on()
        fds = [fd for _, fd in passed_on]
        environment = python_environment() | {
            "NOTIFY_SOCKET": self.supervisor.path,
            "FDSTORE": str(FDS_MAX),
        }
        if fds:
            environment["LISTEN_FDS"] = str(len(fds))
            environment["LISTEN_FDNAMES"] = ":".join(name for name, _ in passed_on)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", PASS_DESCRIPTORS, *map(str, fds), "--"),
                    *(sys.executable, "-m", self.module, "serve"),
                    *(f"--set={key}={value}" for key, value in self.settings.items()),
                ],
                cwd=ROOT,
                env=environment,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )


@contextmanager
def supervised(
    folder: Path, sockets: Sequence[tuple[str, int]] = (), **settings: str
) -> Iterator[SupervisedDaemon]:
    """A daemon under a supervisor of its own; not started yet."""
    with (
        Supervisor(folder / "notify") as supervisor,
        SupervisedDaemon(supervisor, sockets, **settings) as daemon,
    ):
        yield daemon
