"""What "auto" stands for, on machines that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.config.check import check
from tierkv.config.resolve import Environment, Space, resolve, this_environment
from tierkv.config.schema import (
    AUTO,
    AUTO_BYTES,
    Arena,
    Config,
    Device,
    Disk,
    Host,
    Metrics,
    Server,
    settings,
)
from tierkv.units import GiB, MiB

MakeEnvironment = Callable[..., Environment]


def test_root_gets_the_system_directories(make_environment: MakeEnvironment) -> None:
    config = resolve(Config(), make_environment())
    assert config.server.socket == "/run/tierkv/tierkv.sock"
    assert config.server.state_dir == "/var/lib/tierkv"
    assert config.metrics.socket == "/run/tierkv/metrics.sock"
    assert config.disk.dir == "/var/lib/tierkv/data"
    assert config.arena.dir.startswith("/dev/shm/tierkv-")


def test_a_user_gets_directories_of_his_own(make_environment: MakeEnvironment) -> None:
    variables = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/state", "HOME": "/home/u"}
    config = resolve(Config(), make_environment(uid=7, variables=variables))
    assert config.server.socket == "/run/user/7/tierkv/tierkv.sock"
    assert config.server.state_dir == "/state/tierkv"


def test_a_user_without_xdg_directories(make_environment: MakeEnvironment) -> None:
    config = resolve(Config(), make_environment(uid=7, variables={"HOME": "/home/u"}))
    assert config.server.state_dir == "/home/u/.local/state/tierkv"
    assert config.server.socket == "/home/u/.local/state/tierkv/tierkv.sock"


def test_two_state_directories_never_share_an_arena(make_environment: MakeEnvironment) -> None:
    arenas = {
        resolve(Config(server=Server(state_dir=path)), make_environment()).arena.dir
        for path in ("/a", "/b", "/a/", "/b/../a")
    }
    assert len(arenas) == 2


@pytest.mark.parametrize(
    ("variables", "keep"),
    [
        ({}, "files"),
        ({"FDSTORE": "8"}, "files"),
        ({"NOTIFY_SOCKET": "/n"}, "files"),
        ({"NOTIFY_SOCKET": "/n", "FDSTORE": "3"}, "files"),
        ({"NOTIFY_SOCKET": "/n", "FDSTORE": "4"}, "manager"),
        ({"NOTIFY_SOCKET": "/n", "LISTEN_FDNAMES": "tierkv-rpc.socket"}, "files"),
        ({"NOTIFY_SOCKET": "/n", "LISTEN_FDNAMES": "rpc:tierkv-device.arena"}, "manager"),
    ],
)
def test_a_service_manager_that_keeps_enough_descriptors_keeps_the_arenas(
    make_environment: MakeEnvironment, variables: dict[str, str], keep: str
) -> None:
    environment = make_environment(variables=variables)
    assert resolve(Config(), environment).arena.keep == keep
    assert resolve(Config(arena=Arena(keep="files")), environment).arena.keep == "files"
    assert resolve(Config(arena=Arena(keep="manager")), environment).arena.keep == "manager"


def test_budgets_are_shares_of_what_is_free(make_environment: MakeEnvironment) -> None:
    config = resolve(Config(), make_environment(disk=Space(20 * GiB, 10 * GiB, 0)))
    assert config.device.bytes == 40 * GiB
    assert config.host.bytes == 10 * GiB
    assert config.disk.bytes == 5 * GiB


def test_the_disk_tier_stops_at_64_gib(make_environment: MakeEnvironment) -> None:
    assert resolve(Config(), make_environment()).disk.bytes == 64 * GiB


def test_ram_is_limited_by_the_machine_and_by_the_file_system(
    make_environment: MakeEnvironment,
) -> None:
    by_machine = resolve(Config(), make_environment(ram_free_bytes=10 * GiB))
    by_file_system = resolve(Config(), make_environment(ram=Space(10 * GiB, 10 * GiB, 0)))
    assert by_machine.device.bytes == by_file_system.device.bytes == 4 * GiB


def test_memory_that_the_service_manager_keeps_is_limited_by_no_file_system(
    make_environment: MakeEnvironment,
) -> None:
    environment = make_environment(ram=Space(10 * GiB, 10 * GiB, 0), ram_free_bytes=50 * GiB)
    config = resolve(Config(arena=Arena(keep="manager")), environment)
    assert config.device.bytes == 20 * GiB
    assert list(check(config, environment.space)) == []
    config = resolve(Config(arena=Arena(keep="files"), device=config.device), environment)
    assert [problem.key for problem in check(config, environment.space)] == ["device.bytes"]


def test_a_restart_counts_its_own_files_as_free(make_environment: MakeEnvironment) -> None:
    before = resolve(Config(), make_environment(disk=Space(20 * GiB, 10 * GiB, 0)))
    after = resolve(
        Config(),
        make_environment(
            ram=Space(128 * GiB, 70 * GiB, 30 * GiB),
            ram_free_bytes=70 * GiB,
            disk=Space(20 * GiB, 6 * GiB, 4 * GiB),
        ),
    )
    assert before == after


def test_a_store_keeps_the_automatic_sizes_it_was_made_with(
    make_environment: MakeEnvironment,
) -> None:
    sizes = {"device.bytes": 7 * MiB, "host.bytes": 0, "disk.bytes": 9 * MiB}
    environment = make_environment()._replace(recorded=lambda _state_dir: sizes)
    config = resolve(Config(), environment)
    assert (config.device.bytes, config.host.bytes, config.disk.bytes) == tuple(sizes.values())
    given = resolve(Config(device=Device(bytes=MiB)), environment)
    assert given.device.bytes == MiB


def test_budgets_given_are_kept(make_environment: MakeEnvironment) -> None:
    given = Config(device=Device(bytes=5), host=Host(bytes=0), disk=Disk(bytes=0))
    config = resolve(given, make_environment())
    assert (config.device.bytes, config.host.bytes, config.disk.bytes) == (5, 0, 0)
    assert config.disk.segment_bytes == GiB


def test_a_small_disk_tier_has_smaller_segments(make_environment: MakeEnvironment) -> None:
    config = resolve(Config(disk=Disk(bytes=100 * MiB)), make_environment())
    assert config.disk.segment_bytes == 100 * MiB


def test_paths_become_absolute(make_environment: MakeEnvironment) -> None:
    given = Config(
        server=Server(socket="run/../t.sock", state_dir="~/state"), arena=Arena(dir="/dev/shm/x")
    )
    config = resolve(given, make_environment(variables={"HOME": "/home/ada"}))
    assert config.server.socket == "/here/t.sock"
    assert config.metrics.socket == "/here/metrics.sock"
    assert config.server.state_dir == "/home/ada/state"
    assert config.arena.dir == "/dev/shm/x"


def test_a_metrics_socket_that_is_off_stays_off(make_environment: MakeEnvironment) -> None:
    assert resolve(Config(metrics=Metrics(socket="")), make_environment()).metrics.socket == ""


def test_nothing_automatic_is_left_and_resolving_again_changes_nothing(
    make_environment: MakeEnvironment,
) -> None:
    config = resolve(Config(), make_environment())
    automatic = [setting for setting in settings().values() if setting.auto_is]
    assert len(automatic) == 10
    for setting in automatic:
        value = getattr(getattr(config, setting.section), setting.name)
        assert value not in (AUTO, AUTO_BYTES), setting.key
    assert resolve(config, make_environment()) == config


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "segment").write_bytes(b"x" * 100_000)
    environment = this_environment()
    space = environment.space(str(tmp_path / "data"))
    assert environment.working_dir == str(tmp_path)
    assert environment.ram_free_bytes > 0
    assert 100_000 <= space.own < space.total
    assert 0 < space.free <= space.total
    absent = environment.space(str(tmp_path / "not" / "yet" / "there"))
    assert (absent.total, absent.own) == (space.total, 0)


@pytest.mark.parametrize(
    ("config", "prefault"),
    [
        (Config(), "off"),
        (Config(device=Device(bytes=GiB)), "on"),
        (Config(host=Host(bytes=GiB)), "on"),
        (Config(arena=Arena(prefault="on")), "on"),
        (Config(device=Device(bytes=GiB), arena=Arena(prefault="off")), "off"),
    ],
)
def test_memory_that_somebody_gave_is_taken_at_once(
    make_environment: MakeEnvironment, config: Config, prefault: str
) -> None:
    assert resolve(config, make_environment()).arena.prefault == prefault


@pytest.mark.parametrize(
    ("numa", "wrong"),
    [("auto", []), ("off", []), ("3", []), ("interleave", []), ("both", ["arena.numa"])],
)
def test_numa_is_a_word_or_a_number(
    make_environment: MakeEnvironment, numa: str, wrong: list[str]
) -> None:
    environment = make_environment()
    config = resolve(Config(arena=Arena(numa=numa)), environment)
    assert [problem.key for problem in check(config, environment.space)] == wrong
