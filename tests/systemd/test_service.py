"""The shipped units under a real systemd: a life with kills, reloads, drains and updates."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.crash.eight_prompts import ALL, PROMPTS, adopted, check, fill, found, write
from tests.crash.pattern import SMALL
from tests.systemd.sandbox import DISK, NO_TCP, RAM, SOCKETS, Sandbox

SETTINGS = RAM + DISK + NO_TCP

BACK_S = 1.5
"""How soon after a kill a worker shall be served again, on a machine that has nothing else to do.

Others may run beside this test. So what it took is only printed, and judged by what it costs.
"""

PAUSE_S = 0.25
"""What systemd takes to notice the end and to start the next one; 0.1 s of it is RestartSec=."""

GENEROUS_S = 15.0


@pytest.fixture(scope="module")
def booted() -> Iterator[Sandbox]:
    with Sandbox(SETTINGS) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(booted: Sandbox) -> Sandbox:
    """The service runs with ``SETTINGS`` and holds all prompts."""
    booted.systemctl("reset-failed", "tierkv")  # so that the starts of other tests do not count
    booted.configure(SETTINGS)
    with booted.connect() as client:
        fill(client)
    return booted


def tierkv(sandbox: Sandbox, *arguments: str) -> str:
    """What a command prints that root runs inside."""
    return sandbox.run("env", "STATE_DIRECTORY=/tmp", "tierkv", *arguments)


def cpu_s(sandbox: Sandbox) -> float:
    """CPU time that the daemon has taken so far (proc(5), fields 14 and 15 of stat)."""
    stat = sandbox.path(f"/proc/{sandbox.main_pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def test_it_tells_systemd_how_it_is(sandbox: Sandbox) -> None:
    sandbox.until(lambda: "hits" in sandbox.show("StatusText"), "for a status")
    assert sandbox.show("StatusText").startswith("serving: ")
    assert sandbox.get("/readyz") == (200, "serving\n")


def test_after_a_kill_it_is_back_at_once_and_warm_and_nobody_gets_an_error(
    sandbox: Sandbox, record_property: Callable[[str, object], None]
) -> None:
    with sandbox.connect() as client:
        namespace = client.namespace(SMALL)
        sequence = namespace.begin(PROMPTS[0])
        tokens = [*PROMPTS[0], *range(9)]
        write(namespace, sequence, tokens)
        epoch, killed = client.epoch, time.monotonic()
        sandbox.run("kill", "-9", sandbox.main_pid)
        newcomers: list[list[int]] = []

        def come() -> None:
            with sandbox.connect(reconnect_s=0.0) as newcomer:
                newcomers.append(found(newcomer))

        newcomer = threading.Thread(target=come)
        newcomer.start()
        while client.epoch == epoch:
            client.stat()
        back_s = time.monotonic() - killed
        newcomer.join()
        assert sequence.tokens.tolist() == tokens
        check(namespace, sequence)
        assert adopted(client) == ["device", "host"]
        assert newcomers == [ALL]
    start_s = cpu_s(sandbox)
    record_property("back_after_kill_s", back_s)
    record_property("start_cpu_s", start_s)
    print(f"served again {back_s:.2f} s after kill -9; the start took {start_s:.2f} s of a CPU")
    assert back_s < GENEROUS_S
    assert PAUSE_S + start_s < BACK_S
    assert sandbox.get("/healthz") == (200, "ok\n")


def test_a_reload_takes_over_what_it_can_or_fails_and_changes_nothing(sandbox: Sandbox) -> None:
    pid = sandbox.main_pid
    sandbox.configure(SETTINGS + '[log]\nlevel = "debug"\n[attend]\nthreads = 2\n')
    sandbox.systemctl("reload", "tierkv")
    assert "changed=log.level needs_restart=attend.threads" in sandbox.log()
    sandbox.configure(SETTINGS + "[log]\nlevels = 3\n")
    failed = sandbox.attempt("systemctl", "reload", "tierkv")
    assert failed.returncode != 0
    assert "log.levels: unknown key (/etc/tierkv/tierkv.toml:12)" in sandbox.log()
    sandbox.wait_for(ActiveState="active", SubState="running", MainPID=pid)
    with sandbox.connect() as client:
        assert not client.stat()["config"]["ok"]
        assert found(client) == ALL
    sandbox.configure(SETTINGS)
    said = json.loads(tierkv(sandbox, "reload", "--json"))
    assert said == {"changed": ["log.level"], "needs_restart": []}


def test_a_drain_waits_for_workers_and_can_be_undone(sandbox: Sandbox) -> None:
    with sandbox.connect() as client:
        waiting = sandbox.start("env", "STATE_DIRECTORY=/tmp", "tierkv", "drain", "--wait")
        sandbox.until(lambda: sandbox.get("/readyz") == (503, "draining\n"), "for the drain")
        assert found(client) == ALL
        assert waiting.poll() is None
    assert waiting.wait(GENEROUS_S) == 0
    said = json.loads(tierkv(sandbox, "drain", "--json"))
    assert (said["drains"], said["leases"], said["unwritten"]) == (True, 0, 0)
    assert "takes new workers" in tierkv(sandbox, "drain", "--undo")
    assert sandbox.get("/readyz") == (200, "serving\n")


def test_who_connects_while_it_is_stopped_has_it_started(sandbox: Sandbox) -> None:
    sandbox.systemctl("stop", "tierkv")
    assert sandbox.show("ActiveState") == "inactive"
    for socket in SOCKETS:
        assert sandbox.show("ActiveState", socket) == "active"
    with sandbox.connect(reconnect_s=0.0) as client:
        assert found(client) == ALL
    sandbox.wait_for(ActiveState="active")
    sandbox.systemctl("stop", *SOCKETS, "tierkv")
    assert not sandbox.socket.exists()
    sandbox.systemctl("start", "tierkv")
    with sandbox.connect() as client:
        assert found(client) == ALL


def test_an_update_by_restart_loses_nothing(sandbox: Sandbox) -> None:
    """With another configuration, too; workers go on with what they have."""
    with sandbox.connect() as client:
        namespace = client.namespace(SMALL)
        sequence = namespace.begin(PROMPTS[0])
        sandbox.configure(SETTINGS + '[log]\nlevel = "debug"\n[attend]\nthreads = 2\n')
        sandbox.restart()
        sequence.reserve(0)
        check(namespace, sequence)
        assert adopted(client) == ["device", "host"]
        assert found(client) == ALL
        assert client.stat()["recovery"]["dropped_blocks"] == 0
    sandbox.configure(SETTINGS.replace("160KiB", "320KiB"))
    sandbox.restart()
    with sandbox.connect() as client:
        assert client.stat()["tiers"]["host"]["capacity_bytes"] == 320 << 10
        assert found(client) == ALL
    sandbox.configure(SETTINGS)
    sandbox.restart()


def test_a_mistake_in_the_configuration_stops_the_restarts(sandbox: Sandbox) -> None:
    sandbox.configure("[log]\nlevels = 3\n")
    assert sandbox.attempt("systemctl", "restart", "tierkv").returncode != 0
    sandbox.wait_for(ActiveState="failed", ExecMainStatus=78, Result="exit-code", NRestarts=0)
    sandbox.configure(SETTINGS)
    sandbox.systemctl("start", "tierkv")
    with sandbox.connect() as client:
        assert found(client) == ALL


def test_asked_by_a_signal_it_writes_to_its_log_how_it_is(sandbox: Sandbox) -> None:
    sandbox.systemctl("kill", "--kill-who=main", "--signal=USR1", "tierkv")
    sandbox.until(lambda: "asked how it is: serving: " in sandbox.log(), "for its answer")


def test_a_daemon_that_never_comes_up_is_given_up(booted: Sandbox) -> None:
    """The last one here: the service is broken afterwards."""
    booted.path("/usr/bin/tierkv").write_text("#!/bin/sh\nexit 1\n")
    booted.systemctl("reset-failed", "tierkv")
    booted.attempt("systemctl", "restart", "tierkv")
    booted.wait_for(ActiveState="failed", SubState="failed")
    assert 5 <= int(booted.show("NRestarts")) <= 10
