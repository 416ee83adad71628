"""How long the commands that people wait for take to start: ``python -m benchmarks.startup``.

Each line is the best and the median of some runs, of which the interpreter alone is the first. The
budget of a command that asks the daemon is 150 ms on an idle machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 15
COMMANDS = {
    "python": ["-c", "pass"],
    "click": ["-c", "import click"],
    "--help": ["-m", "tierkv", "--help"],
    "status": ["-m", "tierkv", "status", "--socket", "/nobody"],
    "stat": ["-m", "tierkv", "stat", "1", "1", "--socket", "/nobody"],
    "config show": ["-m", "tierkv", "config", "show"],
}


def seconds(arguments: list[str]) -> float:
    """One run from start to end."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    return time.perf_counter() - started


def main() -> None:
    """Measure all, in turns, so that a busy moment of the machine hits everyone alike."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, arguments in COMMANDS.items():
            found[name].append(seconds(arguments))
    for name, times in found.items():
        print(f"{name:12} {min(times) * 1e3:6.0f} ms  {statistics.median(times) * 1e3:6.0f} ms")


if __name__ == "__main__":
    main()
