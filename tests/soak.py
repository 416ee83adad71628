"""``python -m tests.soak --minutes N [--seed S]``: the crash tests, for as long as one likes.

Rounds of real kills, power cuts, faults of the C library, and of the simulation, each with seeds
of its own; first of all every system call is swept in every durability. Each command is printed as
it can be run again. Ends with the first that fails, and with its exit code.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

ROUND_MINUTES = 6.0
"""How long one round takes, roughly; a shorter soak has one shorter round."""


@dataclass(frozen=True)
class Command:
    """Arguments of this Python, and variables that choose the run."""

    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        chosen = [f"{name}={value}" for name, value in self.variables.items()]
        return " ".join([*chosen, "python", *self.arguments])

    def run(self) -> int:
        """Run it here; its exit code."""
        environment = dict(os.environ, **self.variables)
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        return subprocess.run(
            [sys.executable, *self.arguments], env=environment, check=False
        ).returncode


def _pytest(path: str, **variables: object) -> Command:
    named = {f"TIERKV_CRASH_{name}": str(value) for name, value in variables.items()}
    return Command(("-m", "pytest", "-q", "--timeout=0", path), named)


def _rounds(minutes: float, seed: int) -> Iterator[Command]:
    """Commands without end."""
    chance = random.Random(seed)
    share = min(minutes, ROUND_MINUTES) / 5
    yield _pytest("tests/crash/test_every_syscall.py", SWEEP="full")
    yield _pytest("tests/crash/test_injected_errors.py", SWEEP="full")
    while True:
        one = chance.randrange(10**6)
        for durability in ("kill", "power"):
            torture = ("torture", "--minutes", f"{share / 2:.2f}", "--seed", str(one))
            yield Command(("-m", "tierkv", *torture, "--durability", durability))
        simulation = ("--seed", str(one), "--minutes", f"{2 * share:.2f}")
        yield Command(("-m", "tests.simulation", *simulation))
        cuts, kills = max(3, int(12 * share)), max(3, int(24 * share))
        yield _pytest("tests/crash/test_power_loss.py", SEED=one, CUTS=cuts)
        yield _pytest("tests/crash/test_kill_under_load.py", SEED=one, KILLS=kills)
        yield _pytest("tests/crash/test_random_libc_faults.py", SEED=one, ROUNDS=kills)


def main() -> int:
    """Run commands until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    ends = time.monotonic() + 60 * asked.minutes
    print(f"soaking for {asked.minutes:g} minutes with --seed {asked.seed}", flush=True)
    for command in _rounds(asked.minutes, asked.seed):
        if time.monotonic() > ends:
            break
        print(f"== {command}", flush=True)
        code = command.run()
        if code:
            print(f"== failed: {command}", flush=True)
            return code
    print("== nothing was lost, and nothing was wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
