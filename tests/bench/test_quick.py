"""Every workload runs end to end, small. Nothing is asserted on speed."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tierkv.bench.__main__ import ROUNDS_QUICK, WORKLOADS

from tierkv.bench import report
from tierkv.bench.harness import ROOT, child_environment

PAGE = (ROOT / "docs" / "BENCHMARKS.md").read_text()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_quick_run_measures_and_cleans_up(workload: str, tmp_path: Path) -> None:
    folder, result = tmp_path / "measured", tmp_path / "result.json"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks", "--quick", workload]
    command += ["--dir", str(folder), "--json", str(result)]

    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    found = report.load(result)
    assert found.quick
    assert found.lines
    for line in found.lines:
        assert line.name.startswith(workload)
        assert report.render(line) in done.stdout
        assert len(line.rounds) == ROUNDS_QUICK
        assert line.references, f"{line.name} is held against nothing"
        for one in line.references:
            assert 0 < one.speed_min <= one.speed <= one.speed_max < math.inf
    assert not list(folder.iterdir()), "files were left behind"


def test_an_unknown_workload_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "benchmarks", "rcp"]

    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "rcp" in done.stderr


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_page_describes_every_workload(workload: str) -> None:
    assert f"`{workload}." in PAGE
