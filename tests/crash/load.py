"""Workers that keep a daemon busy through its deaths, and what the daemon owes them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Self

from tests.crash.daemon import ROOT, Daemon, python_environment
from tests.crash.pattern import SPECS, prompt, wrong_token
from tierkv.client.sync import Client

PAUSE_S = 60.0
"""Longest wait for workers; only a failing test reaches it."""


@dataclass(frozen=True)
class Promise:
    """A chain of full blocks that was acknowledged, at a time of the monotonic clock."""

    model: str
    choices: tuple[int, ...]
    blocks: int
    at: float


class Load:
    """Worker processes on one daemon. A context manager: none is left running."""

    def __init__(self, daemon: Daemon, seed: int, workers: int) -> None:
        self._daemon = daemon
        self._folder = daemon.folder / "load"
        self._folder.mkdir()
        self._seed = seed
        self._started = 0
        self._workers = [self._new_worker() for _ in range(workers)]
        self.done: Counter[str] = Counter()

    def check_workers(self) -> None:
        """Fail if a worker has ended: none does before it is told to, unless it saw a fault."""
        for worker in self._workers:
            if worker.poll() is not None:
                raise AssertionError(f"a worker ended: {self._error(worker)}")

    def replace_worker(self, index: int) -> None:
        """kill -9 one worker and start another in its place."""
        worker = self._workers[index]
        _end(worker)
        (self._folder / f"paused-{worker.pid}").unlink(missing_ok=True)
        self._workers[index] = self._new_worker()

    def pause(self) -> None:
        """Return when all workers have suspended what they hold and wait."""
        (self._folder / "pause").touch()
        deadline = time.monotonic() + PAUSE_S
        while not all((self._folder / f"paused-{w.pid}").exists() for w in self._workers):
            self.check_workers()
            assert time.monotonic() < deadline, "the workers do not pause"
            time.sleep(0.005)

    def go_on(self) -> None:
        """Let paused workers work."""
        (self._folder / "pause").unlink()

    def stop(self) -> None:
        """End all workers; ``done`` then says what those that were never killed did."""
        (self._folder / "stop").touch()
        (self._folder / "pause").unlink(missing_ok=True)
        for worker in self._workers:
            output, _ = worker.communicate(timeout=PAUSE_S)
            assert worker.returncode == 0, f"a worker failed: {self._error(worker)}"
            self.done.update(json.loads(output))
        self._workers = []

    def promises(self) -> list[Promise]:
        """Every acknowledged chain, the longest on its way if all were acknowledged at once."""
        found = []
        for path in sorted(self._folder.glob("acks-*")):
            # A line cut short by the worker's own death was acknowledged to nobody.
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    ack = json.loads(line)
                    found.append(
                        Promise(ack["model"], tuple(ack["choices"]), ack["blocks"], ack["at"])
                    )
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            _end(worker)

    def _new_worker(self) -> subprocess.Popen[bytes]:
        self._started += 1
        seed = self._seed * 1000 + self._started
        errors = self._folder / f"errors-{self._started}"
        with errors.open("wb") as stderr:
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.crash.worker"),
                    *(self._daemon.socket, str(self._folder), str(seed), str(self._seed)),
                ],
                cwd=ROOT,
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        errors.rename(self._folder / f"errors-of-{worker.pid}")
        return worker

    def _error(self, worker: subprocess.Popen[bytes]) -> str:
        errors = self._folder / f"errors-of-{worker.pid}"
        return f"exit code {worker.returncode}\n{errors.read_text()}"


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.communicate()


def longest(tree: int, promises: list[Promise]) -> list[tuple[str, list[int]]]:
    """The promised chains, as model and tokens, without those that another one contains."""
    chains = set()
    block_tokens = {spec.model: spec.block_tokens for spec in SPECS}
    for promise in promises:
        tokens = prompt(tree, promise.choices)[: promise.blocks * block_tokens[promise.model]]
        chains.add((promise.model, tuple(tokens)))
    kept = []
    # Sorted, a prefix comes right before the first chain that continues it.
    ordered = sorted(chains)
    for one, following in zip(ordered, [*ordered[1:], None], strict=True):
        covered = (
            following is not None
            and following[0] == one[0]
            and following[1][: len(one[1])] == one[1]
        )
        if not covered:
            kept.append((one[0], list(one[1])))
    return kept


def check_bytes(client: Client, chains: list[tuple[str, list[int]]], *, whole: bool) -> None:
    """Every byte found of the chains must be right; and all of them found, if ``whole``."""
    namespaces = {spec.model: client.namespace(spec) for spec in SPECS}
    for model, tokens in chains:
        namespace = namespaces[model]
        with namespace.begin(tokens, keep=0) as sequence:
            assert sequence.num_tokens == len(tokens) or not whole, (
                f"{model}: {sequence.num_tokens} of {len(tokens)} acknowledged tokens found "
                f"({namespace.lookup(tokens)}) of {tokens}"
            )
            at = wrong_token(namespace.spec, namespace.pool, sequence.block_table, sequence.tokens)
            assert at is None, f"{model}: wrong bytes at token {at} of {tokens}"


def check_found(client: Client, chains: list[tuple[str, list[int]]]) -> None:
    """Every chain must be found whole. Reads no byte, hence is fast."""
    namespaces = {spec.model: client.namespace(spec) for spec in SPECS}
    for model, tokens in chains:
        found = namespaces[model].lookup(tokens)
        assert found.tokens == len(tokens), f"{model}: only {found} found of {tokens}"
