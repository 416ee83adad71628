"""The same work on tierkv and its peers. Nothing is asserted on speed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.peers import document, page
from benchmarks.peers.__main__ import PAGE, PICTURE, ROOT
from benchmarks.peers.catalog import CEILING, OURS, PEERS, Environment, Peer
from benchmarks.peers.content import U8, Content
from benchmarks.peers.document import Crash, Document, Row
from benchmarks.peers.drivers.base import Place
from benchmarks.peers.drivers.numpy_copy import NumpyCopy
from benchmarks.peers.environments import Missing, interpreter
from benchmarks.peers.plot import plot
from benchmarks.peers.session import Runner
from benchmarks.peers.suite import Suite
from benchmarks.peers.worker import Work
from tierkv.bench.harness import Bench, Line, Reference, child_environment
from tierkv.bench.report import describe_machine

STORED = ROOT / "benchmarks" / "results" / "peers-0.1.0-2cpu.json"


def a_quick_run(tmp_path: Path, only: str, *more: str) -> Document:
    """``--quick`` of these, from outside; nothing may be left behind."""
    folder, result = tmp_path / "measured", tmp_path / "result.json"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--only", only, *more]
    command += ["--dir", str(folder), "--json", str(result), "--out", str(tmp_path / "out")]

    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "files were left behind"
    found = document.load(result)
    assert page.text(found) in done.stdout
    assert (tmp_path / "out" / "peers.md").read_text() == page.text(found)
    assert (tmp_path / "out" / "peers.svg").read_text() == plot(found)
    return found


def survivors(found: Document) -> dict[str, set[int]]:
    """How many of its blocks each peer kept; none may be wrong."""
    crashes = {row.name: row.crash for row in found.rows if row.crash is not None}
    assert all(crash.wrong == 0 for crash in crashes.values())
    return {name: {crash.blocks - each for each in crash.found} for name, crash in crashes.items()}


def assert_measured(found: Document, *names: str) -> None:
    for name in names:
        for measure in ("put.64k", "get.64k", "get1.64k.p99", "exists.64", "fill.64k"):
            line = found.line(name, measure)
            assert line is not None, f"{name} lacks {measure}"
            assert line.value > 0
            assert len(line.rounds) == 2
            if name != CEILING:
                assert page.against(line, CEILING) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_of_what_needs_nothing(tmp_path: Path) -> None:
    libraries = ["lmdb", "lmdb-nosync", "lmdb-writemap"]
    asked = [*libraries, "tierkv-power", "infera-kvd"]

    found = a_quick_run(tmp_path, ",".join(asked))

    assert_measured(found, CEILING, OURS, "tierkv-power", *libraries)
    lost = survivors(found)
    assert lost.pop(CEILING) == {64}
    assert lost == {name: {0} for name in (OURS, "tierkv-power", *libraries)}
    infera = next(row for row in found.rows if row.name == "infera-kvd")
    assert "--infera PATH" in infera.not_run
    assert f"not run: {infera.not_run}" in page.text(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_of_debian_servers(tmp_path: Path) -> None:
    for program in ("redis-server", "memcached"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    servers = ["redis", "redis-aof-always", "memcached"]

    found = a_quick_run(tmp_path, ",".join(servers), "--cache", str(tmp_path / "cache"))

    assert_measured(found, CEILING, OURS, *servers)
    lost = survivors(found)
    assert (lost["redis"], lost["memcached"]) == ({64}, {64})
    assert lost["redis-aof-always"] == {0}


def test_an_unknown_peer_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--only", "rediss"]

    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "rediss" in done.stderr


# --- content --------------------------------------------------------------------------------------


def some_content() -> tuple[Content, U8]:
    content = Content(np.zeros((4, 128), np.uint8))
    return content, content.stamped(0, 4).copy()


def test_content_comes_back_as_it_was_put() -> None:
    content, put = some_content()

    assert content.wrong(range(4), put) == 0


@pytest.mark.parametrize("byte", [0, 8, 127])
def test_one_wrong_byte_is_a_wrong_block(byte: int) -> None:
    content, put = some_content()
    put[2, byte] ^= 1

    assert content.wrong(range(4), put) == 1


def test_a_block_that_was_there_before_is_wrong() -> None:
    content, put = some_content()

    assert content.wrong([4, 1, 2, 3], put) == 1


def test_blocks_in_another_order_are_wrong() -> None:
    content, put = some_content()

    assert content.wrong(range(4), put[[1, 0, 2, 3]]) == 2


# --- the user's process ---------------------------------------------------------------------------


class Rotten(NumpyCopy):
    """Gives back a byte that nobody put."""

    def get(self, keys: Any, out: U8) -> list[bool]:
        found = super().get(keys, out)
        out[-1, -1] ^= 1
        return found


class Forgetful(NumpyCopy):
    """Acknowledges what it does not keep."""

    def put(self, keys: Any, blocks: U8) -> None:
        super().put(keys[1:], blocks[1:])


def some_work(tmp_path: Path, driver: type[NumpyCopy]) -> Work:
    work = Work(driver(Place(tmp_path, tmp_path, 0, 1 << 20, 4096)), batch_blocks=8, sources=2)
    work.start()
    return work


def test_work_times_each_batch_and_each_block(tmp_path: Path) -> None:
    work = some_work(tmp_path, NumpyCopy)

    assert len(work.put(3)["seconds"]) == 3
    assert len(work.get()["seconds"]) == 3
    assert len(work.put_ones(5)["seconds"]) == 5
    assert len(work.get_ones(2)["seconds"]) == 10
    work.put_chain(16)
    assert len(work.exists(16, 4)["seconds"]) == 4


@pytest.mark.parametrize(
    ("driver", "words"), [(Rotten, "1 of 8 blocks came back wrong"), (Forgetful, "1 of 8")]
)
def test_a_peer_that_does_not_give_back_what_was_put_is_out(
    tmp_path: Path, driver: type[NumpyCopy], words: str
) -> None:
    work = some_work(tmp_path, driver)
    work.put(1)

    with pytest.raises(RuntimeError, match=words):
        work.get()


def test_exists_is_checked_too(tmp_path: Path) -> None:
    work = some_work(tmp_path, Forgetful)
    work.put_chain(16)

    with pytest.raises(RuntimeError, match="15 of 16"):
        work.exists(16, 1)


def test_survivors_are_counted_and_looked_at(tmp_path: Path) -> None:
    work, forgetful = some_work(tmp_path, Rotten), some_work(tmp_path, Forgetful)
    for each in (work, forgetful):
        each.put(2)
        each._next = 0  # as the user's next process would begin

    assert work.survivors(2) == {"found": 16, "wrong": 2, "first_hit": None}
    assert forgetful.survivors(2) == {"found": 14, "wrong": 0, "first_hit": None}


# --- the suite ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_peer_that_fails_is_a_row_and_not_the_end(tmp_path: Path) -> None:
    ceiling = next(peer for peer in PEERS if peer.name == CEILING)
    broken = Peer("broken", "has no options", "lmdb_store:Lmdb", "nothing")
    runners = [Runner(peer, Path(sys.executable), {}) for peer in (ceiling, broken)]
    heard: list[str] = []

    suite = Suite(Bench(tmp_path, quick=True, rounds=2), runners)
    suite.run(heard.append)

    rows = {row.name: row for row in suite.rows()}
    assert "KeyError" in rows["broken"].not_run
    assert rows[CEILING].not_run == ""
    assert {line.name.partition(".")[0] for line in suite.lines} == {CEILING}
    assert any(words.startswith("broken: not run") for words in heard)
    assert not suite.bench.children


# --- environments ---------------------------------------------------------------------------------


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    program = Environment("x", programs=("no-such-program",), package="some-package")
    library = Environment("x", libraries=("no-such-library.so",), package="some-package")

    with pytest.raises(Missing, match=r"no-such-program is not on PATH .*some-package"):
        interpreter(program, tmp_path)
    with pytest.raises(Missing, match=r"no-such-library\.so .*some-package"):
        interpreter(library, tmp_path)


def test_no_steps_need_no_environment(tmp_path: Path) -> None:
    assert interpreter(Environment(), tmp_path) == Path(sys.executable)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_environment_is_made_once_and_an_install_that_fails_says_why(tmp_path: Path) -> None:
    nothing = Environment("nothing", (("--no-index", "pip"),))
    impossible = Environment("impossible", (("--no-index", "no-such-distribution"),))

    made = interpreter(nothing, tmp_path)
    mark = made.parents[1] / ".ready"
    before = mark.stat().st_mtime_ns

    assert interpreter(nothing, tmp_path) == made
    assert mark.stat().st_mtime_ns == before
    assert made.parents[1] != ROOT
    with pytest.raises(Missing, match="no-such-distribution"):
        interpreter(impossible, tmp_path)


# --- table and plot -------------------------------------------------------------------------------


def a_line(name: str, value: float, of_copy: float, of_ours: float) -> Line:
    against = [Reference(CEILING, 10.0, of_copy, of_copy, of_copy)]
    if not name.startswith(f"{OURS}."):
        against.append(Reference(OURS, 5.0, of_ours, of_ours, of_ours))
    return Line(name, "GB/s", value, [value], against, "two cores", 0.5)


def a_document(tmp_path: Path) -> Document:
    kept, lost = Crash(256, [256, 256], 0, 0.5), Crash(256, [0, 128], 1, None)
    rows = [
        Row(OURS, "ours", "kill -9", True, True, "1", crash=kept),
        Row("fast", "a library", "nothing", False, False, "2 | 3", crash=lost),
        Row("gone", "a server", "power loss", False, True, not_run="no such program"),
    ]
    lines = [
        a_line(f"{OURS}.put.64k", 5.0, 0.5, 0),
        a_line("fast.put.64k", 20.0, 2.0, 4.0),
        a_line(f"{OURS}.put.1024k", 7.0, 0.7, 0),
        a_line("fast.put.1024k", 7.2, 0.72, 1.03),
    ]
    machine = describe_machine(tmp_path)
    return Document(document.VERSION, "0", False, 5, machine, "two cores", rows, lines)


def test_the_table_says_who_is_ahead_and_by_how_much(tmp_path: Path) -> None:
    words = page.text(a_document(tmp_path))

    assert r"- `put.64k`: fast\* 4.00x" in words
    assert "`put.1024k`" not in words.partition("behind")[2], "3 % is noise"
    assert "| **tierkv** | 0.50 | 0.70 |" in words
    assert "| kill -9 | tierkv 7.00 |" in words
    assert "| power loss | nobody |" in words


def test_the_table_says_what_a_kill_left_and_who_did_not_run(tmp_path: Path) -> None:
    words = page.text(a_document(tmp_path))

    assert "| **tierkv** | kill -9 | 100 % | 0 | 500 ms |" in words
    assert "| fast | nothing | 0 % to 50 % | 1 | never |" in words
    assert "| gone | not run: no such program | a server |" in words
    assert "2 \\| 3" in words, "a version must not end its cell"


def test_nowhere_behind_is_said_too(tmp_path: Path) -> None:
    found = msgspec.structs.replace(a_document(tmp_path), lines=[])

    assert "nowhere in this run" in page.text(found)


def test_bars_of_the_plot_are_as_long_as_the_ratio_and_end_at_a_copy(tmp_path: Path) -> None:
    root = ElementTree.fromstring(plot(a_document(tmp_path)))

    space = "{http://www.w3.org/2000/svg}"
    bars = [one for one in root.iter(f"{space}rect") if one.get("height") == "12"]
    assert [float(bar.get("width", "")) for bar in bars] == [75.0, 150.0, 105.0, 108.0]
    words = [one.text for one in root.iter(f"{space}text")]
    assert "2.00" in words
    assert "gone" not in words


def test_the_page_has_room_for_a_run_or_says_so(tmp_path: Path) -> None:
    found = a_document(tmp_path)

    once = page.replaced(f"# x\n{page.BEGIN}\nold\n{page.END}\nrest\n", found)

    assert once.startswith(f"# x\n{page.BEGIN}\n")
    assert once.endswith(f"{page.END}\nrest\n")
    assert "old" not in once
    assert page.replaced(once, found) == once
    with pytest.raises(ValueError, match="lacks"):
        page.replaced("# x\n", found)


def test_the_page_and_the_picture_are_those_of_the_stored_run() -> None:
    found = document.load(STORED)

    assert page.replaced(PAGE.read_text(), found) == PAGE.read_text()
    assert plot(found) == PICTURE.read_text()


def test_the_stored_run_is_a_full_one_of_all_peers() -> None:
    found = document.load(STORED)

    assert not found.quick
    assert [row.name for row in found.rows] == [peer.name for peer in PEERS]
