"""A worker that is stopped in the midst of a step, longer than its daemon waits for it.

Its sequences are given up; when it goes on, it writes where it was about to write. Nobody else may
have been given those places, and it must be told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.crash.daemon import ROOT, Daemon, freeze, python_environment
from tests.crash.pattern import SMALL, payload, put, wrong_token
from tierkv.client.sync import Client, Namespace, Sequence

WAIT_S = 20.0
"""Longest wait for something that must happen; only a failing test reaches it."""

TOKENS = list(range(100, 120))
"""Two full blocks and a half."""

# It reserves, says so, and then writes and appends whenever it is told to.
WRITER = f"""
import sys, tierkv
from tests.crash.pattern import SMALL
from tierkv.errors import LeaseLost
client = tierkv.connect(sys.argv[1], timeout_s=30, reconnect_s=60)
namespace = client.namespace(SMALL)
sequence = namespace.begin({TOKENS})
sequence.reserve(60)
table = sequence.block_table
print("reserved", flush=True)
for line in sys.stdin:
    if line == "write\\n":
        namespace.pool[table] = 0xEE
        print("written", flush=True)
    elif line == "append\\n":
        try:
            sequence.append({TOKENS})
            print("appended", flush=True)
        except LeaseLost:
            print("lost", flush=True)
    elif line == "begin\\n":
        sequence = namespace.begin({TOKENS})
        sequence.reserve(60)
        table = sequence.block_table
        print("begun", flush=True)
"""


@dataclass
class Writer:
    """A worker process that does one step at a time."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(server__grace_s="200ms", device__bytes="128KiB", host__bytes="64KiB") as daemon:
        daemon.start()
        yield daemon


@contextmanager
def writer(daemon: Daemon) -> Iterator[Writer]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, daemon.socket],
        cwd=ROOT,
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    one = Writer(process)
    try:
        assert one.hear() == "reserved"
        yield one
    finally:
        one.kill()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(0.005)


def await_the_end_of_its_grace(client: Client) -> None:
    until(lambda: client.stat()["sequences"] == 0, "the worker's sequences are given up")


def fenced(client: Client) -> int:
    count: int = client.stat()["fenced_blocks"]
    return count


def fill_the_device(namespace: Namespace) -> list[Sequence]:
    """Sequences of another worker in all slots of the device tier that are to be had."""
    slots = namespace._client.stat()["tiers"]["device"]["capacity_bytes"] // SMALL.block_bytes
    sequences = []
    for number in range(slots - fenced(namespace._client)):
        tokens = [1000 + number] * SMALL.block_tokens
        sequence = namespace.begin(tokens)
        sequence.reserve(len(tokens))
        put(SMALL, namespace.pool, sequence.block_table, 0, payload(SMALL, tokens))
        sequences.append(sequence)
    return sequences


def seal(sequences: list[Sequence]) -> None:
    for number, sequence in enumerate(sequences):
        sequence.append([1000 + number] * SMALL.block_tokens)


def check_all(namespace: Namespace, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        at = wrong_token(SMALL, namespace.pool, sequence.block_table, sequence.tokens)
        assert at is None, f"a stopped worker's bytes in {sequence.tokens.tolist()}"


@pytest.mark.parametrize("restarts", [1, 3])
def test_what_a_stopped_worker_writes_when_it_goes_on_reaches_nobody(
    daemon: Daemon, restarts: int
) -> None:
    with writer(daemon) as worker, daemon.connect() as client:
        namespace = client.namespace(SMALL)
        worker.freeze()
        for _ in range(restarts):
            daemon.restart()
            await_the_end_of_its_grace(client)
        assert fenced(client) == 8
        theirs = fill_the_device(namespace)
        worker.thaw()
        # Before they are sealed, so that the checksum would be made of wrong bytes, and after.
        assert worker.ask("write") == "written"
        seal(theirs)
        assert worker.ask("write") == "written"
        check_all(namespace, theirs)
        assert worker.ask("append") == "lost"
        client.release(theirs)
        again = [namespace.begin(sequence.tokens, keep=0) for sequence in theirs]
        assert all(one.num_tokens == SMALL.block_tokens for one in again)
        check_all(namespace, again)


def test_a_worker_that_was_told_gives_back_what_was_kept_for_it(daemon: Daemon) -> None:
    with writer(daemon) as worker, daemon.connect() as client:
        worker.freeze()
        daemon.restart()
        await_the_end_of_its_grace(client)
        kept = fenced(client)
        worker.thaw()
        assert worker.ask("append") == "lost"
        assert fenced(client) == kept, "another thread of it may not know yet"
        assert worker.ask("begin") == "begun"
        assert fenced(client) == 0
        assert client.stat()["sequences"] == 1
        assert worker.ask("append") == "appended"


def test_what_is_kept_for_a_stopped_worker_is_free_when_it_dies(daemon: Daemon) -> None:
    with writer(daemon) as worker, daemon.connect() as client:
        worker.freeze()
        daemon.restart()
        await_the_end_of_its_grace(client)
        assert fenced(client)
        assert daemon.metric("tierkv_fenced_blocks") == fenced(client)
        worker.kill()
        until(lambda: fenced(client) == 0, "its blocks are free")
        assert client.stat()["leases"] == 1


def test_a_worker_that_dies_while_the_daemon_is_down_leaves_nothing_fenced(
    daemon: Daemon,
) -> None:
    with writer(daemon) as worker, daemon.connect() as client:
        worker.freeze()
        daemon.restart()
        await_the_end_of_its_grace(client)
        daemon.kill()
        worker.kill()
        daemon.start()
        assert fenced(client) == 0
        assert client.stat()["leases"] == 1


def test_a_clean_stop_keeps_the_fence_too(daemon: Daemon) -> None:
    with writer(daemon) as worker, daemon.connect() as client:
        worker.freeze()
        daemon.restart()
        await_the_end_of_its_grace(client)
        kept = fenced(client)
        assert daemon.stop() == 0
        assert daemon.verify().findings == []
        daemon.start()
        assert fenced(client) == kept
        worker.thaw()
        assert worker.ask("append") == "lost"
