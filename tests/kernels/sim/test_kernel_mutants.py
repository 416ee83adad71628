"""Each mistake planted in the CUDA sources is noticed, and a harmless change is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.sim.build import ROOT, compiler
from tests.kernels.sim.mutants import CONTROLS, MUTANTS, SURVIVED

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler ($CXX, else g++)"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What noticed each of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sim.mutants"],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [one.name for one in MUTANTS])
def test_the_mistake_is_noticed(name: str, found: dict[str, str]) -> None:
    assert found[name] != SURVIVED


@pytest.mark.parametrize("name", [one.name for one in CONTROLS])
def test_what_is_not_broken_is_not_accused(name: str, found: dict[str, str]) -> None:
    assert found[name] == SURVIVED
