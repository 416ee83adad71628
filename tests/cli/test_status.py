"""``tierkv status`` of a daemon that a stand-in answers for, and how tables are printed."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv.cli import ask as ask_module
from tierkv.cli import render, report
from tierkv.errors import NotReady, TierkvError, Unavailable
from tierkv.obs.status import (
    CheckpointStatus,
    ConfigStatus,
    EvictionStatus,
    HeldStatus,
    MemoryStatus,
    NamespaceStatus,
    PrefixStatus,
    ProblemStatus,
    ProgressStatus,
    RecoveryStatus,
    RoomStatus,
    StatusDocument,
    TierStatus,
    TopPrefixStatus,
    WalStatus,
    WorkerStatus,
    to_plain,
)
from tierkv.rpc.messages import Request, Stat, Status
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
        NamespaceStatus(
            id=1,
            model="m",
            dtype="bfloat16",
            block_tokens=16,
            block_bytes=2 << 20,
            tenant="search",
            blocks=1000,
            tiers={"device": HeldStatus(blocks=256, bytes=1 << 29)},
            lookup_tokens=400,
            hit_tokens=100,
        )
    ],
    tiers={
        "device": TierStatus(
            capacity_bytes=1 << 30, used_bytes=1 << 29, blocks=1000, free_ratio=0.5
        ),
        "disk": TierStatus(capacity_bytes=1 << 40, blocks=1194, state="failed", io="threads"),
    },
    memory={
        "device": MemoryStatus(
            memory_bytes=768 << 20,
            prefault="running",
            missing_bytes=256 << 20,
            huge_bytes=512 << 20,
            numa="node 0",
        ),
        "host": MemoryStatus(memory_bytes=1 << 20, prefault="done"),
    },
    connections=2,
    leases=2,
    in_flight=7,
    sequences=1003,
    workers=[
        WorkerStatus(lease=1, pid=4711, name="engine-0", sequences=1003),
        WorkerStatus(lease=2, pid=99),
    ],
    prefix=PrefixStatus(lookup_tokens=2000, hit_tokens=1500, hit_ratio=0.75),
    evicted=[
        EvictionStatus(
            from_tier="device", to_tier="host", reason="promotion", blocks=9, why="blocks came up"
        ),
        EvictionStatus(from_tier="disk", to_tier="none", reason="capacity", blocks=12),
    ],
    top_prefixes=[TopPrefixStatus(hash="0a" * 16, namespace=1, hits=3, hit_tokens=96)],
    only_in_ram_blocks=40,
    behind_blocks=7,
    wal=WalStatus(
        appended_lsn=90,
        written_lsn=90,
        durable_lsn=80,
        since_checkpoint_bytes=4096,
        bytes=8192,
        segments=1,
    ),
    room={"state": RoomStatus(path="/s", free_bytes=1 << 30, capacity_bytes=1 << 31)},
    problems=[
        ProblemStatus(
            time_s=1.8e9,
            level="warning",
            logger="x",
            message="the disk is slow",
            fields={"tier": "disk"},
            count=3,
        )
    ],
    recovery=RecoveryStatus(adopted_bytes={"device": 3 << 20, "host": 0}),
    checkpoint=CheckpointStatus(lsn=77, age_s=3.5),
)


EXPECTED = """\
tierkv 1.2.3 is serving, up 2 min 05 s (pid 99, epoch 4)

How full is each tier?
tier    capacity     used  free  blocks  evictable  state
device  1.00 GiB  512 MiB   50%   1,000          0  ok
disk    1.00 TiB      0 B  100%   1,194          0  out of service

Why were blocks evicted?
from    a copy is left in  blocks  reason
disk    none                   12  capacity
device  host                    9  promotion: blocks came up

Who uses most?
namespace  tenant  model  dtype        block  blocks   device  disk  hits
        1  search  m      bfloat16  2.00 MiB   1,000  512 MiB     -   25%

Who is connected?
lease   pid  worker    sequences
    1  4711  engine-0      1,003
    2    99  -                 0

Which prefixes are found most?
first block                       of      hits  tokens
0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a  search     3      96

Is the data safe?
what         now
durability   kill: all that was acknowledged survives the daemon's death
log lag      all written; all but 10 records on the drive
checkpoint   3.50 s ago, 4.00 KiB of log since
disk copies  40 blocks have none, 7 of them wait to be written
log          8.00 KiB written, 1 segments
recovery     0 blocks kept, 0 lost, 0 records in 0.00 us
room         1.00 GiB free for state in /s

What went wrong last?
ago         level    times  what
1 h 01 min  warning      3  the disk is slow tier=disk

Does it pay, and does it run well?
what           now
prefix hits    75% of the latest tokens
since start    1,500 of 2,000 tokens
found in       none yet
blocks         1,234, 0 pinned chains
workers        2 connected, 2 leases, 1,003 sequences, 6 requests wait
disk reads     threads
event loop     99.9% of turns within 0.00 us, the longest 0.00 us
configuration  as it was read last
memory         device 768 MiB (512 MiB in huge pages), 256 MiB to be taken, node 0, host 1.00 MiB
memory kept    device 3.00 MiB
native         no: there was no compiler
"""


class Daemon:
    """Answers in the place of a daemon, and notes where it was asked."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | Exception = to_plain(DOCUMENT)
        self.sockets: list[str] = []

    def ask(self, path: str, request: Request, timeout_s: float) -> Status:
        assert isinstance(request, Stat)
        assert 0 < timeout_s < 10
        self.sockets.append(path)
        if isinstance(self.answer, Exception):
            raise self.answer
        return Status(self.answer)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = Daemon()
    monkeypatch.setattr(ask_module, "ask", daemon.ask)
    return daemon


def test_json_is_the_daemons_document(tierkv: Run, daemon: Daemon) -> None:
    code, out, _ = tierkv("status", "--json", "--socket", "/s.sock")
    assert code == 0
    assert json.loads(out) == to_plain(DOCUMENT)
    assert daemon.sockets == ["/s.sock"]


def test_the_questions_of_a_newcomer_are_answered(tierkv: Run, daemon: Daemon) -> None:
    assert isinstance(daemon.answer, dict)
    daemon.answer["problems"][0]["time_s"] = time.time() - 3700
    code, out, _ = tierkv("status", "--socket", "/s.sock")
    assert code == 0
    assert out == EXPECTED


def test_a_daemon_that_does_not_serve_is_75(tierkv: Run, daemon: Daemon) -> None:
    daemon.answer = to_plain(
        StatusDocument(
            version="1",
            state="recovering",
            progress=ProgressStatus(
                what="reading slot headers", done=250, total=1000, elapsed_s=2.0
            ),
        )
    )
    code, out, _ = tierkv("status", "--socket", "/s.sock")
    assert code == 75
    assert out == (
        "tierkv 1 is recovering, up 0.00 us (pid 0, epoch 0)\n"
        "reading slot headers, 250 of 1,000 (25%), about 6.00 s left\n"
        "\n"
        "What went wrong last?\n"
        "Nothing since the start.\n"
    )
    daemon.answer = NotReady("the daemon is recovering")
    assert tierkv("status", "--socket", "/s") == (75, "", "tierkv: the daemon is recovering\n")


def test_nobody_knows_how_long_some_steps_take() -> None:
    progress = ProgressStatus(what="reading the index", elapsed_s=1.5)
    document = StatusDocument(version="1", state="recovering", progress=progress)
    assert report.progress_line(document) == "reading the index, 1.50 s"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            Unavailable("no daemon serves on /s.sock: No such file"),
            3,
            "no daemon serves on /s.sock: No such file; name another daemon's by --socket",
        ),
        (NotReady("the daemon does not answer yet"), 75, "the daemon does not answer yet"),
    ],
)
def test_no_daemon(tierkv: Run, daemon: Daemon, error: TierkvError, code: int, said: str) -> None:
    daemon.answer = error
    assert tierkv("status", "--socket", "/s.sock") == (code, "", f"tierkv: {said}\n")


def test_a_status_that_is_not_understood(tierkv: Run, daemon: Daemon) -> None:
    daemon.answer = {"version": 1}
    code, _, err = tierkv("status", "--socket", "/s.sock")
    assert code == 1
    assert err.startswith("tierkv: the daemon's status is not understood: Expected `str`")


def test_a_store_without_disk_and_a_log_without_lag() -> None:
    document = StatusDocument(version="1", state="serving")
    document.tiers["disk"].state = "off"
    (safety,) = [one for one in report.sections(document) if one.title == "Is the data safe?"]
    told = {row[0]: row[1] for row in safety.rows}
    assert told["disk copies"] == "no disk tier: blocks live in RAM only"
    assert told["log lag"] == "all written; all on the drive"
    assert told["checkpoint"] == "none yet"
    document.tiers["disk"].state = "ok"
    (safety,) = [one for one in report.sections(document) if one.title == "Is the data safe?"]
    assert {row[0]: row[1] for row in safety.rows}["disk copies"] == "every block has one"


def test_a_configuration_that_does_not_hold_is_said() -> None:
    def told(**fields: Any) -> str:
        document = StatusDocument(version="1", state="serving", config=ConfigStatus(**fields))
        (rest,) = [one for one in report.sections(document) if "run well" in one.title]
        return {row[0]: row[1] for row in rest.rows}["configuration"]

    assert told() == "as it was read last"
    assert told(ok=False, error="bad") == "could not be read anew, the one before holds: bad"
    assert told(needs_restart=["a.b"]) == "changed, but a restart is needed for a.b"


def test_those_who_use_most_come_first() -> None:
    def namespace(number: int, size: int) -> NamespaceStatus:
        tiers = {"disk": HeldStatus(blocks=1, bytes=size)}
        return NamespaceStatus(
            id=number, model="m", dtype="", block_tokens=1, block_bytes=1, tiers=tiers
        )

    document = StatusDocument(
        version="1", state="serving", namespaces=[namespace(k, 10 * k) for k in range(30)]
    )
    (users,) = [one for one in report.sections(document) if one.title == "Who uses most?"]
    assert [row[0] for row in users.rows] == [str(k) for k in range(29, 19, -1)]


def test_watch_goes_with_no_other_form(tierkv: Run) -> None:
    assert tierkv("status", "--watch", "--json")[0] == 2
    assert "goes with neither --last nor --json" in tierkv("status", "--watch", "--last")[2]


def test_the_socket_is_the_configurations_else_the_systems(
    tierkv: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, system = tmp_path / "own.sock", tmp_path / "system.sock"
    monkeypatch.setattr(ask_module, "SYSTEM_SOCKET", str(system))
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


def test_a_narrow_terminal_breaks_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdout", Terminal())
    row = ("a reason in words", "1,234,567", "12.5 MiB", "engine-7")
    render.print_table(("why", "blocks", "size", "worker"), [row], numbers=("blocks", "size"))
    drawn = sys.stdout.getvalue()  # type: ignore[attr-defined]  # it is the Terminal above
    assert all(whole in drawn for whole in ("reason", "1,234,567", "12.5 MiB", "engine-7"))


def test_a_long_name_keeps_both_ends() -> None:
    assert render.clipped("m" * 64) == "m" * 64
    long = "/srv/models/" + "x" * 3000 + "/llama-70b"
    assert len(render.clipped(long)) <= 64
    assert render.clipped(long).startswith("/srv/models/x")
    assert render.clipped(long).endswith("x/llama-70b")


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


def test_names_that_others_choose_cannot_take_the_terminal_over(
    tierkv: Run, daemon: Daemon
) -> None:
    document = StatusDocument(version="1", state="serving")
    document.workers = [WorkerStatus(lease=1, pid=1, name="a\x1b[2J\r\nb")]
    daemon.answer = to_plain(document)
    _, out, _ = tierkv("status", "--socket", "/s")
    assert "a?[2J??b" in out
    assert "\x1b" not in out


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
