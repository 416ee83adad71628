"""``tierkv top`` and ``status --watch`` on a real terminal, of a real daemon."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.page.documents import busy, recovering, showing
from tests.service.blocks import SPEC, fill, store, tokens
from tests.service.running import Daemon, environment, run_cli, running
from tests.service.tmux import TMUX, Screen
from tierkv.obs.status import StatusDocument

pytestmark = pytest.mark.skipif(TMUX is None, reason="needs Debian's package tmux")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon


def test_top_shows_who_uses_what_and_answers_to_keys(daemon: Daemon) -> None:
    with daemon.connect("engine-7") as client:
        ns = client.namespace(SPEC)
        with fill(ns, tokens(20, seed=3)), Screen("top", "--socket", str(daemon.socket)) as screen:
            text = screen.shows("is serving", "engine-7", "q quit", "by device")
            assert re.search(r"device .* 2% +160 KiB ", text), text
            assert re.search(rf"- +{SPEC.model} +20 ", text), text
            store(ns, tokens(300, seed=4))
            screen.shows("31.2%")
            assert "looked up" in screen.text()
            screen.press("s")
            screen.shows("by host")
            screen.press("q")
            screen.shows("ended 0")


def test_a_narrow_screen_cuts_columns_at_its_edge_and_breaks_no_number(daemon: Daemon) -> None:
    with Screen("top", "--socket", str(daemon.socket), size=(40, 50)) as screen:
        text = screen.shows("q quit")
    assert re.search(r"^ device +\S* +[\d.]+% +[\d.,]+ [KMGT]?i?B ", text, re.MULTILINE), text


def test_top_needs_a_terminal(daemon: Daemon) -> None:
    done = run_cli("top", "--socket", str(daemon.socket))
    assert (done.returncode, done.stdout) == (2, "")
    assert "in a pipe use `tierkv stat`" in done.stderr


def test_status_on_a_terminal_has_colour_only_where_it_is_wanted(daemon: Daemon) -> None:
    with Screen("status", "--socket", str(daemon.socket)) as screen:
        screen.shows("How full is each tier?", "Is the data safe?", "ended 0")
        assert "\x1b[1m" in screen.text(colours=True)
    with Screen("status", "--socket", str(daemon.socket), extra={"NO_COLOR": "1"}) as screen:
        screen.shows("How full is each tier?", "ended 0")
        assert not re.search(r"\x1b\[(3[0-8]|9\d)", screen.text(colours=True))


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon that recovers: workers wait in its backlog."""
    path = str(tmp_path / "tierkv.sock")
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(path)
        listening.listen()
        yield path


def test_a_recovery_is_watched_until_it_is_over(starting: str, tmp_path: Path) -> None:
    page = str(tmp_path / "metrics.sock")
    with (
        showing(recovering(250_000), unix_socket=page) as daemon,
        Screen("status", "--watch", "--socket", starting) as screen,
    ):
        text = screen.shows("is recovering", "250,000 of 1,000,000 (25%), about")
        assert "━" in text
        daemon.document = recovering(500_000)
        screen.shows("(50%)")
        daemon.document = busy()
        screen.shows("is serving", "How full is each tier?")
        screen.press("q")
        screen.shows("ended 0")


def test_a_daemon_that_recovers_is_asked_on_its_page(starting: str, tmp_path: Path) -> None:
    with showing(recovering(250_000), unix_socket=str(tmp_path / "metrics.sock")):
        done = run_cli("status", "--socket", starting)
    assert done.returncode == 75
    assert "is recovering" in done.stdout
    assert "250,000 of 1,000,000 (25%)" in done.stdout


def test_watching_in_a_pipe_tells_what_changes(starting: str, tmp_path: Path) -> None:
    page = str(tmp_path / "metrics.sock")
    with showing(recovering(250_000), unix_socket=page) as daemon:
        command = [sys.executable, "-m", "tierkv", "status", "--watch", "--socket", starting]
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True
        ) as watching:
            assert watching.stdout is not None
            assert "is recovering" in watching.stdout.readline()
            daemon.document = StatusDocument(version="1", state="serving")
            assert "is serving" in watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.wait(10) == 0


def test_ctrl_c_is_how_a_stat_without_end_ends(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "tierkv", "stat", "0.1", "--socket", str(daemon.socket)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stat:
        assert stat.stdout is not None
        assert stat.stdout.readline().startswith("time")
        assert "serving" in stat.stdout.readline()
        stat.send_signal(signal.SIGINT)
        _, err = stat.communicate(timeout=10)
    assert (stat.returncode, err) == (0, "")


def test_who_no_longer_waits_for_a_drain_is_told_that_it_goes_on(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "tierkv", "drain", "--wait", "--socket", str(daemon.socket)]
    with (
        daemon.connect(),
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as drain,
    ):
        assert drain.stderr is not None
        assert "1 lease is held" in drain.stderr.readline()
        drain.send_signal(signal.SIGINT)
        assert "goes on draining; `tierkv drain --undo`" in drain.communicate(timeout=10)[1]
    assert drain.returncode == 1
    assert run_cli("status", "--socket", str(daemon.socket)).returncode == 75
    assert run_cli("drain", "--undo", "--socket", str(daemon.socket)).returncode == 0


def test_ctrl_c_quits_a_screen(daemon: Daemon) -> None:
    with Screen("top", "--socket", str(daemon.socket)) as screen:
        screen.shows("q quit")
        screen.press("C-c")
        screen.shows("ended 0")
