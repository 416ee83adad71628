"""``python -m benchmarks [WORKLOAD ...]``: measure, print a line each, keep them as JSON."""

from __future__ import annotations

import argparse
import importlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.harness import Bench, Line

WORKLOADS = (
    "rpc",
    "lookup",
    "acquire",
    "put",
    "get",
    "spill",
    "wal",
    "durability",
    "recovery",
    "attention",
)
ROUNDS, ROUNDS_QUICK = 5, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    folder = Path(tempfile.mkdtemp(prefix="tierkv-bench-", dir=options.dir))
    bench = Bench(
        folder,
        quick=options.quick,
        rounds=ROUNDS_QUICK if options.quick else ROUNDS,
        profile=options.profile,
    )
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    # So that no daemon is left running: every ``with`` ends on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        machine = report.describe_machine(folder)
        document = report.document(lines, machine, quick=bench.quick, rounds=bench.rounds)
        print(report.main_line(document))
        for name in options.workloads or WORKLOADS:
            for line in importlib.import_module(f"benchmarks.{name}").run(bench):
                lines.append(line)
                print(report.render(line), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    saved = report.RESULTS / document.file_name if options.save else None
    for path in (options.json, saved):
        if path:
            report.save(document, path)
            print(f"written to {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds: a test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results/")
    parser.add_argument(
        "--dir", type=Path, help="measure the disk tier here (default: the temporary directory)"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="run the daemons under cProfile and keep what it finds; the numbers mean nothing then",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
