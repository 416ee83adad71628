"""``tierkv bench`` as people start it, small: every workload ends, and the page explains its lines.

Nothing is asserted on speed. That blocks have the right bytes is asserted by the workloads.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.daemon import SHM, python_environment
from tierkv.bench import report, suite
from tierkv.bench.report import Document
from tierkv.cli.bench import WORKLOADS
from tierkv.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "BENCHMARKS.md").read_text(encoding="utf-8")
WAIT_S = 170.0
"""Longest wait for a workload; only a failing test reaches it."""

PLACEHOLDERS = {
    "N": r"\d+",
    "M": r"\d+",
    "R": r"\d+",
    "K": r"\d+[km]",
    "MODE": "none|kill|power",
    "xW": r"x\d+",
    "OP": "lookup|begin|append",
    "TYPE": "fp32|bf16|fp16|fp8",
    "LAYOUT": "nhd|hnd",
}
"""What stands for what in the names of the page's lines."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for benchmarks, in which nothing must stay."""
    place = tmp_path / "place"
    place.mkdir()
    yield place
    assert list(place.iterdir()) == [], "files were left behind"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tierkv", "bench", *arguments],
        env=python_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a command said, once it has ended and left neither process nor memory."""
    out, err = process.communicate(timeout=WAIT_S)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(SHM.glob(f"tierkv-bench-{process.pid}-*")) == [], "memory was left behind"
    return out, err


def explained(workload: str) -> dict[str, str]:
    """A workload's lines on the page, by name, and what the cell of the bar says."""
    section = PAGE.split("\n## The lines\n")[1].split("\n## ")[0]
    found = {}
    for row in re.findall(rf"^\| `{workload}\..*\|$", section, re.MULTILINE):
        name, _, _, bar = re.split(r"\s*\|\s*", row)[1:-1]
        found[name.strip("`")] = bar
    return found


def pattern(name: str) -> str:
    """What the name of a line on the page stands for, as a regular expression."""
    parts = [PLACEHOLDERS.get(part, part) for part in name.split(".")]
    return r"\.".join(f"(?:{part})" for part in parts)


@pytest.mark.slow
@pytest.mark.timeout(WAIT_S + 10)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_quick_run_measures_as_the_page_says(workload: str, place: Path) -> None:
    with start(workload, "--quick", "--rounds", "1", "--json", "--dir", str(place)) as process:
        out, err = end(process)

    assert process.returncode == 0, err
    found = report.from_json(out.encode())
    assert found.quick
    assert found.rounds == 1
    check_lines(workload, found)
    for line in found.lines:
        assert report.render(line) in err


def check_lines(workload: str, found: Document) -> None:
    """Each line is whole and on the page, and the page has no others of this workload."""
    rows = explained(workload)
    seen = set()
    for line in found.lines:
        assert len(line.rounds) == found.rounds
        assert line.references or line.bars, f"{line.name} is held against nothing"
        for one in line.references:
            assert 0 < one.speed_min <= one.speed <= one.speed_max < math.inf
        fitting = [name for name in rows if re.fullmatch(pattern(name), line.name)]
        assert len(fitting) == 1, f"{line.name} is not on the page, or twice: {fitting}"
        seen.add(fitting[0])
        for verdict in line.bars:
            for number in re.findall(r"(?<=[<>]= )[\d.]+", verdict.bar):
                assert number in rows[fitting[0]].replace(",", ""), f"{line.name}: {verdict.bar}"
    assert seen == set(rows), "the page has lines that nobody measures"


def test_the_command_knows_the_workloads_there_are() -> None:
    assert list(WORKLOADS) == list(suite.WORKLOADS)


@pytest.mark.slow
def test_lines_for_people_are_plain_text(place: Path) -> None:
    with start("rpc", "--quick", "--rounds", "2", "--dir", str(place)) as process:
        out, err = end(process)

    assert process.returncode == 0, err
    first, *lines = out.splitlines()
    assert first.startswith("tierkv ")
    assert "median of 2 rounds" in first
    assert [line.split()[0] for line in lines][:2] == ["rpc.null.p50", "rpc.null.p99"]
    assert "\x1b" not in out + err
    assert re.search(r"(ok|below): [\d.]+ \(<= 1\.6 times as long as ", lines[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_daemons(place: Path, number: signal.Signals) -> None:
    arguments = ("rpc", "growth", "--rounds", "1000", "--quick", "--dir", str(place))
    with start(*arguments) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        _, err = end(process)

    assert process.returncode == 1
    assert err.strip().endswith("tierkv: interrupted")


def test_an_unknown_workload_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rcp"]) == 2
    assert "rcp" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    assert main(["bench", "rpc", "--dir", str(tmp_path / "file" / "below")]) == 78
    assert "--dir" in capsys.readouterr().err


def test_help_says_what_to_type_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("tierkv bench all") < out.index("Options:")
    for workload in WORKLOADS:
        assert re.search(rf"^ +{workload} +\w", out, re.MULTILINE), workload
