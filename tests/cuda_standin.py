"""Builds the stand-in for the CUDA driver, alone or with simulated kernels."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SIMULATOR = Path(__file__).parents[1] / "kernels/sim"
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def build_standin(library: Path, *more: str | Path, flags: Sequence[str] = ()) -> Path:
    """Compile it, with more sources or objects. Skips the test where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which builds the stand-in for the CUDA driver")
    sources = (SIMULATOR / "libcuda_standin.cc", *more)
    command = ["g++", *FLAGS, *flags, "-o", str(library), *map(str, sources)]
    subprocess.run(command, check=True)
    return library
