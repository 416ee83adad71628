"""``tierkv torture`` as people start it: what it prints, what it leaves, how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.daemon import SHM, python_environment
from tierkv.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 60.0
"""Longest wait for the command; only a failing test reaches it."""

COUNTS = ["acknowledged", "survived", "lost", "wrong", "resurrected"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process whose daemons are this checkout's; what is set in it is for no torture."""
    arenas = tmp_path / "arenas"
    return python_environment() | {
        "TIERKV_SERVER__STATE_DIR": str(tmp_path / "existing"),
        "TIERKV_DISK__DIR": str(tmp_path / "existing" / "data"),
        "TIERKV_ARENA__DIR": str(arenas),
    }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for tortures, in which nothing must stay."""
    place = tmp_path / "place"
    yield place
    assert list(place.iterdir()) == []


def tierkv(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_the_report_as_json_and_progress_on_standard_error(
    environment: dict[str, str], place: Path
) -> None:
    done = tierkv(
        environment,
        *("torture", "--kills", "2", "--seed", "77", "--workers", "1", "--json"),
        *("--dir", str(place)),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert (report["seed"], report["durability"]) == (77, "kill")
    assert report["acknowledged"] == report["survived"] > 0
    assert [report[name] for name in COUNTS[2:]] == [0, 0, 0]
    assert 2 <= report["kills"] <= 4
    assert 0 < report["recovery_median_s"] <= report["recovery_max_s"]
    assert (report["failure"], report["kept_in"]) == ("", None)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"- seed 77, in {place}/tierkv-torture-")
    assert lines[1].endswith("0 lost, 0 wrong, 0 resurrected")


def test_an_existing_store_is_not_touched(
    environment: dict[str, str], place: Path, tmp_path: Path
) -> None:
    existing = tmp_path / "existing"
    (existing / "data").mkdir(parents=True)
    (existing / "FORMAT").write_text("a store")
    done = tierkv(environment, "torture", "--kills", "1", "--workers", "1", "--dir", str(place))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["what", "count"]
    assert sorted(path.name for path in existing.rglob("*")) == ["FORMAT", "data"]
    assert not (tmp_path / "arenas").exists()


def test_without_a_directory_it_goes_beside_the_state_directory(
    environment: dict[str, str], place: Path, tmp_path: Path
) -> None:
    place.mkdir()
    done = tierkv(
        environment | {"TIERKV_SERVER__STATE_DIR": str(place / "not" / "yet" / "there")},
        *("torture", "--minutes", "0.02", "--workers", "1", "--seed", "3"),
    )
    assert done.returncode == 0, done.stderr
    assert f", in {place}/tierkv-torture-" in done.stderr


@pytest.fixture
def endless(environment: dict[str, str], place: Path) -> Iterator[subprocess.Popen[str]]:
    """A torture without end, at work. It goes with the test, and all it started."""
    process = _start(environment, place)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Let it clean up; if it does not, end it and its children."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=WAIT_S / 2)
    except subprocess.TimeoutExpired:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.kill()
        for child in children.split():
            os.kill(int(child), signal.SIGKILL)
        process.communicate()


def _start(environment: dict[str, str], place: Path) -> subprocess.Popen[str]:
    command = ("torture", "--minutes", "60", "--json", "--dir", str(place))
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("- seed ")
    assert "acknowledged" in process.stderr.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_a_last_look(
    endless: subprocess.Popen[str], number: signal.Signals
) -> None:
    endless.send_signal(number)
    out, err = endless.communicate(timeout=WAIT_S)
    assert endless.returncode == 0, err
    report = json.loads(out)
    assert report["survived"] == report["acknowledged"] > 0
    assert "ending after a last look" in err


def test_a_second_signal_ends_it_with_the_counts_so_far(endless: subprocess.Popen[str]) -> None:
    assert endless.stderr is not None
    endless.send_signal(signal.SIGINT)
    assert "ending" in endless.stderr.readline()
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=WAIT_S)
    assert endless.returncode == 0, err
    assert json.loads(out)["survived"] > 0
    assert "ended without a last look" in err


def test_a_failure_leaves_the_store_and_says_where(
    environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import sys\nif 'serve' in sys.orig_argv: sys.exit('no daemon today')\n"
    )
    paths = f"{hook}{os.pathsep}{environment['PYTHONPATH']}"
    done = tierkv(
        environment | {"PYTHONPATH": paths},
        *("torture", "--kills", "1", "--seed", "5", "--json", "--dir", str(place)),
    )
    assert done.returncode == 1
    (kept,) = place.iterdir()
    report = json.loads(done.stdout)
    assert (report["ok"], report["kept_in"]) == (False, str(kept))
    assert "no daemon today" in report["failure"]
    assert f"The store stays in {kept}" in done.stderr
    assert (kept / "daemon.log").read_text()
    assert not list(SHM.glob(f"{kept.name}*"))


def test_a_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["torture", "--dir", str(tmp_path / "file" / "below")]) == 78
    said = capsys.readouterr().err
    assert f"cannot make a folder in {tmp_path / 'file' / 'below'}: " in said
    assert "--dir" in said
