"""Starts that die before they serve: after three in a row what they died of is set aside."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.service.blocks import SPEC, store, tokens
from tests.service.running import Daemon
from tierkv.service import deleted
from tierkv.service.attempts import FAILURES_MAX, NAME
from tierkv.service.daemon import EXIT_CONFIG, EXIT_FAILED

STRACE = ("strace", "-f", "-qq", "-o", os.devnull)
PROMPT = tokens(3, seed=1)

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A stopped daemon with blocks on disk and in memory."""
    with Daemon() as daemon:
        daemon.start()
        with daemon.connect() as client:
            store(client.namespace(SPEC), PROMPT)
        assert daemon.stop() == 0, daemon.said()
        yield daemon


def start_that_meets(daemon: Daemon, *what: str) -> int:
    """A start in which this happens to system calls upon the index; its exit status."""
    index = daemon.state / "index" / "data.mdb"
    inject = [part for one in what for part in ("-e", f"inject={one}")]
    daemon._launcher = [*STRACE, "-P", str(index), "-e", "trace=openat,fdatasync", *inject, "--"]
    try:
        daemon.launch()
        return daemon.wait()
    finally:
        daemon._launcher = []


def die_in_recovery(daemon: Daemon, times: int, by: signal.Signals = signal.SIGKILL) -> None:
    """So many starts in a row die. (Only the last one really: each takes a second.)"""
    (daemon.state / NAME).write_text(f"{times - 1}\n")
    assert start_that_meets(daemon, f"openat:signal={by.name}") == -by
    assert count(daemon) == str(times)


def count(daemon: Daemon) -> str:
    """How many starts in a row have failed, by the daemon's own note."""
    return (daemon.state / NAME).read_text().strip()


def found(daemon: Daemon) -> int:
    with daemon.connect() as client:
        return int(client.namespace(SPEC).lookup(PROMPT).tokens)


def test_fewer_than_three_lose_nothing_and_not_all_deaths_count(daemon: Daemon) -> None:
    """Not failures of the machine, a mistake in the configuration, or being told to stop."""
    # SIGABRT is what a start gets that hangs: see TimeoutStartFailureMode= in the unit.
    die_in_recovery(daemon, FAILURES_MAX - 1, signal.SIGABRT)
    for error in ("EIO", "ENOSPC"):
        assert start_that_meets(daemon, f"openat:error={error}") == EXIT_FAILED
    daemon.settings["arena.numa"] = "99"
    daemon.launch()
    assert daemon.wait() == EXIT_CONFIG
    del daemon.settings["arena.numa"]
    # Told to stop while it opens the index, killed when it writes it.
    told = "openat:signal=SIGTERM:delay_exit=500000:when=1"
    assert start_that_meets(daemon, told, "fdatasync:signal=SIGKILL") == -signal.SIGKILL
    assert count(daemon) == str(FAILURES_MAX - 1)
    daemon.start()
    assert found(daemon) == len(PROMPT)
    # They are forgotten once a daemon has served.
    assert count(daemon) == "0"
    assert not os.listdir(daemon.state / "quarantine")


def test_after_three_the_cache_starts_empty_and_says_so(daemon: Daemon) -> None:
    die_in_recovery(daemon, FAILURES_MAX)
    (daemon.state / deleted.NAME).touch()
    # Dying while the log (the first renaming) is set aside, but not yet the index, is gone on with.
    daemon._launcher = [*STRACE, "-e", "trace=rename"]
    daemon._launcher += ["-e", "inject=rename:signal=SIGKILL:when=2", "--"]
    daemon.launch()
    assert daemon.wait() == -signal.SIGKILL
    daemon._launcher = []
    daemon.start()
    assert found(daemon) == 0
    aside = os.listdir(daemon.state / "quarantine")
    assert {"FORMAT.0", "index.0", "wal.0", f"{deleted.NAME}.0"} <= set(aside)
    assert "level=critical" in daemon.said()
    assert f"{FAILURES_MAX} starts in a row died before they served" in daemon.said()
    (problem,) = [one for one in daemon.status()["problems"] if one["level"] == "critical"]
    assert "starts EMPTY" in problem["message"]
    with daemon.connect() as client:
        store(client.namespace(SPEC), PROMPT)
        client.flush()
    # It is a store like any other.
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    shutil.rmtree(daemon.arenas)
    daemon.start()
    assert found(daemon) == len(PROMPT)


def test_whoever_wants_to_look_first_is_left_everything(daemon: Daemon) -> None:
    before = _files(daemon.state)
    daemon.settings["recovery.on_repeated_failure"] = "refuse"
    die_in_recovery(daemon, FAILURES_MAX)
    daemon.launch()
    assert daemon.wait() == EXIT_CONFIG
    assert str(daemon.state / NAME) in daemon.said()
    (daemon.state / NAME).unlink()
    before.pop(NAME)
    assert _files(daemon.state) == before
    daemon.start()
    assert found(daemon) == len(PROMPT)


def _files(folder: Path) -> Mapping[str, int]:
    """All files but the locks, which are opened for writing by whoever looks, by their size."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and "lock" not in path.name.lower()
    }
