"""The systemd unit: accepted by systemd, and in step with what the daemon expects."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tierkv_kernels.cuda.cache import default_directory

import tierkv
from tests.service.running import run_cli
from tierkv.cli.exit_codes import Exit
from tierkv.cli.unit_files import (
    DROP_INS,
    NAMES,
    UNITS,
    hidden_by_the_sandbox,
    shipped,
    this_command,
)
from tierkv.config.docs import default_toml
from tierkv.config.load import SYSTEM_FILE, default_file
from tierkv.config.resolve import ARENA_FDS, Environment, Space, resolve
from tierkv.config.schema import Config

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "units" / "tierkv.service"
GATES = ((), 16), (("cpu-only", "local-only"), 6)
"""Drop-ins, and the highest exposure that they may leave, in tenths."""
SPECIFIERS = {"%t": "/run", "%S": "/var/lib", "%E": "/etc", "%C": "/var/cache"}
"""systemd.unit(5), of the system manager."""


def directives(name: str) -> list[str]:
    prefix = f"{name}="
    return [
        line.removeprefix(prefix)
        for line in UNIT.read_text().splitlines()
        if line.startswith(prefix)
    ]


def test_a_bad_configuration_stops_the_restarts() -> None:
    assert directives("RestartPreventExitStatus") == [str(Exit.BAD_CONFIG.value)]


def test_the_sandbox_has_nothing_that_is_said_to_break_something() -> None:
    readme = (SYSTEMD / "README.md").read_text()
    table = readme.partition("| directive | breaks |")[2].partition("\n\n")[0]
    found = re.findall(r"`([A-Z]\w+)=(\w*)`", table)
    assert ("PrivateDevices", "") in found
    for name, value in found:
        harmful = {value} if value else {"yes", "true", "on", "1"}
        assert not harmful & set(directives(name)), f"{name}={value}"


def test_automatic_paths_are_the_directories_that_systemd_makes() -> None:
    variables = {}
    (of_the_system,) = [line for line in directives("Environment") if line.startswith("XDG_")]
    for assignment in of_the_system.split():
        name, _, value = assignment.partition("=")
        for specifier, path in SPECIFIERS.items():
            value = value.replace(specifier, path)
        variables[name] = value
    environment = Environment(
        uid=990,
        variables=variables,
        working_dir="/",
        ram_free_bytes=1 << 30,
        space=lambda path: Space(1 << 30, 1 << 30, 0),
    )
    config = resolve(Config(), environment)
    # The sockets make this one. The service would remove it under them.
    assert directives("RuntimeDirectory") == []
    for unit, path in (("tierkv", config.server.socket), ("tierkv-metrics", config.metrics.socket)):
        socket = (SYSTEMD / "units" / f"{unit}.socket").read_text()
        assert f"ListenStream={path.replace('/run', '%t')}\n" in socket
    assert directives("StateDirectory") == ["tierkv"]
    assert directives("CacheDirectory") == ["tierkv"]
    assert config.server.socket == "/run/tierkv/tierkv.sock"
    assert config.metrics.socket == "/run/tierkv/metrics.sock"
    assert config.server.state_dir == "/var/lib/tierkv"
    assert default_file(environment) in (SYSTEM_FILE, None)
    assert default_directory(variables) == Path("/var/cache/tierkv/kernels")


def test_files_of_the_arenas_outlive_the_daemon() -> None:
    """Unless the unit says otherwise, for it keeps descriptors, not files."""
    assert directives("RemoveIPC") == ["yes"]
    drop_in = (SYSTEMD / "dropins" / "files.conf").read_text().splitlines()
    assert "RemoveIPC=no" in drop_in
    assert "Environment=TIERKV_ARENA__KEEP=files" in drop_in


def test_systemd_keeps_the_arenas() -> None:
    (granted,) = directives("FileDescriptorStoreMax")
    assert int(granted) >= len(ARENA_FDS)
    assert f"FDSTORE={granted}" in directives("Environment")
    assert directives("NotifyAccess") == ["main"]


def test_the_daemon_sees_when_the_processes_of_other_users_started() -> None:
    """A lease of a worker that cannot be seen is closed as a dead worker's after a crash."""
    assert directives("ProtectProc") in ([], ["default"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty directory."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def install(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_cli("unit", "install", "--root", str(root), *arguments)


needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze"
)


@needs_analyze
@pytest.mark.parametrize(("drop_ins", "tenths"), GATES)
def test_the_service_is_well_confined(root: Path, drop_ins: tuple[str, ...], tenths: int) -> None:
    chosen = [part for name in drop_ins for part in ("--drop-in", name)]
    assert install(root, "--command", sys.executable, *chosen).returncode == 0
    unit = root / "etc/systemd/system/tierkv.service"
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={tenths}", str(unit)]
    done = subprocess.run(security, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


@needs_analyze
@pytest.mark.parametrize("drop_in", ["", *DROP_INS])
def test_systemd_accepts_all_units(root: Path, drop_in: str) -> None:
    chosen = ["--drop-in", drop_in] if drop_in else []
    assert install(root, "--command", sys.executable, *chosen).returncode == 0
    units = root / "etc/systemd/system"
    verify = ["systemd-analyze", "verify", *(str(units / name) for name in UNITS)]
    done = subprocess.run(verify, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- the command ----------------------------------------------------------------------------------


def test_an_installation_is_repeatable_and_keeps_the_configuration(root: Path) -> None:
    planned = install(root, "--command", "/opt/x/tierkv", "--drop-in", "cpu-only", "--dry-run")
    assert planned.returncode == 0
    assert not list(root.iterdir())
    first = install(root, "--command", "/opt/x/tierkv", "--drop-in", "cpu-only")
    assert first.returncode == 0
    written = {line.split()[-1] for line in first.stdout.splitlines() if "written" in line}
    assert written == {line.split()[-1] for line in planned.stdout.splitlines()}
    assert written == {str(path) for path in root.rglob("*") if path.is_file()}
    assert "systemctl enable --now tierkv.service tierkv.socket" in first.stdout
    service = (root / "etc/systemd/system/tierkv.service").read_text()
    assert "ExecStart=/opt/x/tierkv serve\n" in service
    assert "ExecReload=/opt/x/tierkv reload\n" in service
    settings = root / "etc/tierkv/tierkv.toml"
    assert settings.read_text() == default_toml()
    settings.write_text("[attend]\nthreads = 2\n")
    (root / "etc/systemd/system/tierkv.socket").write_text("# of an older version\n")
    assert f"Next, on the machine that is in {root}:" in first.stdout
    again = install(root, "--command", "/opt/x/tierkv", "--drop-in", "cpu-only").stdout
    verdicts = {Path(line.split()[-1]).name: line.split()[0] for line in again.splitlines()[:6]}
    assert verdicts == {
        "tierkv.service": "is",
        "tierkv.socket": "replaced",
        "tierkv-metrics.socket": "is",
        "cpu-only.conf": "is",
        "tierkv.conf": "is",
        "tierkv.toml": "stays",
    }


def test_an_installation_for_a_user_needs_nothing_of_the_system(root: Path) -> None:
    done = run_cli(
        "unit", "install", "--user", "--root", str(root),
        extra={"XDG_CONFIG_HOME": "/home/ada/.config"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    units = root / "home/ada/.config/systemd/user"
    service = (units / "tierkv.service").read_text()
    assert "WatchdogSec=" in service
    assert "WantedBy=default.target" in service
    for name in ("User=", "Protect", "CapabilityBoundingSet=", "XDG_RUNTIME_DIR", "IPAddress"):
        assert f"\n{name}" not in service
    assert "SocketUser" not in (units / "tierkv.socket").read_text()
    assert not (root / "etc").exists()


def test_an_interpreter_that_the_sandbox_hides_is_refused(root: Path) -> None:
    """ProtectHome= would make the service fail to start, for a reason that is hard to find."""
    hidden = hidden_by_the_sandbox()
    done = install(root)
    if hidden is None:
        assert done.returncode == 0
        return
    assert done.returncode == 1
    assert str(hidden) in done.stderr
    assert "ProtectHome=" in done.stderr
    assert not list(root.iterdir())


@pytest.mark.parametrize("home", ["root", "home/ada", "run/user/1000"])
def test_what_the_sandbox_hides(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    place = f"/{home}/venv/bin/python"
    for name in ("executable", "prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, "/usr/bin/python3")
    monkeypatch.setattr(tierkv, "__file__", "/usr/lib/python3/dist-packages/tierkv/__init__.py")
    assert hidden_by_the_sandbox() is None
    monkeypatch.setattr(sys, "prefix", place)
    assert hidden_by_the_sandbox() == Path(place)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_can_be_printed(name: str) -> None:
    done = run_cli("unit", "print", name)
    assert done.returncode == 0
    assert done.stdout.replace(this_command(), "/usr/bin/tierkv") == shipped(name)
