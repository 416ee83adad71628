"""``tierkv status`` against a stand-in client, and how tables are printed."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tierkv.cli import render
from tierkv.cli import status as status_module
from tierkv.errors import NotReady, Unavailable
from tierkv.obs.status import (
    CheckpointStatus,
    MemoryStatus,
    NamespaceStatus,
    PrefixStatus,
    RecoveryStatus,
    StatusDocument,
    TierStatus,
    WorkerStatus,
    to_plain,
)
from tierkv.service.last_status import write_last_status

Run = Callable[..., tuple[int, str, str]]

DOCUMENT = StatusDocument(
    version="1.2.3",
    state="serving",
    epoch=4,
    pid=99,
    uptime_s=125.0,
    native_missing="there was no compiler",
    blocks=1234,
    namespaces=[
        NamespaceStatus(id=1, model="m", dtype="bfloat16", block_tokens=16, block_bytes=2 << 20)
    ],
    tiers={
        "device": TierStatus(
            capacity_bytes=1 << 30, used_bytes=1 << 29, blocks=1000, free_ratio=0.5
        )
    },
    memory={
        "device": MemoryStatus(
            memory_bytes=768 << 20,
            prefault="running",
            missing_bytes=256 << 20,
            huge_bytes=512 << 20,
            numa="interleave 0,1",
        ),
        "host": MemoryStatus(memory_bytes=1 << 20, prefault="done"),
    },
    connections=2,
    leases=2,
    sequences=1003,
    workers=[
        WorkerStatus(lease=1, pid=4711, name="engine-0", sequences=1003),
        WorkerStatus(lease=2, pid=99),
    ],
    prefix=PrefixStatus(lookup_tokens=2000, hit_tokens=1500, hit_ratio=0.75),
    evictions={"device>host": 12},
    recovery=RecoveryStatus(adopted_bytes={"device": 3 << 20, "host": 0}),
    checkpoint=CheckpointStatus(lsn=77, age_s=3.5),
)


class Daemon:
    """What the stand-in client finds, and the sockets it was asked to connect to."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | Exception = to_plain(DOCUMENT)
        self.sockets: list[str] = []

    @contextmanager
    def connect(self, socket: str, *, timeout_s: float) -> Iterator[Daemon]:
        assert 0 < timeout_s < 10
        self.sockets.append(socket)
        yield self

    def stat(self) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = Daemon()
    client = ModuleType("tierkv.client.sync")
    client.connect = daemon.connect  # type: ignore[attr-defined]  # a module made for this test
    monkeypatch.setitem(sys.modules, "tierkv.client.sync", client)
    return daemon


def test_json_is_the_daemons_document(tierkv: Run, daemon: Daemon) -> None:
    code, out, _ = tierkv("status", "--json", "--socket", "/s.sock")
    assert code == 0
    assert json.loads(out) == to_plain(DOCUMENT)
    assert daemon.sockets == ["/s.sock"]


def test_tables_for_people(tierkv: Run, daemon: Daemon) -> None:
    code, out, _ = tierkv("status", "--socket", "/s.sock")
    assert code == 0
    assert out == (
        "tierkv 1.2.3 is serving, up 2 min 05 s (pid 99, epoch 4, durability kill)\n"
        "\n"
        "tier    capacity     used  free  blocks  evictable  state\n"
        "device  1.00 GiB  512 MiB   50%   1,000          0  ok\n"
        "\n"
        "namespace  model  dtype     block tokens  block size\n"
        "        1  m      bfloat16            16    2.00 MiB\n"
        "\n"
        "lease   pid  worker    sequences\n"
        "    1  4711  engine-0      1,003\n"
        "    2    99                    0\n"
        "\n"
        "what         now\n"
        "prefix hits  75% of the latest tokens\n"
        "since start  1,500 of 2,000 tokens\n"
        "blocks       1,234\n"
        "workers      2 connected, 2 leases, 1,003 sequences\n"
        "evictions    device>host 12\n"
        "disk reads   no disk tier\n"
        "log          0 B in 0 segments, lsn 0 written, 0 durable\n"
        "checkpoint   3.50 s ago at lsn 77\n"
        "event loop   99.9% of turns within 0.00 us, the longest 0.00 us\n"
        "recovery     0 blocks kept, 0 lost, 0 records in 0.00 us\n"
        "memory       device 768 MiB (512 MiB in huge pages), 256 MiB to be taken, interleave 0,1, "
        "host 1.00 MiB\n"
        "memory kept  device 3.00 MiB\n"
        "native       no: there was no compiler\n"
    )


def test_a_daemon_that_does_not_serve_is_75(tierkv: Run, daemon: Daemon) -> None:
    daemon.answer = to_plain(StatusDocument(version="1", state="recovering"))
    code, out, _ = tierkv("status", "--socket", "/s.sock")
    assert code == 75
    assert "is recovering" in out
    assert "none yet" in out
    daemon.answer = NotReady("the daemon is recovering")
    assert tierkv("status", "--socket", "/s") == (75, "", "tierkv: the daemon is recovering\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unavailable("no daemon serves on /s.sock"), "no daemon serves on /s.sock"),
        (FileNotFoundError(2, "No such file"), "/s.sock: No such file"),
    ],
)
def test_no_daemon_is_3(tierkv: Run, daemon: Daemon, error: Exception, said: str) -> None:
    daemon.answer = error
    code, out, err = tierkv("status", "--socket", "/s.sock")
    assert (code, out) == (3, "")
    assert err == f"tierkv: {said}; name another daemon's socket by --socket\n"


def test_a_status_that_is_not_understood(tierkv: Run, daemon: Daemon) -> None:
    daemon.answer = {"version": 1}
    code, _, err = tierkv("status", "--socket", "/s.sock")
    assert code == 1
    assert err.startswith("tierkv: the daemon's status is not understood: Expected `str`")


def test_the_socket_is_the_configurations_else_the_systems(
    tierkv: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, system = tmp_path / "own.sock", tmp_path / "system.sock"
    monkeypatch.setattr(status_module, "SYSTEM_SOCKET", str(system))
    monkeypatch.setenv("TIERKV_SERVER__SOCKET", str(own))
    tierkv("status")
    system.touch()
    tierkv("status")
    own.touch()
    tierkv("status")
    assert daemon.sockets == [str(own), str(system), str(own)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    render.print_table(("name", "size"), [("[bold]", "12")], numbers=("size",))
    drawn = sys.stdout.getvalue()  # type: ignore[attr-defined]  # it is the Terminal above
    assert "[bold]" in drawn
    assert "─" in drawn


def test_a_terminal_without_colour_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    render.print_table(("name", "size"), [("a", "12")])
    assert "\x1b[3" not in sys.stdout.getvalue()  # type: ignore[attr-defined]  # see above


def test_plain_tables_are_aligned_and_never_wrap() -> None:
    wide = "x" * 300
    table = render.plain_table(("a", "count"), [(wide, "1"), ("y", "1000")], numbers=("count",))
    header, first, second = table.splitlines()
    assert header == "a" + " " * 299 + "  count"
    assert first == wide + "      1"
    assert second == "y" + " " * 299 + "   1000"


def test_the_last_status_of_a_daemon_that_is_gone(
    tierkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_SERVER__STATE_DIR", str(tmp_path))
    code, _, problem = tierkv("status", "--last")
    assert code == 3
    assert "no daemon has written its status" in problem
    asyncio.run(write_last_status(tmp_path, DOCUMENT))
    assert not list(tmp_path.glob("*.tmp"))
    code, out, note = tierkv("status", "--last", "--json")
    assert code == 0
    assert json.loads(out) == to_plain(DOCUMENT)
    assert note.startswith("written ")


def test_the_last_status_is_of_the_past(
    tierkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_SERVER__STATE_DIR", str(tmp_path))
    asyncio.run(write_last_status(tmp_path, DOCUMENT))
    assert tierkv("status", "--last")[1].startswith("tierkv 1.2.3 was serving")


def test_the_socket_that_workers_are_told_is_asked(
    tierkv: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_SERVER__SOCKET", "/configured.sock")
    monkeypatch.setenv("TIERKV_SOCKET", "/told.sock")
    tierkv("status")
    tierkv("status", "--socket", "/named.sock")
    assert daemon.sockets == ["/told.sock", "/named.sock"]
