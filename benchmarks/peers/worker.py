"""A user of one peer, in a process of its own: the measured loops run in here.

The suite asks by a line of JSON on standard input and is answered by one. Runs in the peer's own
environment, so it imports nothing but numpy and the peer's driver.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.content import Content
from benchmarks.peers.drivers.base import Driver, Place

Answer = dict[str, Any]


class Work:
    """What may be asked. Numbers of blocks grow, so that nothing is put twice."""

    def __init__(self, driver: Driver, batch_blocks: int, sources: int) -> None:
        self._driver = driver
        self._batch = batch_blocks
        self._sources = sources
        self._next = 0
        self._batches: list[range] = []
        self._ones: list[range] = []
        self._chain: list[range] = []

    def start(self) -> Answer:
        """Start the peer; ``seconds`` until it serves."""
        began = time.perf_counter()
        self._driver.start()
        seconds = time.perf_counter() - began
        rows, columns = self._sources * self._batch, self._driver.place.block_bytes
        self._content = Content(self._driver.memory(rows, columns))
        self._out = self._driver.memory(self._batch, columns)
        pids = [server.pid for server in self._driver.servers]
        return {"seconds": seconds, "servers": pids, "version": self._driver.version}

    def put(self, batches: int) -> Answer:
        """Put fresh batches, and forget those of the last time; ``seconds`` of each."""
        self._forget(self._batches)
        self._batches = self._fresh(batches, self._batch)
        return {"seconds": [self._put(numbers) for numbers in self._batches]}

    def get(self) -> Answer:
        """Get the batches that were put last; ``seconds`` of each."""
        return {"seconds": [self._get(numbers) for numbers in self._batches]}

    def put_ones(self, count: int) -> Answer:
        """Put blocks one at a time, and forget those of the last time; ``seconds`` of each."""
        self._forget(self._ones)
        self._ones = self._fresh(count, 1)
        return {"seconds": [self._put(numbers) for numbers in self._ones]}

    def get_ones(self, times: int) -> Answer:
        """Get them one at a time, all of them ``times`` times; ``seconds`` of each."""
        return {"seconds": [self._get(one) for _ in range(times) for one in self._ones]}

    def put_chain(self, count: int) -> Answer:
        """Put ``count`` blocks to ask for, in one call, each behind those before it."""
        self._forget(self._chain)
        self._chain = self._fresh(1, count)
        return {"seconds": [self._put(self._chain[0])]}

    def exists(self, count: int, times: int) -> Answer:
        """Ask for the first ``count`` of them, ``times`` times; ``seconds`` of each."""
        keys = self._driver.keys(self._chain[0][:count])
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            found = self._driver.exists(keys)
            seconds.append(time.perf_counter() - began)
            if found != count:
                raise RuntimeError(f"{found} of {count} blocks are there")
        return {"seconds": seconds}

    def survivors(self, batches: int) -> Answer:
        """After a kill: how many of the blocks of the first batches are ``found`` and ``wrong``.

        ``first_hit``: seconds of getting the first block, None if it is lost.
        """
        numbers = self._fresh(batches, self._batch)
        began = time.perf_counter()
        hit = self._look(numbers[0][:1])
        spent = time.perf_counter() - began
        looks = [self._look(batch) for batch in numbers]
        return {
            "found": sum(found for found, _ in looks),
            "wrong": sum(wrong for _, wrong in looks),
            "first_hit": spent if hit == (1, 0) else None,
        }

    def kill(self) -> Answer:
        """kill -9 of the servers."""
        self._driver.kill()
        return {}

    def stop(self) -> Answer:
        """Leave nothing behind."""
        self._driver.stop()
        return {}

    def _fresh(self, count: int, blocks: int) -> list[range]:
        """Numbers whose rows lie side by side in the content."""
        ranges, rows = [], self._sources * self._batch
        for _ in range(count):
            if self._next % rows + blocks > rows:
                self._next += -self._next % rows
            ranges.append(range(self._next, self._next + blocks))
            self._next += blocks
        return ranges

    def _forget(self, ranges: list[range]) -> None:
        for numbers in ranges:
            self._driver.forget(self._driver.keys(numbers))

    def _put(self, numbers: range) -> float:
        keys = self._driver.keys(numbers)
        blocks = self._content.stamped(numbers[0], len(numbers))
        began = time.perf_counter()
        self._driver.put(keys, blocks)
        return time.perf_counter() - began

    def _get(self, numbers: range) -> float:
        keys, out = self._driver.keys(numbers), self._out[: len(numbers)]
        out[:, :8] = 0xFF
        began = time.perf_counter()
        found = self._driver.get(keys, out)
        spent = time.perf_counter() - began
        if not all(found):
            raise RuntimeError(f"{found.count(False)} of {len(found)} blocks are not there")
        if wrong := self._content.wrong(numbers, out):
            raise RuntimeError(f"{wrong} of {len(found)} blocks came back wrong")
        return spent

    def _look(self, numbers: range) -> tuple[int, int]:
        out = self._out[: len(numbers)]
        there = self._driver.get(self._driver.keys(numbers), out)
        found = [at for at, is_there in enumerate(there) if is_there]
        return len(found), self._content.wrong([numbers[at] for at in found], out[found])


def serve(requests: IO[str], answers: IO[str], work: Work) -> None:
    """Answer until the suite is gone; what a verb raises is an answer too."""
    try:
        for line in requests:
            asked = json.loads(line)
            verb: Callable[..., Answer] = getattr(work, asked.pop("verb"))
            try:
                answer = verb(**asked)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        work.stop()


def main() -> None:
    """The first argument says which driver, where, and how large the work is."""
    task = json.loads(sys.argv[1])
    # What a peer's library prints is not for the suite.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    place = task["place"]
    place["folder"], place["memory"] = Path(place["folder"]), Path(place["memory"])
    module, name = task["driver"].split(":")
    driver = getattr(importlib.import_module(f"benchmarks.peers.drivers.{module}"), name)
    work = Work(driver(Place(**place)), task["batch_blocks"], task["sources"])
    serve(sys.stdin, answers, work)


if __name__ == "__main__":
    main()
