"""The CPU kernel under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tierkv_kernels.cpu.build import build

ROOT = Path(__file__).parents[3]
WATCHED = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sanitized") / "library.so"
    build(path, *WATCHED)
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a process that has the sanitizers' runtime from its start."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    runtimes = [
        subprocess.check_output([*compiler, f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.cpu.sanitized", *arguments],
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


def test_nothing_beside_a_tensor_is_touched(library: Path) -> None:
    done = run(library)
    assert done.returncode == 0, done.stderr


def test_what_is_beside_a_tensor_is_watched(library: Path) -> None:
    done = run(library, "beside")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
