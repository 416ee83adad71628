"""Breaks the rules of crash safety one by one, and expects somebody to notice each time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.__main__ import NOTICED, SURVIVED
from tests.mutants.catalog import CONTROLS, MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PROCESSES = 2
HUNT_S = 240.0


def _hunt(mutant: Mutant) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", mutant.name],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HUNT_S,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def hunts() -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """All of them at once, as many as there are cores."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        yield {one.name: pool.submit(_hunt, one) for one in (*MUTANTS, *CONTROLS)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [one.name for one in MUTANTS])
def test_the_mutant_is_noticed(name: str, hunts: dict[str, Future[tuple[int, str]]]) -> None:
    code, said = hunts[name].result()
    assert code == NOTICED, said
    print(f"{name}: {said.strip().splitlines()[-1]}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [one.name for one in CONTROLS])
def test_what_is_not_broken_is_not_accused(
    name: str, hunts: dict[str, Future[tuple[int, str]]]
) -> None:
    code, said = hunts[name].result()
    assert code == SURVIVED, said
