"""The CUDA kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.sim.build import ROOT, compiler

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler ($CXX, else g++)"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that has the sanitizers' runtime from its start."""
    command = compiler()
    assert command
    runtimes = [
        subprocess.check_output([*command, f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.sim.sanitized", *arguments],
        cwd=ROOT,
        env=dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(sys.path),
            LD_PRELOAD=":".join(runtimes),
            ASAN_OPTIONS="detect_leaks=0",
        ),
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_beside_a_tensor_is_touched() -> None:
    done = run()
    assert done.returncode == 0, done.stderr


def test_what_is_beside_a_tensor_is_watched() -> None:
    done = run("beside")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
