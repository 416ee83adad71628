"""``tierkv status`` and ``tierkv verify`` against a live daemon and against what one left."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

from tests.service.blocks import SPEC, fill, payloads, store, tokens
from tests.service.running import Daemon, run_cli, running, until
from tierkv.cli.main import main

UNREACHABLE, DAMAGE, NOT_READY = 3, 4, 75


# --- status ---------------------------------------------------------------------------------------


def test_status_as_a_table(daemon: Daemon, ns) -> None:
    with fill(ns, tokens(4, seed=950)):
        done = run_cli("status", extra={"TIERKV_SERVER__SOCKET": str(daemon.socket)})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tierkv 0.1.0 is serving, up ")
    assert f"(pid {daemon.pid}, epoch 1)" in done.stdout
    assert "durability   kill: " in done.stdout
    lines: dict[str, list[str]] = {}
    for line in filter(None, done.stdout.splitlines()):
        lines.setdefault(line.split()[0], line.split())
    assert lines["tier"] == ["tier", "capacity", "used", "free", "blocks", "evictable", "state"]
    assert lines["device"][1:3] == ["8.00", "MiB"]
    assert lines["host"][1:3] == ["4.00", "MiB"]
    assert lines["disk"][-1] == "ok"
    assert "1 sequences" in done.stdout
    assert "no daemon" not in done.stdout


def test_status_as_json(daemon: Daemon) -> None:
    done = run_cli("status", "--json", "--socket", str(daemon.socket))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["pid"] == daemon.pid
    assert document["state"] == "serving"
    assert document["socket"] == str(daemon.socket)


def test_status_without_a_daemon(tmp_path: Path) -> None:
    done = run_cli("status", "--socket", str(tmp_path / "nobody"))
    assert (done.returncode, done.stdout) == (UNREACHABLE, "")
    assert f"no daemon serves on {tmp_path / 'nobody'}: " in done.stderr
    assert "tierkv serve" in done.stderr


def test_status_of_a_daemon_that_does_not_serve_yet(daemon: Daemon) -> None:
    """It listens but does not answer, as while it recovers."""
    daemon.signal(signal.SIGSTOP)
    try:
        done = run_cli("status", "--socket", str(daemon.socket))
    finally:
        daemon.signal(signal.SIGCONT)
    assert (done.returncode, done.stdout) == (NOT_READY, "")
    assert "try again" in done.stderr


# --- verify ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store_of_40(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon that was killed with 40 blocks on disk, and records behind its checkpoint."""
    with running() as daemon:
        with daemon.connect() as client:
            ns = client.namespace(SPEC)
            store(ns, tokens(30, seed=960))
            client.flush()
            for k in range(10):
                store(ns, tokens(1, seed=961 + k))
            until(lambda: client.stat()["tiers"]["disk"]["blocks"] == 40, "for all to be on disk")
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        yield daemon


def digests(folder: Path) -> dict[str, str]:
    """Everything in the store but what locks it."""
    return {
        str(path.relative_to(folder)): xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("LOCK", "lock.mdb")
    }


def verify(daemon: Daemon, *options: str) -> tuple[int, dict]:
    """Exit status and report; the store is the same as before."""
    before = digests(daemon.state)
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = main(["verify", "--json", *daemon.flags, *options])
    assert digests(daemon.state) == before
    return status, json.loads(printed.getvalue())


def test_verify_refuses_while_the_daemon_runs(daemon: Daemon, bystander) -> None:
    done = run_cli("verify", *daemon.flags)
    assert (done.returncode, done.stdout) == (NOT_READY, "")
    assert "in use by another tierkv process" in done.stderr


def test_verify_says_that_there_is_no_store(tmp_path: Path) -> None:
    done = run_cli("verify", "--state-dir", str(tmp_path / "mistyped"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no store is in {tmp_path / 'mistyped'}" in done.stderr
    assert not (tmp_path / "mistyped").exists()


def test_a_sound_store(store_of_40: Daemon) -> None:
    for options in ((), ("--deep",)):
        status, report = verify(store_of_40, *options)
        assert status == 0
        assert report["findings"] == []
        assert report["blocks"] == 40
        assert report["records"] > 0
        assert report["wal_end"] == "clean"
        assert report["slots_checked"] == 40
        assert report["slots_damaged"] == 0
    done = run_cli("verify", "--state-dir", str(store_of_40.state))
    assert done.returncode == 0
    assert "sound" in done.stdout


class Damage:
    """Changes one byte of a file, and puts it back."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def flip(self) -> None:
        with self.path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, self.at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), self.at)

    def __enter__(self) -> None:
        self.flip()

    def __exit__(self, *exc: object) -> None:
        self.flip()


def test_a_damaged_payload_is_found_by_a_deep_look(store_of_40: Daemon) -> None:
    (segment,) = store_of_40.state.joinpath("data").glob("*.seg")
    payload = payloads(SPEC, tokens(30, seed=960))[17].tobytes()
    with Damage(segment, segment.read_bytes().index(payload) + 4000):
        assert verify(store_of_40)[0] == 0
        status, report = verify(store_of_40, "--deep")
        assert status == DAMAGE
        assert report["slots_damaged"] == 1
        (finding,) = report["findings"]
        assert "is damaged" in finding
        done = run_cli("verify", "--deep", *store_of_40.flags)
        assert done.returncode == DAMAGE
        assert finding in done.stdout
        assert "1 finding\n" in done.stdout
    assert verify(store_of_40, "--deep")[0] == 0


def test_a_damaged_header(store_of_40: Daemon) -> None:
    (segment,) = store_of_40.state.joinpath("data").glob("*.seg")
    with Damage(segment, 40):
        status, report = verify(store_of_40)
        assert (status, report["slots_damaged"]) == (DAMAGE, 1)


def test_a_damaged_log(store_of_40: Daemon) -> None:
    logs = sorted(store_of_40.state.joinpath("wal").glob("*.wal"))
    # Behind the segment's header and not in the last frame.
    with Damage(logs[-1], 4096 + 200):
        status, report = verify(store_of_40)
        assert status == DAMAGE, report
        assert any(str(logs[-1]) in finding for finding in report["findings"])


def test_a_damaged_format_file(store_of_40: Daemon) -> None:
    with Damage(store_of_40.state / "FORMAT", 30):
        status, report = verify(store_of_40)
        assert status == DAMAGE
        assert "FORMAT is damaged" in report["findings"][0]


def test_a_lost_index(store_of_40: Daemon) -> None:
    for path in store_of_40.state.joinpath("index").glob("*.mdb"):
        path.unlink()
    printed = run_cli("verify", *store_of_40.flags)
    assert printed.returncode == DAMAGE
    assert "it was lost" in printed.stdout
    assert "tierkv verify --repair" in printed.stdout
    printed = run_cli("verify", "--repair", *store_of_40.flags)
    assert printed.returncode == 0
    assert "made anew from the slots" in printed.stdout
    assert "1 finding, put right" in printed.stdout
    assert verify(store_of_40, "--deep")[0] == 0


def test_a_damaged_payload_is_put_right(store_of_40: Daemon) -> None:
    """It is a block of no prompt that is asked for below."""
    (segment,) = store_of_40.state.joinpath("data").glob("*.seg")
    payload = payloads(SPEC, tokens(1, seed=970))[0].tobytes()
    at = segment.read_bytes().find(payload)
    assert at > 0
    Damage(segment, at).flip()
    assert verify(store_of_40, "--deep")[0] == DAMAGE
    done = run_cli("verify", "--deep", "--repair", "--json", *store_of_40.flags)
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["slots_damaged"], report["repaired"]) == (1, True)
    assert verify(store_of_40, "--deep")[0] == 0


def test_afterwards_the_daemon_starts_with_all_of_it(store_of_40: Daemon) -> None:
    store_of_40.start()
    with store_of_40.connect() as client:
        ns = client.namespace(SPEC)
        assert ns.lookup(tokens(30, seed=960)).tokens == len(tokens(30, seed=960))
    assert store_of_40.stop() == 0
    assert verify(store_of_40, "--deep")[0] == 0
