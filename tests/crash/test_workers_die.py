"""Workers and daemons die apart from each other: what is released, and what is kept for whom."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.daemon import ROOT, Daemon, python_environment
from tests.crash.pattern import SMALL, payload, put, wrong_token
from tierkv.client.sync import Client, Namespace, Sequence
from tierkv.errors import LeaseLost

RELEASE_S = 0.1
WAIT_S = 20.0
"""Longest wait for something that must happen; only a failing test reaches it."""

TOKENS = list(range(100, 143))

HOLDER = f"""
import sys, tierkv
from tests.crash.pattern import SMALL, payload, put
socket, first = sys.argv[1], int(sys.argv[2])
client = tierkv.connect(socket, timeout_s=30, reconnect_s=60)
namespace = client.namespace(SMALL)
held = []
for number in range(4):
    tokens = [first + number, *{TOKENS}]
    sequence = namespace.begin(tokens)
    sequence.reserve(60)
    rest = tokens[sequence.num_tokens:]
    put(SMALL, namespace.pool, sequence.block_table, sequence.num_tokens,
        payload(SMALL, tokens)[sequence.num_tokens:])
    sequence.append(rest)
    held.append(sequence)
held.append(held[0].fork())
held[1].suspend()
held[2].suspend()
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(server__grace_s="60s") as daemon:
        daemon.start()
        yield daemon


def holder(daemon: Daemon, first: int) -> subprocess.Popen[bytes]:
    """A worker that holds open, forked and suspended sequences until it is killed."""
    worker = subprocess.Popen(
        [sys.executable, "-c", HOLDER, daemon.socket, str(first)],
        cwd=ROOT,
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"holding\n"
    return worker


def killed(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.communicate()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(0.002)


def holds(client: Client) -> tuple[int, int]:
    """Leases and sequences of everybody."""
    status = client.stat()
    return status["leases"], status["sequences"]


def extended(namespace: Namespace, sequence: Sequence, tokens: list[int]) -> None:
    """Reserve, write and append, without filling a block: nothing of it is sealed."""
    before = sequence.num_tokens
    sequence.reserve(len(tokens))
    written = payload(SMALL, [*sequence.tokens.tolist(), *tokens])[before:]
    put(SMALL, namespace.pool, sequence.block_table, before, written)
    sequence.append(tokens)


def is_right(namespace: Namespace, sequence: Sequence) -> bool:
    table = sequence.block_table
    return wrong_token(SMALL, namespace.pool, table, sequence.tokens) is None


def test_what_a_killed_worker_held_is_free_100_ms_later(daemon: Daemon) -> None:
    took_s = []
    with daemon.connect() as client:
        for number in range(5):
            before = client.stat()
            worker = holder(daemon, 1000 * number)
            during = client.stat()
            assert during["sequences"] == 5
            worker.kill()
            began = time.perf_counter()
            until(lambda: holds(client) == (1, 0), "nothing is held")
            took_s.append(time.perf_counter() - began)
            worker.communicate()
            client.flush()  # until then copies to disk may hold device copies
            after = client.stat()
            # Sealed blocks stay cached, and nothing but them: 44 tokens are 5 full blocks.
            assert after["blocks"] - before["blocks"] == 4 * 5
            assert after["tiers"]["device"]["evictable_blocks"] == after["blocks"]
    assert statistics.median(took_s) < RELEASE_S, took_s


def test_thirty_killed_workers_leak_nothing(daemon: Daemon) -> None:
    def resources() -> dict[str, Any]:
        shm = sorted(path.name for path in daemon.arenas.iterdir())
        fds = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        maps = Path(f"/proc/{daemon.pid}/maps").read_text().count("tierkv")
        return {"shm": shm, "fds": fds, "maps": maps}

    with daemon.connect() as client:
        counts = []
        for number in range(31):
            # The same prompts every time: what stays cached is the same, too.
            worker = holder(daemon, 0)
            killed(worker)
            until(lambda: holds(client) == (1, 0), "nothing is held")
            used = client.stat()["tiers"]["device"]["used_bytes"]
            counts.append({**resources(), "used": used})
            assert counts[-1] == counts[0], f"after worker {number}"


def test_the_lease_of_a_worker_that_dies_while_the_daemon_is_down_ends_at_the_restart(
    daemon: Daemon,
) -> None:
    worker = holder(daemon, 0)
    with daemon.connect() as client:
        assert holds(client) == (2, 5)
        daemon.kill()
        killed(worker)
        daemon.start()
        assert holds(client) == (1, 0)


def test_the_lease_of_a_worker_that_dies_before_it_comes_back_ends_at_once(daemon: Daemon) -> None:
    worker = holder(daemon, 0)
    daemon.restart()
    with daemon.connect() as client:
        assert holds(client) == (2, 5)
        killed(worker)
        until(lambda: holds(client) == (1, 0), "nothing is held")


def test_a_worker_that_lives_but_never_comes_back_is_given_up_after_the_grace_period() -> None:
    with Daemon(server__grace_s="1500ms") as daemon:
        daemon.start()
        worker = holder(daemon, 0)
        daemon.kill()
        began_s = time.monotonic()
        daemon.start()
        served_s = time.monotonic()
        with daemon.connect() as client:
            assert holds(client) == (2, 5)
            # Its lease stands, so that nobody is given the places it may still write into.
            until(lambda: holds(client) == (2, 0), "its sequences are given up")
            ended_s = time.monotonic()
            killed(worker)
            until(lambda: holds(client) == (1, 0), "its lease is given up")
        assert ended_s - began_s > 1.5
        assert ended_s - served_s < 4.0


def test_a_living_worker_keeps_sequences_and_unsealed_blocks_over_two_kills(
    daemon: Daemon,
) -> None:
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        sequence = namespace.begin([])
        extended(namespace, sequence, TOKENS)
        child = sequence.fork()
        extended(namespace, child, [7])
        asleep = namespace.begin([])
        extended(namespace, asleep, TOKENS[1:])
        asleep.suspend()
        lease, table = client.lease, sequence.block_table.tolist()
        for round_number in range(2):
            daemon.restart()
            extended(namespace, sequence, [round_number])
            assert sequence.block_table.tolist() == table
        daemon.kill()
        daemon.launch()
        daemon.kill()
        daemon.start()
        asleep.resume()
        assert client.lease == lease
        assert client.stat()["leases"] == 1
        assert sequence.tokens.tolist() == [*TOKENS, 0, 1]
        for one in (sequence, child, asleep):
            assert is_right(namespace, one)
        assert client.stat()["sequences"] == 3
        extended(namespace, sequence, [8] * 20)
        assert is_right(namespace, sequence)


@pytest.mark.timeout(120)
def test_kills_during_recovery_lose_nothing(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=30, reconnect_s=60) as client:
        namespace = client.namespace(SMALL)
        sequences = []
        for number in range(12):
            sequences.append(namespace.begin([]))
            extended(namespace, sequences[-1], [number, *TOKENS])
        for sequence in sequences[::3]:
            sequence.suspend()
        for step in range(9):
            daemon.kill()
            daemon.launch()
            time.sleep(step * 0.05)
            assert daemon.process is not None
            assert daemon.process.poll() is None
        daemon.restart()
        for number, sequence in enumerate(sequences):
            sequence.resume()
            assert sequence.tokens.tolist() == [number, *TOKENS]
            assert is_right(namespace, sequence)
            extended(namespace, sequence, [9] * 9)
            assert is_right(namespace, sequence)
        assert not os.listdir(daemon.quarantine)
        status = client.stat()
        assert status["sequences"] == 12
        assert status["recovery"]["dropped_blocks"] == 0


def test_a_worker_whose_ram_tiers_are_gone_begins_again_from_disk(daemon: Daemon) -> None:
    with daemon.connect() as client:
        namespace = client.namespace(SMALL)
        sequence = namespace.begin([])
        extended(namespace, sequence, TOKENS)
        client.flush()
        daemon.kill()
        daemon.forget_ram()
        daemon.start()
        with pytest.raises(LeaseLost):
            sequence.reserve(1)
        again = namespace.begin(TOKENS, keep=0)
        assert again.cached_from == (40, 0, 0, 5)
        assert is_right(namespace, again)
