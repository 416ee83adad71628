"""``python -m benchmarks.peers``: the same work on tierkv and on its peers, on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tierkv
from benchmarks.peers import document, page
from benchmarks.peers.catalog import CEILING, OURS, PEERS, Peer
from benchmarks.peers.environments import Missing, default_cache, interpreter
from benchmarks.peers.plot import plot
from benchmarks.peers.session import Runner
from benchmarks.peers.suite import Suite
from tierkv.bench import report
from tierkv.bench.harness import Bench

ROUNDS, ROUNDS_QUICK = 5, 2
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "BENCHMARKS.md"
PICTURE = ROOT / "docs" / "peers.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.docs:
        _write_docs(document.load(options.docs))
        return 0
    wanted = _wanted(parser, options.only)
    folder = Path(tempfile.mkdtemp(prefix="peers-", dir=options.dir))
    rounds = ROUNDS_QUICK if options.quick else ROUNDS
    bench = Bench(folder, quick=options.quick, rounds=rounds)
    # So that no server is left running: every ``with`` ends on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        runners, missing = _runners(wanted, options.cache, options.infera)
        suite = Suite(bench, runners)
        suite.failures.update(missing)
        for name, reason in missing.items():
            print(f"{name}: not run: {reason}", flush=True)
        suite.run(lambda words: print(words, flush=True))
        found = document.Document(
            version=document.VERSION,
            tierkv=tierkv.__version__,
            quick=options.quick,
            rounds=rounds,
            machine=report.describe_machine(folder),
            placement=bench.two_cores.name,
            rows=suite.rows(),
            lines=suite.lines,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(page.text(found))
    if options.json:
        document.save(found, options.json)
    if options.out:
        document.save(found, options.out / "peers.json")
        (options.out / "peers.md").write_text(page.text(found))
        (options.out / "peers.svg").write_text(plot(found))
    return 0


def _wanted(parser: argparse.ArgumentParser, only: str) -> list[Peer]:
    names = [peer.name for peer in PEERS]
    asked = only.split(",") if only else names
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
    return [peer for peer in PEERS if peer.name in asked or peer.name in (CEILING, OURS)]


def _runners(
    wanted: Sequence[Peer], cache: Path, checkout: str
) -> tuple[list[Runner], dict[str, str]]:
    """Who may run, and why not who may not."""
    runners, missing = [], {}
    for peer in wanted:
        python, variables = Path(sys.executable), {}
        try:
            if peer.environment.checkout:
                if not checkout:
                    raise Missing("it is in no package: give a checkout by --infera PATH")
                variables["PYTHONPATH"] = os.pathsep.join(
                    [str(ROOT), str(Path(checkout).resolve())]
                )
            python = interpreter(peer.environment, cache)
        except Missing as reason:
            missing[peer.name] = str(reason)
        runners.append(Runner(peer, python, variables))
    return runners, missing


def _write_docs(found: document.Document) -> None:
    PAGE.write_text(page.replaced(PAGE.read_text(), found))
    PICTURE.write_text(plot(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help="these beside tierkv")
    parser.add_argument("--quick", action="store_true", help="small, two rounds: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="and JSON, table and plot there")
    parser.add_argument("--dir", type=Path, help="where peers have their files")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where the peers' virtual environments are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--infera",
        default=os.environ.get("INFERA_CHECKOUT", ""),
        metavar="PATH",
        help="a checkout of Infera, to measure its kvd (default: $INFERA_CHECKOUT)",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="only write the page's section from this result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
