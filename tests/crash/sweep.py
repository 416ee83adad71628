"""Many runs of a script, each with a fault at another system call, a few of them at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import msgspec
import pytest

from tests.crash.daemon import ROOT, SHM, python_environment
from tests.crash.script import REFUSED
from tests.crash.sweeper import Call, Job, Result

FULL = os.environ.get("TIERKV_CRASH_SWEEP") == "full"
"""Whether to run every fault there is, not only those that CI has time for."""

AT_A_TIME = max(2, os.cpu_count() or 1)

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None or os.geteuid() != 0,
    reason="needs strace, and root to trace a process that is not its child",
)


class Sweep:
    """Processes that run jobs. A context manager."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._processes = [_process() for _ in range(AT_A_TIME)]
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(AT_A_TIME)

    def run(self, jobs: Iterable[Job]) -> list[Result]:
        """What became of each job."""
        return list(self._threads.map(self._run, jobs))

    def reference(self, job: Job) -> list[Call]:
        """The calls of a run without fault, which must be the same at every run."""
        one, other = self.run([job, job])
        for result in (one, other):
            assert result.ended == 0, result.said
            assert REFUSED not in result.said, result.said
            assert result.problems == []
        assert named(one.calls) == named(other.calls)
        return one.calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, job: Job) -> Result:
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"a sweeper ended at {job}"
        self._idle.put(process)
        return msgspec.json.decode(line, type=Result)


def _process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.sweeper"],
        cwd=ROOT,
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@contextmanager
def prepared_store(durability: str) -> Iterator[str]:
    """The folder of a killed daemon's store: an index, a log to replay, blocks in every tier."""
    folder = Path(tempfile.mkdtemp(prefix="tierkv-crash-", dir=SHM if SHM.is_dir() else None))
    try:
        subprocess.run(
            [sys.executable, "-m", "tests.crash.sweeper", "--prepare", str(folder), durability],
            cwd=ROOT,
            env=python_environment(),
            check=True,
        )
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def named(calls: list[Call]) -> list[tuple[str, str]]:
    """What must be the same at every run: sizes of notes to people, say, are not."""
    return [(call.name, call.place) for call in calls]


def places(calls: list[Call]) -> Iterator[tuple[int, int, Call]]:
    """Each call with its index among all calls, and the how manieth of its name it is, from 1."""
    count: Counter[str] = Counter()
    for index, call in enumerate(calls):
        count[call.name] += 1
        yield index, count[call.name], call


def table(counts: Counter[str]) -> str:
    """Counts as text for a report."""
    total = f"{sum(counts.values())} faults: "
    return total + ", ".join(f"{count} {name}" for name, count in counts.most_common())
