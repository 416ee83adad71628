"""The ceilings in C: small programs that are compiled on the spot, where there is a compiler.

They are package data, in ``c/``. Their source says what each prints.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tierkv.bench.harness import F64, Bench

SOURCES = Path(__file__).parent / "c"


def compiler() -> str | None:
    """Name of a C compiler on the path."""
    return next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


@functools.cache
def program(folder: Path, name: str) -> str | None:
    """Path of ``c/NAME.c``, compiled into ``folder``; None without a compiler."""
    command = compiler()
    if command is None:
        return None
    made, source = folder / f"ceiling-{name}", SOURCES / f"{name}.c"
    optimised = [command, "-O3", "-march=native", "-pthread", "-o", str(made), str(source), "-ldl"]
    subprocess.run(optimised, check=True)
    return str(made)


def nanoseconds(bench: Bench, cpu: int, command: Sequence[str]) -> F64:
    """Seconds of each piece of work, from a program that prints them as u64 nanoseconds.

    Raises RuntimeError if it fails.
    """
    process = bench.spawn(cpu, command, stdout=subprocess.PIPE)
    spent = process.communicate()[0]
    if bench.reap(process):
        raise RuntimeError(f"{Path(command[0]).name} failed")
    return np.frombuffer(spent, np.uint64) / 1e9
