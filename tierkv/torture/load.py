"""Workers that keep a daemon busy through its deaths."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Self

from tierkv.torture.daemon import Broken, Daemon
from tierkv.torture.promises import Promise
from tierkv.torture.worker import WRONG_BYTES

PAUSE_S = 60.0
"""Longest wait for workers; only broken ones come to it."""


class SawWrongBytes(Broken):
    """A worker was shown bytes that are not those of its tokens."""


class Load:
    """Worker processes on one daemon. A context manager: none is left running.

    ``seed`` chooses what they do and the tree of prompts they share. What they leave lies in a
    folder of the daemon's.
    """

    def __init__(self, daemon: Daemon, seed: int, workers: int) -> None:
        self._daemon = daemon
        self._folder = daemon.folder / f"load-{seed}"
        self._folder.mkdir()
        self._seed = seed
        self._started = 0
        self._workers: list[subprocess.Popen[bytes]] = []
        self.done: Counter[str] = Counter()
        for _ in range(workers):
            self._workers.append(self._new_worker())

    def check_workers(self) -> None:
        """Raise Broken if a worker has ended: none does before it is told to, but at a fault."""
        for worker in self._workers:
            if worker.poll() is not None:
                raise self._fault(worker)

    def replace_worker(self, index: int) -> None:
        """kill -9 one worker and start another in its place."""
        worker = self._workers[index]
        _end(worker)
        (self._folder / f"paused-{worker.pid}").unlink(missing_ok=True)
        self._workers[index] = self._new_worker()

    def pause(self) -> int:
        """Return when all workers have suspended what they hold and wait; how many sequences.

        ``done`` then says what these workers have done so far. Raises Broken if one ends or does
        not pause.
        """
        (self._folder / "pause").touch()
        self._await_notes(True)
        notes = [json.loads(note.read_text()) for note in self._notes()]
        self.done = sum((Counter(note["done"]) for note in notes), Counter())
        return sum(note["held"] for note in notes)

    def go_on(self) -> None:
        """Let paused workers work. Raises Broken if one ends or does not go on."""
        (self._folder / "pause").unlink()
        self._await_notes(False)

    def stop(self) -> None:
        """End all workers; ``done`` then says what they did.

        Raises Broken if one fails or does not end.
        """
        (self._folder / "stop").touch()
        (self._folder / "pause").unlink(missing_ok=True)
        self.done = Counter()
        for worker in self._workers:
            try:
                output, _ = worker.communicate(timeout=PAUSE_S)
            except subprocess.TimeoutExpired:
                raise Broken("a worker does not end") from None
            if worker.returncode != 0:
                raise self._fault(worker)
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
                    found.append(Promise(**(ack | {"choices": tuple(ack["choices"])})))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            _end(worker)

    def _notes(self) -> list[Path]:
        """What the workers that are paused have said."""
        notes = (self._folder / f"paused-{worker.pid}" for worker in self._workers)
        return [note for note in notes if note.exists()]

    def _await_notes(self, paused: bool) -> None:
        wanted = len(self._workers) if paused else 0
        deadline = time.monotonic() + PAUSE_S
        while len(self._notes()) != wanted:
            self.check_workers()
            if time.monotonic() > deadline:
                raise Broken(f"the workers do not {'pause' if paused else 'go on'}")
            time.sleep(0.005)

    def _new_worker(self) -> subprocess.Popen[bytes]:
        self._started += 1
        seed = self._seed * 1000 + self._started
        errors = self._folder / f"errors-{self._started}"
        with errors.open("wb") as stderr:
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tierkv.torture.worker"),
                    *(self._daemon.socket, str(self._folder), str(seed), str(self._seed)),
                ],
                env=self._daemon.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # Ctrl-C is for whoever started it.
                start_new_session=True,
            )
        errors.rename(self._folder / f"errors-of-{worker.pid}")
        return worker

    def _fault(self, worker: subprocess.Popen[bytes]) -> Broken:
        said = (self._folder / f"errors-of-{worker.pid}").read_text()
        if worker.returncode == WRONG_BYTES:
            return SawWrongBytes(f"a worker was shown wrong bytes\n{said}")
        return Broken(f"a worker ended with exit code {worker.returncode}\n{said}")


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.communicate()
