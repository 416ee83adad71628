"""A real systemd that runs the shipped units, in namespaces of its own (see sandbox.sh)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tierkv
from tests.service.running import run_cli
from tierkv.client.sync import Client

ROOT = Path(__file__).parents[2]
UNIT = "tierkv.service"
SOCKETS = ("tierkv.socket", "tierkv-metrics.socket")
LOG = "/var/lib/tierkv/log"
SETTINGS_FILE = "/etc/tierkv/tierkv.toml"
NAMESPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")
RAM = """
[device]
bytes = "96KiB"
[host]
bytes = "160KiB"
"""
DISK = """\
[disk]
bytes = "8MiB"
segment_bytes = "1MiB"
"""
"""Settings of small tiers; more of [disk] may follow."""

NO_TCP = """\
[metrics]
tcp = ""
"""

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


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Sandbox:
    """A context manager: within, systemd runs and has started the unit, with these settings.

    ``settings`` is the text of tierkv.toml, ``drop_in`` that of a drop-in for the service;
    ``shipped`` names drop-ins of ours that are installed, too.
    """

    def __init__(self, settings: str, drop_in: str = "", shipped: Sequence[str] = ()) -> None:
        cgroups = _cgroups()
        assert cgroups is not None
        self._folder = Path(tempfile.mkdtemp(prefix="tierkv-systemd-"))
        self._cgroup = cgroups / self._folder.name
        self._console = self._folder / "console"
        self._process: subprocess.Popen[bytes] | None = None
        self._install(settings, drop_in, shipped)

    def _install(self, settings: str, drop_in: str, shipped: Sequence[str]) -> None:
        chosen = [part for name in shipped for part in ("--drop-in", name)]
        command = ("--command", "/usr/bin/tierkv", "--root", str(self._folder / "installed"))
        done = run_cli("unit", "install", *command, *chosen)
        assert done.returncode == 0, done.stderr
        etc = self._folder / "installed/etc"
        (etc / "tierkv/tierkv.toml").write_text(settings)
        if drop_in:
            folder = etc / f"systemd/system/{UNIT}.d"
            folder.mkdir(exist_ok=True)
            (folder / "of-the-test.conf").write_text(drop_in)

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        (self._folder / "work").mkdir()
        given = {
            "CGROUP": str(self._cgroup),
            "WORK": str(self._folder / "work"),
            "CODE": str(ROOT),
            "SITE": sysconfig.get_path("platlib"),
            "PYTHON": sys.base_prefix,
            "INSTALLED": str(self._folder / "installed"),
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
        done = self.attempt(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.last_words()}"
        return done.stdout

    def attempt(self, *command: str) -> subprocess.CompletedProcess[str]:
        """The same, whether or not it succeeds."""
        return self._enter(*command, check=False)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command inside, with no output."""
        return subprocess.Popen(
            self._entering(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def end(self, started: subprocess.Popen[bytes]) -> None:
        """Kill a command that was started, and wait for its end."""
        for child in _children(started.pid):
            os.kill(child, signal.SIGKILL)
        started.wait(WAIT_S)

    def systemctl(self, *arguments: str) -> str:
        return self.run("systemctl", *arguments)

    def show(self, name: str, unit: str = UNIT) -> str:
        """A property of a unit, as systemd tells it."""
        return self.systemctl("show", f"--property={name}", "--value", unit).strip()

    def wait_for(self, unit: str = UNIT, **properties: Any) -> None:
        """Return once the unit has these properties."""
        names = list(properties)
        wanted = {name: str(value) for name, value in properties.items()}
        shown: dict[str, str] = {}

        def is_so() -> bool:
            shown.clear()
            shown.update(self._show_early(unit, names))
            return shown == wanted

        try:
            self.until(is_so)
        except AssertionError as error:
            raise AssertionError(f"waited for {wanted}, it is {shown}: {error}") from None

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """The first true value of ``condition``."""
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited in vain {what}:\n{self.last_words()}"
            time.sleep(0.02)
        return value

    @property
    def main_pid(self) -> str:
        """The daemon's process, as it is called inside."""
        return self.show("MainPID")

    def kill_daemon(self) -> None:
        """kill -9, and wait until systemd has started the next one."""
        restarts = int(self.show("NRestarts"))
        self.run("kill", "-9", self.main_pid)
        self.wait_for(NRestarts=restarts + 1, ActiveState="active")

    def restart(self) -> None:
        """systemctl restart: the daemon ends in good order."""
        self.systemctl("restart", UNIT)

    def configure(self, settings: str) -> None:
        """Write tierkv.toml anew."""
        self.path(SETTINGS_FILE).write_text(settings)

    def path(self, inside: str) -> Path:
        """A path of inside, as it is called outside."""
        return Path(f"/proc/{self._init()}/root{inside}")

    @property
    def socket(self) -> Path:
        """Where workers connect, from outside."""
        return self.path("/run/tierkv/tierkv.sock")

    def connect(self, **options: Any) -> Client:
        """A worker's connection, from outside."""
        patience = {"timeout_s": 10, "reconnect_s": WAIT_S} | options
        return tierkv.connect(self.socket, **patience)

    def get(self, page: str) -> tuple[int, str]:
        """Status and body of a page, by the metrics socket."""
        found = self.run(
            "curl", "--silent", "--unix-socket", "/run/tierkv/metrics.sock",
            "--write-out", "\n%{http_code}", f"http://localhost{page}",
        )  # fmt: skip
        body, _, status = found.rpartition("\n")
        return int(status), body

    def log(self) -> str:
        """What all daemons have said so far."""
        return self._enter("cat", LOG, check=False).stdout

    def last_words(self) -> str:
        """What systemd and the daemon said."""
        said = self._console.read_text(errors="replace")
        return f"{said[-2000:]}\n{self.log()[-4000:]}"

    def _show_early(self, unit: str, names: Sequence[str]) -> Mapping[str, str]:
        """Properties of a unit; nothing while systemd does not answer yet."""
        shown = self._enter(
            "systemctl", "show", f"--property={','.join(names)}", unit, check=False
        ).stdout.splitlines()
        return dict(line.split("=", 1) for line in shown if "=" in line)

    def _enter(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        entering = self._entering(*command)
        return subprocess.run(entering, check=check, capture_output=True, text=True)

    def _entering(self, *command: str) -> list[str]:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended: {self._console.read_text()}"
        return ["nsenter", f"--target={self._init()}", "--all", *command]

    def _init(self) -> int:
        """Process 1 of the sandbox, as it is called outside."""
        assert self._process is not None
        return next(iter(_children(self._process.pid)), self._process.pid)

    def _remove_cgroup(self) -> None:
        deadline = time.monotonic() + WAIT_S
        events = self._cgroup / "cgroup.events"
        while "populated 1" in events.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            os.rmdir(folder)
