"""The whole daemon on machines that crash: what was acknowledged is there, and nothing else.

TIERKV_SIMULATION_SEED and TIERKV_SIMULATION_RUNS choose the seeds; ``python -m tests.simulation``
runs as many as one likes and explains a violation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.ledger import Violation
from tests.simulation.plan import VERBS, make_plan, shrink
from tests.simulation.run import Looks, run
from tierkv.service.journal import Journal

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("TIERKV_SIMULATION_SEED", "20251"))
RUNS = int(os.environ.get("TIERKV_SIMULATION_RUNS", "400"))
PROCESSES = 2


@pytest.fixture(scope="module")
def totals() -> Counter[str]:
    """What all seeds have seen; fails with the explanation of the first violation."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    share = -(-RUNS // PROCESSES)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "error", "-m", "tests.simulation", "--json"),
                *("--seed", str(SEED + at * share), "--runs", str(share)),
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for at in range(PROCESSES)
    ]
    totals: Counter[str] = Counter()
    for process in processes:
        said, _ = process.communicate()
        assert process.returncode == 0, said
        totals.update(json.loads(said))
    print(f"TIERKV_SIMULATION_SEED={SEED} TIERKV_SIMULATION_RUNS={RUNS}: {dict(totals)}")
    return totals


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_crash_loses_what_was_promised_or_serves_a_wrong_byte(totals: Counter[str]) -> None:
    assert totals["images"] >= 25 * RUNS
    assert totals["images"] + totals["log images"] >= 125 * RUNS
    assert totals["double crashes"] >= 5 * RUNS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_runs_have_been_everywhere(totals: Counter[str]) -> None:
    """A simulation that tests nothing must not pass."""
    for what in (
        *VERBS,
        *(
            "blocks hit",
            "blocks stored",
            "ended by kill",
            "ended by power",
            "images lived on",
            "faults",
        ),
        *("log died", "tier_failed", "refused to start", "pool_exhausted"),
        *("segments removed", "power losses"),
    ):
        assert totals[what] > 0, what


def test_a_seed_is_one_history() -> None:
    plan = make_plan(SEED)
    first, second = run(plan), run(plan)
    assert first.calls == second.calls
    assert first.ledger.happened == second.ledger.happened
    assert len(first.calls) > 100


@pytest.mark.slow
def test_a_failing_plan_shrinks_to_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(journal: Journal, synced: bool) -> int:
        return journal._writer.appended_lsn

    monkeypatch.setattr(Journal, "_acked_lsn", too_early)
    looks = Looks(images=0.2)
    failing = (make_plan(seed, faults=False) for seed in range(100))
    plan = next(one for one in failing if run(one, looks).kinds)
    kinds = run(plan, looks).kinds

    smaller = shrink(plan, lambda one: run(one, looks).kinds == kinds)

    assert run(smaller, looks).kinds == kinds == {Violation.LOST}
    assert sum(len(life.steps) for life in smaller.lives) <= 3
