"""The CPU kernel under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from tierkv_kernels.cpu.build import build

from tests.kernels.sanitizers import run_watched

WATCHED = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sanitized") / "library.so"
    build(path, *WATCHED)
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    compiler = shlex.split(os.environ.get("CC") or "cc")
    return run_watched(compiler, "tests.kernels.cpu.sanitized", *arguments)


def test_nothing_beside_a_tensor_is_touched(library: Path) -> None:
    done = run(library)
    assert done.returncode == 0, done.stderr


def test_what_is_beside_a_tensor_is_watched(library: Path) -> None:
    done = run(library, "beside")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
