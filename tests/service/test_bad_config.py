"""What a daemon says of an impossible configuration: what, where, what to do. It leaves nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.running import Daemon, run_cli
from tierkv.cli.main import main

BAD_CONFIG = 78


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs ``tierkv serve``, which must refuse; returns what it says on standard error."""

    def run(*arguments: str, file: str = "", **variables: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        path = tmp_path / "tierkv.toml"
        path.write_text(file)
        places = ["--config", str(path)]
        for key, name in (
            ("server.state_dir", "state"),
            ("server.socket", "s"),
            ("metrics.socket", "m"),
            ("arena.dir", "arenas"),
        ):
            places += ["--set", f"{key}={tmp_path / name}"]
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        status = main(["serve", *places, *arguments])
        said = capsys.readouterr()
        assert (status, said.out) == (BAD_CONFIG, "")
        path.unlink()
        assert sorted(tmp_path.rglob("*")) == before
        return said.err

    return run


def test_the_process_itself_ends_with_78(tmp_path: Path) -> None:
    done = run_cli("serve", "--state-dir", str(tmp_path / "state"), "--set", "device.bites=5")
    assert (done.returncode, done.stdout) == (BAD_CONFIG, "")
    assert done.stderr == (
        "tierkv: device.bites: unknown key (flag --set device.bites); did you mean device.bytes?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_unknown_key_in_the_file(refused, tmp_path: Path) -> None:
    said = refused(file="# sizes\n[device]\nbites = 5\n")
    assert said == (
        f"tierkv: device.bites: unknown key ({tmp_path}/tierkv.toml:3); "
        "did you mean device.bytes?\n"
    )


def test_unknown_section_in_the_file(refused, tmp_path: Path) -> None:
    said = refused(file="[wall]\ndurability = 'kill'\n")
    assert f"({tmp_path}/tierkv.toml:2); did you mean wal.durability?" in said


def test_unknown_key_in_the_environment(refused) -> None:
    said = refused(TIERKV_HOST__BYTE="5")
    assert said == (
        "tierkv: host.byte: unknown key (env TIERKV_HOST__BYTE); did you mean host.bytes?\n"
    )


def test_unknown_key_in_a_flag(refused) -> None:
    said = refused("--set", "disk.writes=through")
    assert said == (
        "tierkv: disk.writes: unknown key (flag --set disk.writes); did you mean disk.write?\n"
    )


def test_bad_values_are_named_with_their_places(refused, tmp_path: Path) -> None:
    said = refused(
        "--set",
        "device.bytes=8 megs",
        file="[wal]\ncheckpoint_s = 'soon'\n",
        TIERKV_DISK__WRITE="maybe",
    )
    assert "the configuration has 3 problems" in said
    assert f"wal.checkpoint_s: 'soon' is not a duration ({tmp_path}/tierkv.toml:2)" in said
    assert "(env TIERKV_DISK__WRITE)" in said
    assert "through" in said
    assert "(flag --set device.bytes)" in said


def test_a_file_that_is_no_toml(refused) -> None:
    assert "correct the file's syntax" in refused(file="[device\n")


def test_tiers_that_do_not_fit_the_machine(refused) -> None:
    said = refused("--set", "device.bytes=900TiB", "--set", "host.bytes=0", "--set", "disk.bytes=0")
    assert said.startswith("tierkv: device.bytes: ")
    assert "lower them, or choose another arena.dir" in said


def test_power_durability_without_a_disk(refused) -> None:
    said = refused(
        "--set", "wal.durability=power", "--set", "disk.bytes=0", "--set", "device.bytes=1MiB"
    )
    assert said.startswith("tierkv: wal.durability: ")


def test_a_socket_path_that_is_too_long(refused) -> None:
    said = refused("--set", f"server.socket=/tmp/{'x' * 110}", "--set", "device.bytes=1MiB")
    assert "server.socket" in said
    assert "choose a shorter path" in said


@pytest.fixture
def stopped():
    """A daemon that was not started, with folders for it."""
    with Daemon() as daemon:
        yield daemon


def ends(daemon: Daemon) -> tuple[int, str]:
    daemon.launch()
    return daemon.wait(), daemon.said()


def test_a_file_in_the_socket_s_place_stays(stopped: Daemon) -> None:
    stopped.socket.write_text("precious")
    status, said = ends(stopped)
    assert status == BAD_CONFIG
    assert "exists and is not a socket" in said
    assert stopped.socket.read_text() == "precious"
    assert os.listdir(stopped.arenas) == []


def test_a_metrics_port_that_is_taken(stopped: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        stopped.settings["metrics.tcp"] = f"127.0.0.1:{taken.getsockname()[1]}"
        status, said = ends(stopped)
    assert status == BAD_CONFIG
    assert "metrics.tcp: cannot listen" in said
    assert not stopped.socket.exists()
    assert not stopped.metrics_socket.exists()


@pytest.mark.parametrize("key", ["server.socket", "metrics.socket"])
def test_a_socket_whose_directory_cannot_be_made(stopped: Daemon, key: str) -> None:
    stopped.settings[key] = "/proc/nowhere/x.sock"
    status, said = ends(stopped)
    assert status == BAD_CONFIG
    assert f"{key}: cannot make /proc/nowhere" in said


def test_a_state_directory_that_cannot_be_made(stopped: Daemon) -> None:
    stopped.state.write_text("a file")
    status, said = ends(stopped)
    assert status == BAD_CONFIG
    assert "server.state_dir" in said
    assert not stopped.socket.exists()


def test_a_store_in_use_means_try_again_and_harms_nobody(daemon: Daemon, bystander) -> None:
    with Daemon({"server.state_dir": str(daemon.state)}) as second:
        status, said = ends(second)
        assert status == 75
        assert "in use by another tierkv process" in said
        assert not second.socket.exists()


def test_a_socket_in_use_is_left_to_its_daemon(daemon: Daemon, bystander) -> None:
    with Daemon({"server.socket": str(daemon.socket)}) as second:
        status, said = ends(second)
        assert status == BAD_CONFIG
        assert "another process listens here" in said
    assert daemon.socket.exists()
