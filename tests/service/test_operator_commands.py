"""The commands of operators against a real daemon: what they print, and how they end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, fill, press, sized, store, tokens
from tests.service.running import Daemon, environment, run_cli, running
from tierkv.core.prefix import chain_hashes

FAILED, USAGE, UNREACHABLE, DAMAGE, NOT_READY = 1, 2, 3, 4, 75
ACME = msgspec.structs.replace(SPEC, tenant="acme")
IDS, THEIRS = tokens(4, seed=1), tokens(2, seed=2)


@pytest.fixture
def stocked() -> Iterator[Daemon]:
    """Four blocks of nobody's and two of acme's."""
    with running(sized(16, 0, 60)) as daemon:
        with daemon.connect() as client:
            store(client.namespace(SPEC), IDS)
            store(client.namespace(ACME), THEIRS)
            client.flush()
        yield daemon


def tierkv(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments, extra={"TIERKV_SOCKET": str(daemon.socket)})


def said(daemon: Daemon, *arguments: str) -> str:
    done = tierkv(daemon, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def document(daemon: Daemon, *arguments: str) -> dict:
    return json.loads(said(daemon, *arguments, "--json"))


def name(ids: np.ndarray, block: int, spec=SPEC) -> str:
    return chain_hashes(spec.digest, ids, BLOCK)[block].tobytes().hex()


def found(daemon: Daemon, ids: np.ndarray, spec=SPEC) -> int:
    with daemon.connect() as client:
        return client.namespace(spec).lookup(ids).tokens // BLOCK


def test_lists(stocked: Daemon) -> None:
    assert said(stocked, "ls").splitlines()[0].split() == [
        "namespace", "tenant", "model", "dtype", "blocks", "in", "tiers", "size",
    ]  # fmt: skip
    tenants = document(stocked, "ls", "tenants")
    assert tenants["total"] == 2
    assert [(one["tenant"], one["blocks"]) for one in tenants["items"]] == [("", 4), ("acme", 2)]
    assert tenants["items"][1]["tiers"] == {"device": 2, "host": 0, "disk": 2}
    line = next(one for one in said(stocked, "ls", "tenants").splitlines() if "acme" in one)
    assert line.split()[:3] == ["acme", "1", "2"]

    chains = document(stocked, "ls", "chains")
    assert [one["hash"] for one in chains["items"]] == [name(IDS, 3), name(THEIRS, 1, ACME)]
    assert set(chains["items"][0]) == {
        "hash", "first", "namespace", "tenant", "blocks", "tokens", "bytes", "tiers",
        "references", "pinned",
    }  # fmt: skip
    table = said(stocked, "ls", "chains", "--tenant", "acme").splitlines()
    assert len(table) == 2
    assert table[1].split()[:5] == [name(THEIRS, 1, ACME)[:16], "1", "acme", "2", "32"]

    page = tierkv(stocked, "ls", "blocks", "--namespace", "0", "--limit", "3")
    assert len(page.stdout.splitlines()) == 4
    after = page.stderr.split("--after ")[1].strip()
    rest = said(stocked, "ls", "blocks", "--namespace", "0", "--limit", "3", "--after", after)
    assert len(rest.splitlines()) == 2

    with stocked.connect("engine-7") as client, fill(client.namespace(SPEC), IDS):
        (lease,) = document(stocked, "ls", "leases")["items"]
        assert (lease["worker"], lease["sequences"], lease["blocks"]) == ("engine-7", 1, 4)
        (sequence,) = document(stocked, "ls", "sequences")["items"]
        assert (sequence["state"], sequence["blocks"]) == ("active", 4)
        assert "engine-7" in said(stocked, "inspect", f"lease/{lease['lease']}")
        assert name(IDS, 0) in said(stocked, "inspect", f"sequence/{sequence['sequence']}")


def test_inspect(stocked: Daemon) -> None:
    block = document(stocked, "inspect", name(IDS, 2)[:10])
    assert block["tokens"] == IDS[2 * BLOCK : 3 * BLOCK].tolist()
    assert (block["depth"], block["references"], block["pinned"]) == (2, 0, False)
    assert name(IDS, 1) in said(stocked, "inspect", name(IDS, 2)[:10])
    spec = json.loads(document(stocked, "inspect", "namespace/1")["spec"])
    assert spec["tenant"] == "acme"
    done = tierkv(stocked, "inspect", "ffffffff")
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert "no cached block's hash begins with ffffffff" in done.stderr
    for wrong in ("cat/1", "lease/x"):
        assert tierkv(stocked, "inspect", wrong).returncode == USAGE


def test_pins(stocked: Daemon, tmp_path: Path) -> None:
    assert said(stocked, "pin", "--hash", name(IDS, 1)) == (
        "1 pin made, 2 blocks more: pins hold 2 blocks now\n"
    )
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*IDS.tolist(), 1, 2, 3]))
    assert document(stocked, "pin", "--namespace", "0", "--tokens", str(prompt)) == {
        "pins": 1, "blocks": 4, "change": 2,
    }  # fmt: skip
    pins = document(stocked, "ls", "pins")["items"]
    assert [(one["hash"], one["blocks"]) for one in pins] == [(name(IDS, 1), 2), (name(IDS, 3), 4)]
    with stocked.connect() as client:
        press(client, client.namespace(SPEC), 80, seed=100)
    assert found(stocked, IDS) == 4
    refused = tierkv(stocked, "delete", "--hash", name(IDS, 0), "--yes")
    assert refused.returncode == FAILED
    assert "are pinned: unpin them first" in refused.stderr
    assert said(stocked, "unpin", "--namespace", "0").startswith("2 pins removed, 4 blocks fewer")
    assert tierkv(stocked, "pin").returncode == USAGE
    assert tierkv(stocked, "pin", "--tokens", str(prompt)).returncode == USAGE
    prompt.write_text("1 2 3")
    short = tierkv(stocked, "pin", "--namespace", "0", "--tokens", str(prompt))
    assert "has 3 token ids; a block of namespace 0 has 16" in short.stderr


def test_deleting_asks_and_needs_yes_where_nobody_can_be_asked(stocked: Daemon) -> None:
    plan = said(stocked, "delete", "--hash", name(IDS, 1), "--dry-run")
    assert plan.startswith("would delete 3 blocks (24.0 KiB device, 36.0 KiB disk)")
    done = tierkv(stocked, "delete", "--hash", name(IDS, 1))
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert "this would delete 3 blocks" in done.stderr
    assert found(stocked, IDS) == 4
    assert _on_terminal(stocked, "n") == FAILED
    assert found(stocked, IDS) == 4
    assert _on_terminal(stocked, "y") == 0
    assert found(stocked, IDS) == 1
    assert document(stocked, "delete", "--tenant", "acme", "--yes") == {
        "blocks": 2, "bytes": {"device": 16384, "host": 0, "disk": 24576}, "in_use": 0,
        "pinned": 0, "done": True,
    }  # fmt: skip
    assert found(stocked, THEIRS, ACME) == 0
    assert tierkv(stocked, "delete", "--yes").returncode == USAGE


def _on_terminal(daemon: Daemon, answer: str) -> int:
    """The status of a deletion that a person is asked about."""
    master, slave = pty.openpty()
    try:
        command = [sys.executable, "-m", "tierkv", "delete", "--hash", name(IDS, 1)]
        extra = {"TIERKV_SOCKET": str(daemon.socket)}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        with subprocess.Popen(command, env=environment(extra), **streams) as process:
            os.write(master, f"{answer}\n".encode())
            return process.wait(30)
    finally:
        os.close(master)
        os.close(slave)


def test_export_import_and_warm(stocked: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "warm.tkv"
    assert said(stocked, "export", str(file)) == "6 blocks of 2 namespaces written\n"
    again = tierkv(stocked, "export", str(file))
    assert (again.returncode, again.stderr.count("--force")) == (FAILED, 1)
    piped = subprocess.run(
        [sys.executable, "-m", "tierkv", "export", "-", "--tenant", "acme"],
        env=environment({"TIERKV_SOCKET": str(stocked.socket)}),
        capture_output=True,
        check=True,
    )
    assert piped.stderr == b"2 blocks of 1 namespaces written\n"
    with running(sized(16, 0, 60)) as other:
        fed = subprocess.run(
            [sys.executable, "-m", "tierkv", "import", "-"],
            env=environment({"TIERKV_SOCKET": str(other.socket)}),
            input=piped.stdout,
            capture_output=True,
            check=True,
        )
        assert fed.stdout == b"2 blocks imported, 0 were cached\n"
        assert document(other, "import", str(file)) == {
            "namespaces": 2, "blocks": 4, "known": 2, "left": 0,
        }  # fmt: skip
        assert found(other, IDS) == 4
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
        damaged = tierkv(other, "import", str(file))
        assert damaged.returncode == DAMAGE
        assert f"{file} is damaged at byte " in damaged.stderr
        missing = tierkv(other, "import", str(tmp_path / "none"))
        assert missing.returncode == FAILED
        with other.connect() as client:
            client.flush()
        warmed = document(other, "warm")
        assert (warmed["were"], warmed["left"]) == (6, 0)
        said(other, "drain")
        drained = tierkv(other, "export", str(tmp_path / "late.tkv"))
        assert (drained.returncode, drained.stdout) == (NOT_READY, "")
        assert "the daemon is draining, so it takes no workers" in drained.stderr


def test_without_a_daemon(tmp_path: Path) -> None:
    for command in (
        ("ls", "chains"), ("inspect", "ab"), ("pin", "--hash", "ab"), ("warm",),
        ("delete", "--hash", "ab", "--yes"),
    ):  # fmt: skip
        done = run_cli(*command, "--socket", str(tmp_path / "nobody"))
        assert done.returncode == UNREACHABLE, done
        assert "no daemon serves on" in done.stderr
