"""A real systemd that runs the shipped unit, in namespaces of its own (see sandbox.sh)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import tierkv
from tierkv.client.sync import Client

ROOT = Path(__file__).parents[2]
UNIT = "tierkv.service"
NAMESPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")
WAIT_S = 30.0
"""Longest wait for something that must happen; only a failing test reaches it."""


def why_not() -> str:
    """Why this machine cannot run the sandbox; empty if it can."""
    if os.geteuid() != 0:
        return "a systemd of its own needs root"
    if not Path("/lib/systemd/systemd").exists():
        return "there is no systemd to run"
    if _cgroups() is None:
        return "there is no cgroup v2 hierarchy"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "true"], check=False, capture_output=True, text=True
    )
    return f"this machine grants no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _cgroups() -> Path | None:
    """Where the cgroup v2 hierarchy is mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class Sandbox:
    """A context manager: within, systemd runs and has started the unit, with these settings.

    ``settings`` is the text of tierkv.toml.
    """

    def __init__(self, settings: str) -> None:
        cgroups = _cgroups()
        assert cgroups is not None
        self._folder = Path(tempfile.mkdtemp(prefix="tierkv-systemd-"))
        self._cgroup = cgroups / self._folder.name
        self._console = self._folder / "console"
        self._process: subprocess.Popen[bytes] | None = None
        (self._folder / "tierkv.toml").write_text(settings)

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        (self._folder / "work").mkdir()
        given = {
            "CGROUP": str(self._cgroup),
            "WORK": str(self._folder / "work"),
            "CODE": str(ROOT),
            "SITE": sysconfig.get_path("platlib"),
            "PYTHON": sys.base_prefix,
            "SETTINGS": str(self._folder / "tierkv.toml"),
        }
        with self._console.open("wb") as console:
            self._process = subprocess.Popen(
                ["bash", str(Path(__file__).with_name("sandbox.sh"))],
                env={"PATH": os.environ["PATH"], **given},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        try:
            self.wait_for(ActiveState="active")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._remove_cgroup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, *command: str) -> str:
        """Run a command inside; returns what it printed."""
        return self._enter(*command).stdout

    def show(self, name: str) -> str:
        """A property of the unit, as systemd tells it."""
        return self.run("systemctl", "show", f"--property={name}", "--value", UNIT).strip()

    def wait_for(self, **properties: Any) -> None:
        """Return once the unit has these properties."""
        deadline = time.monotonic() + WAIT_S
        while any(self._show_early(name) != str(value) for name, value in properties.items()):
            assert time.monotonic() < deadline, f"waited for {properties}:\n{self.last_words()}"
            time.sleep(0.05)

    def kill_daemon(self) -> None:
        """kill -9, and wait until systemd has started the next one."""
        restarts = int(self.show("NRestarts"))
        self.run("kill", "-9", self.show("MainPID"))
        self.wait_for(NRestarts=restarts + 1, ActiveState="active")

    def restart(self) -> None:
        """systemctl restart: the daemon ends in good order."""
        self.run("systemctl", "restart", UNIT)

    def connect(self) -> Client:
        """A worker's connection, from outside."""
        socket = f"/proc/{self._init()}/root/run/tierkv/tierkv.sock"
        return tierkv.connect(socket, timeout_s=10, reconnect_s=WAIT_S)

    def last_words(self) -> str:
        """What systemd and the daemon said."""
        said = self._console.read_text(errors="replace")
        log = self._enter("cat", "/var/lib/tierkv/log", check=False).stdout
        return f"{said[-2000:]}\n{log[-4000:]}"

    def _show_early(self, name: str) -> str:
        """A property of the unit; empty while systemd does not answer yet."""
        show = ("systemctl", "show", f"--property={name}", "--value", UNIT)
        return self._enter(*show, check=False).stdout.strip()

    def _enter(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended: {self._console.read_text()}"
        entering = ["nsenter", f"--target={self._init()}", "--all", *command]
        return subprocess.run(entering, check=check, capture_output=True, text=True)

    def _init(self) -> int:
        """Process 1 of the sandbox, as it is called outside."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else pid

    def _remove_cgroup(self) -> None:
        deadline = time.monotonic() + WAIT_S
        events = self._cgroup / "cgroup.events"
        while "populated 1" in events.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            os.rmdir(folder)
