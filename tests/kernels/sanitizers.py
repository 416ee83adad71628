"""Runs what was compiled with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_watched(
    compiler: Sequence[str], module: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run a module in a process that has the sanitizers' runtime from its start."""
    runtimes = [
        subprocess.check_output([*compiler, f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
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
