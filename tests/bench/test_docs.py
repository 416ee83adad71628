"""The run that docs/BENCHMARKS.md shows is the one whose result lies beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.bench.docs import BEGIN, END, replaced
from tierkv.bench.report import from_json

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "BENCHMARKS.md").read_text()
RESULT = from_json((ROOT / "benchmarks" / "results" / "0.1.0-2cpu-full.json").read_bytes())


def test_the_page_shows_the_result() -> None:
    assert replaced(PAGE, RESULT) == PAGE, "run python -m tierkv.bench.docs with the result's file"


def test_every_line_and_whether_it_reaches_its_bars_is_in_the_table() -> None:
    shown = PAGE.partition(BEGIN)[2].partition(END)[0].splitlines()
    for line in RESULT.lines:
        (row,) = [row for row in shown if row.startswith(f"| `{line.name}` | ")]
        assert row.count("**below**") == sum(not one.holds for one in line.bars)


def test_a_page_without_its_marks_is_refused() -> None:
    for mark in (BEGIN, END):
        with pytest.raises(ValueError, match="lacks"):
            replaced(PAGE.replace(mark, ""), RESULT)
