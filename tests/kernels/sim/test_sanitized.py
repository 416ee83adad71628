"""The CUDA kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess

import pytest

from tests.kernels.sanitizers import run_watched
from tests.kernels.sim.build import compiler

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler ($CXX, else g++)"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = compiler()
    assert command
    return run_watched(command, "tests.kernels.sim.sanitized", *arguments)


def test_nothing_beside_a_tensor_is_touched() -> None:
    done = run()
    assert done.returncode == 0, done.stderr


def test_what_is_beside_a_tensor_is_watched() -> None:
    done = run("beside")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
