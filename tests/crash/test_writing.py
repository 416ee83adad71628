"""Blocks written by copy, and daemons killed between two writes, and in the midst of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.crash.daemon import Daemon
from tests.crash.pattern import SMALL, payload, wrong_token
from tierkv.client.sync import Client, Namespace

SIZE = SMALL.block_tokens
BLOCKS = 4
LAST = 200
"""So many prompts are in the device tier, however many were written before."""


def prompt(number: int) -> list[int]:
    return [100 * number + t for t in range(BLOCKS * SIZE)]


def write(namespace: Namespace, tokens: list[int], first: int = 0) -> int:
    data = payload(SMALL, tokens).reshape(-1, SMALL.block_bytes)
    return namespace.write(tokens, data[first:], first=first)


def found(client: Client, tokens: list[int]) -> int:
    """How many blocks are cached; none of their bytes may be wrong."""
    namespace = client.namespace(SMALL)
    with namespace.begin(tokens, keep=0) as sequence:
        assert wrong_token(SMALL, namespace.pool, sequence.block_table, sequence.tokens) is None
        return sequence.num_tokens // SIZE


@pytest.mark.parametrize("forget_ram", [False, True])
@pytest.mark.parametrize("durability", ["none", "kill", "power"])
def test_a_worker_writes_on_when_the_daemon_is_killed_between(
    durability: str, forget_ram: bool
) -> None:
    """What was acknowledged is there, as far as the mode promises it."""
    with Daemon(wal__durability=durability) as daemon:
        daemon.start()
        with daemon.connect() as client:
            namespace = client.namespace(SMALL)
            for number in range(1, 10):
                assert write(namespace, prompt(number)) == BLOCKS
                if number % 3:
                    continue
                if durability == "kill" and forget_ram:
                    client.flush()
                daemon.kill()
                if forget_ram:
                    daemon.forget_ram()
                daemon.start()
                owed = range(1, number + 1) if durability != "none" else []
                assert [found(client, prompt(one)) for one in owed] == [BLOCKS] * len(owed)
            assert client.stat()["sequences"] <= 1


def test_a_worker_never_notices_kills_in_the_midst_of_its_writes() -> None:
    stop = threading.Event()
    with Daemon() as daemon:
        daemon.start()

        def kill() -> None:
            moments = np.random.default_rng(7)
            for _ in range(6):
                stop.wait(float(moments.uniform(0, 0.2)))
                daemon.kill()
                daemon.start()
            stop.set()

        with daemon.connect() as client:
            namespace, number = client.namespace(SMALL), 0
            killer = threading.Thread(target=kill)
            killer.start()
            try:
                while not stop.is_set():
                    number += 1
                    tokens = prompt(number)
                    half = write(namespace, tokens[: BLOCKS // 2 * SIZE])
                    assert half == BLOCKS // 2
                    assert write(namespace, tokens, half) == BLOCKS - half
            finally:
                stop.set()
                killer.join()
            for one in range(max(1, number - LAST), number + 1):
                assert found(client, prompt(one)) == BLOCKS
            assert client.stat()["sequences"] <= 1
