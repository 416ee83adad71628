"""``python -m tests.simulation``: runs seeds of the simulation, for as long as asked.

A violation is printed with its seed and a smaller plan that shows it as well; the exit code is 1.
``--json`` prints the totals in one line, for whoever adds them up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.simulation.log_images import run_log
from tests.simulation.plan import Plan, make_plan, shrink
from tests.simulation.run import Looks, run

CLOSELY = Looks(images=0.5)
"""Seeds without faults: every image is looked at with the strictest eye."""

BROADLY = Looks(images=0.1)
"""Seeds with faults: more histories rather than more images of each."""

LOG_RUNS = 1
"""Runs of the log alone for each run of the whole daemon."""


def main() -> int:
    """Run what the command line asks for."""
    asked = _parser().parse_args()
    totals: Counter[str] = Counter()
    started = time.monotonic()
    for seed in _seeds(asked, started):
        code = _try(seed, asked.log_runs, totals)
        if code:
            return code
    if asked.json:
        print(json.dumps(totals))
    else:
        print(f"seeds {asked.seed} and on, {time.monotonic() - started:.0f} s")
        for name, count in totals.most_common():
            print(f"{count:>10,} {name}")
    return 0


def _try(seed: int, log_runs: int, totals: Counter[str]) -> int:
    """One seed: with faults if it is odd."""
    has_faults = bool(seed % 2)
    plan, looks = make_plan(seed, faults=has_faults), BROADLY if has_faults else CLOSELY
    result = run(plan, looks)
    totals.update(result.ledger.happened)
    totals["runs"] += 1
    if result.ledger.violations:
        _explain(seed, plan, looks)
        return 1
    for at in range(log_runs):
        log = run_log(seed * log_runs + at)
        totals.update(log.happened)
        if log.violations:
            print(f"seed {seed * log_runs + at} of the log: {log.violations[0]}")
            return 1
    return 0


def _explain(seed: int, plan: Plan, looks: Looks) -> None:
    """Say what went wrong, and with how little."""
    found = run(plan, looks)
    print(f"seed {seed}: {found.ledger.violations[0]}")
    smaller = shrink(plan, lambda one: bool(run(one, looks).kinds & found.kinds))
    print(f"also shown by run({smaller!r}, {looks!r}):")
    print(run(smaller, looks).ledger.violations[0])


def _seeds(asked: argparse.Namespace, started: float) -> Iterator[int]:
    seed = asked.seed
    while True:
        if asked.minutes is None and seed >= asked.seed + asked.runs:
            return
        if asked.minutes is not None and time.monotonic() - started > 60 * asked.minutes:
            return
        yield seed
        seed += 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=100, help="how many seeds")
    parser.add_argument("--minutes", type=float, help="for how long, instead of --runs")
    parser.add_argument("--log-runs", type=int, default=LOG_RUNS, help="of the log, for each seed")
    parser.add_argument("--json", action="store_true", help="totals as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
