"""The daemon of the crash tests: this checkout's code on small tiers, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tierkv.torture.daemon import SHM, START_S, Broken
from tierkv.torture.daemon import Daemon as AnyDaemon

__all__ = ["ROOT", "SHM", "START_S", "Daemon", "freeze", "python_environment"]

ROOT = Path(__file__).parents[2]


def python_environment() -> dict[str, str]:
    """The environment of a process that shall run this checkout's code."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "wal", "kernels"))
    return dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1")


def freeze(pid: int) -> None:
    """SIGSTOP a process, and return when none of its threads runs or is in the kernel."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + START_S
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it ended before the signal came
    return stat.rpartition(")")[2].split()[0] in "TXZ"


class Daemon(AnyDaemon):
    """``tierkv serve`` with small tiers, in a folder that goes with it.

    ``settings`` override the defaults below (``wal__durability="power"``). ``module`` is what is
    run as ``python -m``; ``mortal`` stands for the one that makes ``kill_at_write`` work.
    ``state`` is where the store lies, if not in that folder.
    """

    def __init__(
        self,
        *,
        mortal: bool = False,
        module: str = "tierkv",
        state: Path | None = None,
        **settings: str,
    ) -> None:
        small = {
            "device.bytes": "8MiB",
            "host.bytes": "4MiB",
            "disk.bytes": "64MiB",
            "disk.segment_bytes": "16MiB",
        }
        super().__init__(
            Path(tempfile.mkdtemp(prefix="tierkv-crash-")),
            small | {key.replace("__", "."): value for key, value in settings.items()},
            module="tests.crash.mortal" if mortal else module,
            environment=python_environment(),
        )
        self._next: subprocess.Popen[bytes] | None = None
        if state is not None:
            self.state, self.data = state, state / "data"
            self.quarantine = state / "quarantine"
            self.settings |= {"server.state_dir": str(self.state), "disk.dir": str(self.data)}

    def launch(self, *under: str) -> None:
        """Start the process; does not wait for it."""
        if self._next is None:
            super().launch(*under)
        else:
            self.process, self._next = self._next, None
            assert self.process.stdin is not None
            self.process.stdin.close()

    def prepare(self) -> None:
        """Let the process that the next ``launch`` starts make its imports now."""
        if self._next is None:
            self._next = self._spawn("tests.crash.warm", subprocess.PIPE)

    def freeze(self) -> None:
        """Stop it where it is, and return when none of its threads runs or is in the kernel."""
        freeze(self.pid)

    def serves(self) -> bool:
        """Whether a worker can connect, now or later; not if the daemon ends before."""
        try:
            self.wait_until_serving()
        except Broken:
            if self.process is not None and self.process.poll() is not None:
                return False
            raise
        return True

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Return once ``condition()`` is true; fails with the daemon's last words."""
        deadline = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.last_words()}"
            time.sleep(0.01)

    def ended(self) -> int:
        """Wait until it ends by itself; returns its exit code."""
        assert self.process is not None
        return self.process.wait(START_S)

    def kill_at_write(self) -> None:
        """Let it kill itself right before its next write to the log, and wait for that."""
        os.kill(self.pid, signal.SIGUSR2)
        self.expect_killed()

    def __exit__(self, *exc: object) -> None:
        if self._next is not None:
            self._next.kill()
            self._next.communicate()
        super().__exit__(*exc)
        shutil.rmtree(self.folder, ignore_errors=True)
