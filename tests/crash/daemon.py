"""The daemon of the crash tests: this checkout's code on small tiers, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

from tierkv.torture.daemon import SHM, START_S
from tierkv.torture.daemon import Daemon as AnyDaemon

__all__ = ["ROOT", "SHM", "START_S", "Daemon", "python_environment"]

ROOT = Path(__file__).parents[2]


def python_environment() -> dict[str, str]:
    """The environment of a process that shall run this checkout's code."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "wal", "kernels"))
    return dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1")


class Daemon(AnyDaemon):
    """``tierkv serve`` with small tiers, in a folder that goes with it.

    ``settings`` override the defaults below (``wal__durability="power"``); ``mortal`` makes
    ``kill_at_write`` work.
    """

    def __init__(self, *, mortal: bool = False, **settings: str) -> None:
        small = {
            "device.bytes": "8MiB",
            "host.bytes": "4MiB",
            "disk.bytes": "64MiB",
            "disk.segment_bytes": "16MiB",
        }
        super().__init__(
            Path(tempfile.mkdtemp(prefix="tierkv-crash-")),
            small | {key.replace("__", "."): value for key, value in settings.items()},
            module="tests.crash.mortal" if mortal else "tierkv",
            environment=python_environment(),
        )

    def kill_at_write(self) -> None:
        """Let it kill itself right before its next write to the log, and wait for that."""
        os.kill(self.pid, signal.SIGUSR1)
        self.expect_killed()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        shutil.rmtree(self.folder, ignore_errors=True)
