"""What operators ask of a running daemon: who may, draining, reloading."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import tierkv
from tests.service.blocks import SPEC, check, fill, tokens
from tests.service.raw import Peer
from tests.service.running import Daemon, environment, run_cli, running, until
from tests.service.test_who_may_connect import STRANGER_UID, as_user
from tierkv import aio
from tierkv.cli.exit_codes import Exit
from tierkv.errors import ConfigError, NotReady, TierkvError, Unavailable
from tierkv.rpc import messages as m


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[tuple[Daemon, Path]]:
    """A daemon with a configuration file, which settings of the harness override."""
    file = tmp_path / "tierkv.toml"
    file.write_text("")
    with running(extra={"TIERKV_CONFIG": str(file)}) as daemon:
        yield daemon, file


def operator(daemon: Daemon) -> tierkv.Client:
    return tierkv.connect(daemon.socket, timeout_s=10, name="operator", lease=False)


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_changes_are_granted_to_those_whom_the_configuration_lists() -> None:
    def ask(daemon: Daemon, uid: int) -> str:
        group = daemon.socket.stat().st_gid
        return as_user(uid, group, lambda: _code(Peer(daemon).hello().ask(m.Drain(undo=True))))

    with running({"server.operator_uids": f"{STRANGER_UID}"}) as daemon:
        daemon.folder.chmod(0o755)
        assert ask(daemon, STRANGER_UID) == "draining"
        assert ask(daemon, STRANGER_UID + 1) == "not_permitted"


CHANGES = (
    m.Drain(),
    m.Drain(undo=True),
    m.Drain(look=True),
    m.Reload(),
    m.Pin(m.Selector(namespace=0)),
    m.Pin(m.Selector(namespace=0), undo=True),
    m.Delete(m.Selector(namespace=0)),
    m.Delete(m.Selector(namespace=0), really=True),
    m.Warm(m.Selector(namespace=0)),
)
LOOKS = (
    m.List("leases", m.Selector()),
    m.Inspect("namespace", 0),
    m.Contents(m.Selector()),
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_worker_may_look_at_everything_and_change_nothing() -> None:
    assert {type(one) for one in (*CHANGES, *LOOKS)} == set(get_args(m.OperatorRequest))

    def ask(peer: Peer) -> str:
        return " ".join(_code(peer.ask(one)) for one in (*CHANGES, *LOOKS))

    with running() as daemon:
        daemon.folder.chmod(0o755)
        with daemon.connect() as client:
            sequence = fill(client.namespace(SPEC), tokens(2, seed=1))
            group = daemon.socket.stat().st_gid
            said = as_user(STRANGER_UID, group, lambda: ask(Peer(daemon).hello()))
            assert said == " ".join(
                ["not_permitted"] * len(CHANGES) + ["listed", "inspected", "content"]
            )
            assert client.stat()["state"] == "serving"
            check(client.namespace(SPEC), sequence)


def _code(reply: m.Message) -> str:
    return reply.code if isinstance(reply, m.Failure) else str(reply.__struct_config__.tag)


def test_without_a_lease_one_may_look_but_hold_nothing(daemon: Daemon, bystander: None) -> None:
    leases = daemon.status()["leases"]
    with operator(daemon) as client:
        namespace = client.namespace(SPEC)
        assert namespace.lookup(tokens(3, seed=1)).tokens == len(tokens(3, seed=1))
        assert client.stat()["leases"] == leases
        assert client.ping()
        with pytest.raises(tierkv.errors.InvalidArgument, match="without a lease"):
            namespace.begin(tokens(3, seed=1))


# --- draining -------------------------------------------------------------------------------------


def test_a_drain_refuses_new_leases_and_keeps_the_old_ones() -> None:
    with running() as daemon, daemon.connect() as client, operator(daemon) as op:
        namespace = client.namespace(SPEC)
        sequence = fill(namespace, tokens(3, seed=1))
        assert op.drain().drains
        assert daemon.get("/readyz") == (503, "draining\n")
        with pytest.raises(Unavailable) as refused:
            tierkv.connect(daemon.socket, timeout_s=0.1)
        assert isinstance(refused.value.__cause__, NotReady)
        with operator(daemon) as another:
            assert another.stat()["state"] == "draining"
        sequence.reserve(1)
        check(namespace, sequence)
        client.close()
        until(lambda: op.drain().leases == 0, "for the lease to end")
        assert not op.drain(undo=True).drains
        assert daemon.get("/readyz") == (200, "serving\n")
        daemon.connect().close()


def test_who_waits_for_a_drain_does_not_keep_others_from_undoing_it() -> None:
    with running() as daemon, daemon.connect(), operator(daemon) as op:
        command = [sys.executable, "-m", "tierkv", "drain", "--wait", "--socket", daemon.socket]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) as waiting:
            until(lambda: op.stat()["state"] == "draining", "for the drain")
            assert not op.drain(undo=True).drains
            said = waiting.communicate(timeout=30)[1].decode()
        assert waiting.returncode == Exit.NOT_READY
        assert "takes new workers again" in said
        assert op.stat()["state"] == "serving"


def test_a_worker_of_a_draining_daemon_may_come_back() -> None:
    with running() as daemon, daemon.connect() as client, operator(daemon) as op:
        sequence = fill(client.namespace(SPEC), tokens(3, seed=1))
        op.drain()
        token = client._core._token
        with Peer(daemon) as peer:
            welcome = peer.want(m.Hello(m.PROTOCOL_VERSION, token=token), m.Welcome)
        assert welcome.resumed
        assert len(welcome.sequences) == 1
        assert not sequence.lost


def test_a_drain_writes_what_is_only_in_ram() -> None:
    with running({"disk.write": "demote"}) as daemon, daemon.connect() as client:
        fill(client.namespace(SPEC), tokens(3, seed=1))
        assert daemon.status()["tiers"]["disk"]["blocks"] == 0
        with operator(daemon) as op:
            op.drain()
            until(lambda: op.drain().unwritten == 0, "for the blocks to be written")
            assert daemon.status()["tiers"]["disk"]["blocks"] == 3


def test_a_draining_daemon_stops_as_any(tmp_path: Path) -> None:
    with running() as daemon:
        with operator(daemon) as op:
            op.drain()
        assert daemon.stop() == 0, daemon.said()


# --- reloading ------------------------------------------------------------------------------------


def test_a_reload_takes_over_what_is_live_and_tells_what_is_not(
    configured: tuple[Daemon, Path],
) -> None:
    daemon, file = configured
    file.write_text(
        '[log]\nlevel = "debug"\n[server]\nconnections_max = 2\n[attend]\nthreads = 2\n'
    )
    with operator(daemon) as op:
        found = op.reload()
        assert found.changed == ["server.connections_max", "log.level"]
        assert found.needs_restart == ["attend.threads"]
        assert op.reload().changed == []
        assert op.reload().needs_restart == ["attend.threads"]
        with operator(daemon), pytest.raises(tierkv.errors.LimitExceeded):
            operator(daemon)
        assert op.stat()["config"]["needs_restart"] == ["attend.threads"]


def test_those_who_read_a_setting_once_hear_of_it_too(configured: tuple[Daemon, Path]) -> None:
    daemon, file = configured
    with operator(daemon) as op, daemon.connect() as client:
        namespace = client.namespace(SPEC)
        first = namespace.begin(tokens(1, seed=1))
        file.write_text("[server]\nsequences_max = 1\n")
        assert op.reload().changed == ["server.sequences_max"]
        with pytest.raises(tierkv.errors.LimitExceeded, match="may hold 1 sequences"):
            namespace.begin(tokens(1, seed=2))
        first.end()


def test_a_file_that_is_no_configuration_at_all_is_survived(
    configured: tuple[Daemon, Path],
) -> None:
    daemon, file = configured
    file.write_text("a = " + "[" * 5000)
    with operator(daemon) as op:
        with pytest.raises(ConfigError, match="correct the file's syntax"):
            op.reload()
        assert not op.stat()["config"]["ok"]


def test_a_bad_configuration_changes_nothing(configured: tuple[Daemon, Path]) -> None:
    daemon, file = configured
    file.write_text('[log]\nlevel = "debug"\nlevels = 3\n')
    with operator(daemon) as op:
        with pytest.raises(ConfigError, match=r"log.levels: unknown key .*tierkv.toml:3"):
            op.reload()
        found = op.stat()["config"]
        assert not found["ok"]
        assert "log.levels" in found["error"]
        file.write_text("")
        assert op.reload().changed == []
        assert op.stat()["config"]["ok"]
        assert op.stat()["config"]["error"] == ""
        # What went wrong is still told, though the log's form was set up anew.
        assert any("not reloaded" in one["message"] for one in op.stat()["problems"])


def test_sighup_reloads(configured: tuple[Daemon, Path]) -> None:
    daemon, file = configured
    file.write_text('[log]\nlevel = "debug"\n')
    daemon.signal(signal.SIGHUP)
    until(lambda: "changed=log.level" in daemon.said(), "for the reload")


def run(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    done = run_cli(*arguments, extra={"TIERKV_SOCKET": str(daemon.socket)})
    return done.returncode, done.stdout, done.stderr


def test_the_commands(configured: tuple[Daemon, Path]) -> None:
    daemon, file = configured
    file.write_text('[log]\nlevel = "debug"\n[attend]\nthreads = 2\n')
    assert run(daemon, "reload") == (
        0,
        "changed: log.level\nchanged, but needs a restart: attend.threads\n",
        "",
    )
    file.write_text("[log]\nlevels = 3\n")
    code, out, err = run(daemon, "reload", "--json")
    assert (code, out) == (78, "")
    assert "log.levels: unknown key" in err
    with daemon.connect() as client:
        fill(client.namespace(SPEC), tokens(3, seed=1))
        code, out, _ = run(daemon, "drain")
        assert code == 0
        assert out.startswith("the daemon drains: 1 lease is held, ")
    code, out, _ = run(daemon, "drain", "--wait", "--json")
    assert code == 0
    assert json.loads(out) == {"drains": True, "leases": 0, "unwritten": 0, "writing": False}
    assert run(daemon, "status")[0] == 75
    assert run(daemon, "drain", "--undo") == (0, "the daemon takes new workers\n", "")
    assert run(daemon, "drain", "--undo", "--wait")[0] == 2
    assert run(daemon, "drain", "--socket", "/none")[0] == 3


async def _by_asyncio(daemon: Daemon) -> None:
    async with aio.connect(daemon.socket, lease=False) as op:
        assert (await op.drain()).drains
        assert not (await op.drain(undo=True)).drains
        assert (await op.reload()).changed == []


@pytest.mark.asyncio
async def test_the_asyncio_client_operates_too(daemon: Daemon) -> None:
    try:
        await _by_asyncio(daemon)
    except TierkvError:
        with operator(daemon) as op:
            op.drain(undo=True)
        raise
