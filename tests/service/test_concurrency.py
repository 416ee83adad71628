"""Many workers at once on the same blocks: every byte checked, every block moved once."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, grow, press, sized, store, tokens
from tests.service.raw import Peer
from tests.service.running import ROOT, Daemon, environment, running, until
from tierkv.client import aio
from tierkv.core.prefix import chain_hashes
from tierkv.errors import PoolExhausted
from tierkv.rpc import messages as m

WORK_S = 1.0
PROMPTS = [tokens(3 + k % 5, seed=600 + k // 3) for k in range(30)]
"""Some the same, some prefixes of others, some with nothing in common."""


TIERS = sized(48, 24, 200)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(TIERS) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()
        assert "Traceback" not in daemon.said()


def work(socket: str, seed: int, seconds: float) -> int:
    """One worker's random life for a while; returns how many sequences it had."""
    import tierkv

    chance = random.Random(seed)
    done = 0
    with tierkv.connect(socket, timeout_s=30, reconnect_s=30) as client:
        ns = client.namespace(SPEC)
        held: list = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if held and chance.random() < 0.5:
                    _carry_on(ns, held, chance)
                else:
                    held.append(fill(ns, chance.choice(PROMPTS)))
                    done += 1
            except PoolExhausted:
                client.release(held)
                held.clear()
            if len(held) > 3:
                held.pop(0).end()
        for sequence in held:
            if sequence.suspended:
                continue
            check(ns, sequence)
    return done


def _carry_on(ns, held: list, chance: random.Random) -> None:
    sequence = chance.choice(held)
    if sequence.suspended:
        sequence.resume()
        check(ns, sequence)
        return
    check(ns, sequence)
    action = chance.randrange(5)
    if action == 0 and sequence.num_tokens % BLOCK == 0:
        grow(ns, sequence, tokens(1, seed=chance.randrange(3)))
    elif action == 1:
        sequence.suspend()
    elif action == 2:
        sequence.truncate(sequence.num_tokens // BLOCK // 2 * BLOCK)
    elif action == 3:
        child = sequence.fork()
        check(ns, child)
        held.append(child)
    else:
        held.remove(sequence)
        sequence.end()


def test_four_processes_share_prefixes_under_pressure(daemon: Daemon) -> None:
    code = (
        "import sys; from tests.service.test_concurrency import work;"
        "print(work(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(daemon.socket), str(seed), str(WORK_S)],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    here = work(str(daemon.socket), seed=3, seconds=WORK_S)
    assert here > 0
    for worker in workers:
        out, err = worker.communicate(timeout=40)
        assert worker.returncode == 0, err
        assert int(out) > 0
    settled(daemon)


def settled(daemon: Daemon) -> None:
    """Nobody holds anything any more, and nothing was ever found damaged.

    Copies to disk go on for a while when the workers have gone.
    """
    until(lambda: daemon.status()["connections"] == 0)
    until(lambda: all(map(_rests, daemon.status()["tiers"].values())))
    status, metrics = daemon.status(), daemon.metrics()
    assert (status["leases"], status["sequences"]) == (0, 0)
    assert status["state"] == "serving"
    for tier in ("device", "host", "disk"):
        assert metrics[f'tierkv_checksum_failures_total{{tier="{tier}"}}'] == 0


def _rests(tier: dict) -> bool:
    return tier["evictable_blocks"] == tier["blocks"]


def to_disk(daemon: Daemon, ids: np.ndarray) -> None:
    """Have these blocks in the disk tier alone."""
    with daemon.connect() as client:
        ns = client.namespace(SPEC)
        store(ns, ids)
        press(client, ns, 72, seed=7000)
        press(client, ns, 72, seed=8000)
        assert ns.lookup(ids)[:4] == (len(ids), 0, 0, len(ids) // BLOCK)


def promoted_bytes(daemon: Daemon) -> float:
    return daemon.metrics().get(
        'tierkv_transfer_bytes_total{from_tier="disk",to_tier="device"}', 0.0
    )


def test_eight_workers_want_the_same_cold_prefix_and_it_comes_up_once(daemon: Daemon) -> None:
    ids = tokens(16, seed=620)
    to_disk(daemon, ids)
    before = promoted_bytes(daemon)

    async def one() -> tuple:
        async with aio.connect(daemon.socket) as client:
            ns = await client.namespace(SPEC)
            sequence = await ns.begin(ids, keep=0)
            check(ns, sequence)
            return sequence.cached_from

    async def all_of_them() -> list:
        return await asyncio.gather(*(one() for _ in range(8)))

    found = asyncio.run(all_of_them())
    assert {cached.tokens for cached in found} == {len(ids)}
    assert promoted_bytes(daemon) - before == 16 * SPEC.block_bytes
    settled(daemon)


def test_one_connection_pipelines_hundreds_of_requests(daemon: Daemon) -> None:
    async def run() -> None:
        async with aio.connect(daemon.socket) as client:
            ns = await client.namespace(SPEC)

            async def one(k: int) -> int:
                async with await ns.begin(PROMPTS[k % 30][: 3 * BLOCK]) as sequence:
                    found = await ns.lookup(PROMPTS[k % 30])
                    await sequence.suspend()
                    await sequence.resume()
                    check(ns, sequence)
                    return int(found.tokens >= sequence.cached_tokens)

            assert sum(await asyncio.gather(*(one(k) for k in range(150)))) == 150
            assert (await client.stat())["sequences"] == 0

    with daemon.connect() as client:
        for ids in PROMPTS[:5]:
            store(client.namespace(SPEC), ids)
    asyncio.run(run())
    settled(daemon)


def test_cancelled_calls_leave_nothing_behind(daemon: Daemon) -> None:
    """Calls cancelled while the daemon is at work: their sequences are released."""
    ids = tokens(16, seed=630)
    to_disk(daemon, ids)

    async def run() -> None:
        async with aio.connect(daemon.socket) as client:
            ns = await client.namespace(SPEC)
            tasks = [asyncio.create_task(ns.begin(ids, keep=0)) for _ in range(20)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in results[::2])
            for sequence in results[1::2]:
                assert sequence.cached_tokens == len(ids)
                check(ns, sequence)
            async with await ns.begin(ids, keep=0):
                assert (await client.stat())["sequences"] == 11
            await client.release(results[1::2])
            assert (await client.stat())["sequences"] == 0

    asyncio.run(run())
    settled(daemon)


def test_a_worker_that_goes_while_its_blocks_come_up(daemon: Daemon) -> None:
    """The promotion is not wasted, its waiters get it, and the dead worker holds nothing."""
    ids = tokens(32, seed=640)
    hashes = chain_hashes(SPEC.digest, ids, BLOCK).tobytes()
    for _ in range(3):
        to_disk(daemon, ids)
        with daemon.connect() as client:
            ns = client.namespace(SPEC)
            for _ in range(4):
                with Peer(daemon) as peer:
                    peer.hello()
                    opened = peer.want(m.OpenNamespace(SPEC, SPEC.digest), m.NamespaceOpened)
                    peer.send(3, m.Acquire(opened.namespace, 1, hashes, ids.tobytes()))
            with fill(ns, ids) as sequence:
                assert sequence.cached_tokens == len(ids)
    settled(daemon)


def test_a_worker_that_is_killed_holds_nothing_a_moment_later(daemon: Daemon) -> None:
    code = (
        "import sys, tierkv; from tests.service.blocks import *;"
        "client = tierkv.connect(sys.argv[1]);"
        "held = fill(client.namespace(SPEC), tokens(40, seed=650));"
        "print('ready', flush=True); sys.stdin.read()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, str(daemon.socket)],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin
    assert worker.stdout
    with worker.stdin, worker.stdout, daemon.connect() as client:
        assert worker.stdout.readline() == b"ready\n"
        ns = client.namespace(SPEC)
        with ns.begin([]) as sequence:
            with pytest.raises(PoolExhausted):
                sequence.reserve(9 * BLOCK)
            worker.kill()
            worker.wait()
            until(lambda: client.stat()["leases"] == 1)
            sequence.reserve(48 * BLOCK)
    settled(daemon)


def test_threads_share_one_client(daemon: Daemon) -> None:
    errors: list[BaseException] = []

    with daemon.connect() as client:
        ns = client.namespace(SPEC)

        def run(seed: int) -> None:
            try:
                for k in range(20):
                    with fill(ns, PROMPTS[(seed * 7 + k) % 30]) as sequence:
                        check(ns, sequence)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    settled(daemon)


def test_all_of_this_on_plain_asyncio() -> None:
    with running(TIERS, extra={"TIERKV_LOOP": "asyncio"}) as daemon:
        test_four_processes_share_prefixes_under_pressure(daemon)
        test_eight_workers_want_the_same_cold_prefix_and_it_comes_up_once(daemon)
        test_one_connection_pipelines_hundreds_of_requests(daemon)
        test_cancelled_calls_leave_nothing_behind(daemon)
        test_a_worker_that_goes_while_its_blocks_come_up(daemon)
        assert daemon.stop() == 0, daemon.said()
        assert "Traceback" not in daemon.said()
