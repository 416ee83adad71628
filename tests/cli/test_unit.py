"""The systemd unit: accepted by systemd, and in step with what the daemon expects."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tierkv_kernels.cuda.cache import default_directory

from tierkv.cli.exit_codes import Exit
from tierkv.config.load import SYSTEM_FILE, default_file
from tierkv.config.resolve import ARENA_FDS, Environment, Space, resolve
from tierkv.config.schema import Config

UNIT = Path(__file__).parents[2] / "systemd" / "tierkv.service"
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
    readme = UNIT.with_name("README.md").read_text()
    table = readme.partition("| directive | breaks |")[2].partition("\n\n")[0]
    found = re.findall(r"`([A-Z]\w+)=(\w*)`", table)
    assert ("PrivateDevices", "") in found
    for name, value in found:
        harmful = {value} if value else {"yes", "true", "on", "1"}
        assert not harmful & set(directives(name)), f"{name}={value}"


def test_automatic_paths_are_the_directories_that_systemd_makes() -> None:
    variables = {}
    for assignment in directives("Environment")[0].split():
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
    assert directives("RuntimeDirectory") == ["tierkv"]
    assert directives("StateDirectory") == ["tierkv"]
    assert directives("CacheDirectory") == ["tierkv"]
    assert config.server.socket == "/run/tierkv/tierkv.sock"
    assert config.metrics.socket == "/run/tierkv/metrics.sock"
    assert config.server.state_dir == "/var/lib/tierkv"
    assert default_file(environment) in (SYSTEM_FILE, None)
    assert default_directory(variables) == Path("/var/cache/tierkv/kernels")


def test_files_of_the_arenas_outlive_the_daemon() -> None:
    assert directives("RemoveIPC") == ["no"]


def test_systemd_keeps_the_arenas() -> None:
    (granted,) = directives("FileDescriptorStoreMax")
    assert int(granted) >= len(ARENA_FDS)
    assert f"FDSTORE={granted}" in directives("Environment")
    assert directives("NotifyAccess") == ["main"]


def test_the_daemon_sees_when_the_processes_of_other_users_started() -> None:
    """A lease of a worker that cannot be seen is closed as a dead worker's after a crash."""
    assert directives("ProtectProc") in ([], ["default"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit_and_finds_it_well_confined(tmp_path: Path) -> None:
    unit = tmp_path / "tierkv.service"
    unit.write_text(UNIT.read_text().replace("/usr/bin/tierkv", sys.executable))
    verify = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(verify, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
    subprocess.run(security, check=True, capture_output=True)
