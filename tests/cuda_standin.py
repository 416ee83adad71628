"""Builds the stand-in for the CUDA driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"
SOURCE = KERNELS / "sim/libcuda_standin.cc"
INCLUDES = f"-I{KERNELS / 'tierkv_kernels/cuda/src'}"
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared")


def build_standin(library: Path) -> Path:
    """Compile it. Skips the test where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which builds the stand-in for the CUDA driver")
    subprocess.run(["g++", *FLAGS, INCLUDES, "-o", str(library), str(SOURCE)], check=True)
    return library
