"""Namespace.write: blocks cached by copy into room that came with the last answer.

The fake daemon compares every checksum it is sent with the payload.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tierkv
from tests.client.fake_daemon import SLOTS
from tierkv import aio
from tierkv.client import stock
from tierkv.errors import InvalidArgument, PoolExhausted
from tierkv.rpc import messages as m

BLOCK = 4
STOCK = SLOTS // stock.STOCKS_MIN
VERBS = (m.Acquire, m.Reserve, m.Store, m.Seal, m.Release)


def prompt(seed: int, blocks: int = STOCK) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK, np.uint32)


def payload(spec, tokens) -> np.ndarray:
    """What follows from the tokens, so that anybody can tell a wrong byte."""
    blocks = len(tokens) // BLOCK
    seeds = [int(np.sum(tokens[: (b + 1) * BLOCK], dtype=np.int64)) for b in range(blocks)]
    rows = [
        np.random.default_rng(seed).integers(0, 256, spec.block_bytes, np.uint8) for seed in seeds
    ]
    return np.array(rows, np.uint8).reshape(blocks, spec.block_bytes)


def write(ns, tokens, first: int = 0, **options) -> int:
    return ns.write(tokens, payload(ns.spec, tokens)[first:], first=first, **options)


def check(ns, tokens) -> None:
    """All of it is cached, with the right bytes."""
    with ns.begin(tokens, keep=0) as sequence:
        assert sequence.cached_tokens == len(tokens)
        out = np.zeros((len(tokens) // BLOCK, ns.spec.block_bytes), np.uint8)
        sequence.read_blocks(0, out)
    np.testing.assert_array_equal(out, payload(ns.spec, tokens))


def asked(daemon, ns) -> list[type]:
    """Verbs about blocks since the last call of this."""
    ns._client.stat()  # answered after the releases, for which the client does not wait
    verbs = [type(one) for one in daemon.requests if isinstance(one, VERBS)]
    daemon.requests.clear()
    return verbs


def held(daemon, ns) -> list:
    """What the daemon holds for its worker, which knows of all of it."""
    ns._client.stat()
    core = ns._client._core
    assert daemon.held().keys() == core.sequences.keys()
    assert core.orphans == set()
    return list(daemon.held().values())


def test_from_the_second_time_on_it_is_one_round_trip(daemon, ns):
    for seed in range(3):
        assert write(ns, prompt(seed)) == STOCK
    assert asked(daemon, ns) == [m.Acquire, m.Store, m.Store, m.Store]
    for seed in range(3):
        check(ns, prompt(seed))
    assert len(held(daemon, ns)) == 1


def test_more_room_than_there_is_left_is_asked_for_first(daemon, ns):
    write(ns, prompt(1, 1))
    write(ns, prompt(2, 3))
    write(ns, prompt(3, 2))
    assert asked(daemon, ns) == [m.Acquire, m.Store, m.Reserve, m.Store, m.Store]
    assert [len(one.slots) for one in held(daemon, ns)] == [2]
    for seed, blocks in ((1, 1), (2, 3), (3, 2)):
        check(ns, prompt(seed, blocks))


def test_a_long_prompt_is_written_in_pieces(daemon, ns):
    tokens = prompt(4, 3 * STOCK)
    for first in range(0, 3 * STOCK, STOCK):
        stop = (first + STOCK) * BLOCK
        assert write(ns, tokens[:stop], first) == STOCK
    check(ns, tokens)
    assert m.Seal not in asked(daemon, ns)


def test_without_the_blocks_before_nothing_is_cached_and_the_room_stays(daemon, ns):
    write(ns, prompt(5))
    (before,) = held(daemon, ns)
    assert write(ns, prompt(6, 2), 1) == 0
    assert held(daemon, ns) == [before]
    assert ns.lookup(prompt(6, 2)).tokens == 0
    assert write(ns, prompt(6, 2)) == 2
    check(ns, prompt(6, 2))
    assert len(held(daemon, ns)) == 1


def test_what_is_cached_already_is_not_cached_twice(daemon, ns):
    write(ns, prompt(7))
    cached = dict(daemon.cached)
    assert write(ns, prompt(7)) == STOCK
    assert daemon.cached == cached
    check(ns, prompt(7))


def test_extra_keys_make_other_blocks(ns):
    tokens = prompt(8, 2)
    write(ns, tokens, extra_keys=[None, b"image"])
    assert ns.lookup(tokens).tokens == BLOCK
    assert ns.lookup(tokens, extra_keys=[None, b"image"]).tokens == 2 * BLOCK


def test_more_than_a_small_part_of_the_tier_is_written_by_a_sequence(daemon, ns):
    tokens = prompt(9, STOCK + 1)
    assert write(ns, tokens) == STOCK + 1
    assert asked(daemon, ns) == [m.Acquire, m.Seal, m.Release]
    check(ns, tokens)
    more = np.concatenate([tokens, prompt(10, STOCK + 2)])
    asked(daemon, ns)
    assert write(ns, more, STOCK + 1) == STOCK + 2
    assert asked(daemon, ns) == [m.Acquire, m.Reserve, m.Seal, m.Release]
    check(ns, more)
    assert write(ns, np.concatenate([more, more]), 2 * STOCK + 4) == 0
    assert held(daemon, ns) == []


def test_no_blocks_are_nothing(daemon, ns):
    assert ns.write(prompt(11), b"") == 0
    assert asked(daemon, ns) == []


@pytest.mark.parametrize("first", [-1, 1])
def test_there_are_tokens_for_every_block(ns, first):
    tokens = prompt(12, 2)
    with pytest.raises(InvalidArgument, match="2 blocks from block"):
        ns.write(tokens, payload(ns.spec, tokens), first=first)


def test_data_is_whole_blocks(ns):
    with pytest.raises(InvalidArgument, match="data has 3 bytes"):
        ns.write(prompt(13), b"abc")


# --- no room --------------------------------------------------------------------------------------


def test_a_full_pool_is_said_and_the_room_given_back(daemon, client, ns):
    write(ns, prompt(20, 1))
    with ns.begin([]) as sequence:
        sequence.reserve((len(daemon.free)) * BLOCK)
        with pytest.raises(PoolExhausted):
            write(ns, prompt(21, 2))
        assert len(held(daemon, ns)) == 1
        assert write(ns, prompt(22, 1)) == 1
    check(ns, prompt(22, 1))


def test_what_is_cached_needs_no_room(daemon, ns):
    """The stock cannot grow; without it the sequence finds all but one block cached."""
    write(ns, prompt(23, 2))
    with ns.begin([]) as sequence:
        sequence.reserve((len(daemon.free)) * BLOCK)
        tokens = np.concatenate([prompt(23, 2), prompt(24, 1)])
        assert write(ns, tokens) == 3
    check(ns, tokens)


# --- reconnecting ---------------------------------------------------------------------------------


def test_the_room_outlives_the_daemon(daemon, ns):
    write(ns, prompt(30))
    daemon.restart()
    asked(daemon, ns)
    assert write(ns, prompt(31)) == STOCK
    assert asked(daemon, ns) == [m.Store]
    check(ns, prompt(30))
    check(ns, prompt(31))


@pytest.mark.parametrize("fresh_arena", [False, True])
def test_a_daemon_without_the_room_gives_other(daemon, ns, fresh_arena):
    write(ns, prompt(32))
    daemon.stop(keep_leases=False)
    if fresh_arena:
        daemon.new_arena()
    daemon.start()
    assert write(ns, prompt(33)) == STOCK
    check(ns, prompt(33))
    assert len(held(daemon, ns)) == 1


@pytest.mark.parametrize("done", [False, True])
def test_a_daemon_that_dies_over_it_is_asked_again(daemon, ns, done):
    """Whether or not it had stored the blocks before: then they are cached already."""
    write(ns, prompt(34))
    (daemon.cut_after if done else daemon.cut_before).append(m.Store)
    assert write(ns, prompt(35)) == STOCK
    check(ns, prompt(35))
    assert write(ns, prompt(36)) == STOCK
    check(ns, prompt(36))
    assert len(held(daemon, ns)) == 1


def test_a_lost_lease_in_the_midst_of_it_costs_another_copy(daemon, ns):
    write(ns, prompt(37))
    forget, find = daemon.find, daemon.find

    def forget_first(lease, number):
        daemon.find = find
        daemon.end_lease(lease)
        for connection in list(daemon.of_connection):
            connection.abort()
        return forget(lease, number)

    daemon.find = forget_first
    assert write(ns, prompt(38)) == STOCK
    check(ns, prompt(38))


def test_a_write_that_fails_leaves_no_room_behind(daemon, client, ns):
    write(ns, prompt(39))
    daemon.silent.append(m.Store)
    client._limits = client._limits._replace(call_timeout_s=0.3)
    with pytest.raises(tierkv.errors.Unavailable):
        write(ns, prompt(40))
    client._limits = client._limits._replace(call_timeout_s=5)
    assert write(ns, prompt(41)) == STOCK
    assert len(held(daemon, ns)) == 1


# --- many at once ---------------------------------------------------------------------------------


def test_threads_may_share_it(daemon, client, ns):
    start = threading.Barrier(4)

    def some(number: int) -> None:
        start.wait()
        for seed in range(3):
            assert write(ns, prompt(100 * number + seed, 2)) == 2

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(some, range(1, 5)))
    for number in range(1, 5):
        for seed in range(3):
            check(ns, prompt(100 * number + seed, 2))
    assert len(held(daemon, ns)) == 1


@pytest.fixture
def run(loop_factory):
    def run(main):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())

    return run


def test_tasks_never_write_into_the_same_room(daemon, run, spec):
    prompts = [prompt(50 + seed, 2) for seed in range(8)]

    async def main():
        async with aio.connect(daemon.path) as client:
            ns = await client.namespace(spec)
            for batch in (prompts[:4], prompts[4:]):
                counts = await asyncio.gather(*[write(ns, tokens) for tokens in batch])
                assert counts == [2] * 4
            out = np.zeros((2, spec.block_bytes), np.uint8)
            for tokens in prompts:
                async with await ns.begin(tokens, keep=0) as sequence:
                    assert sequence.read_blocks(0, out) == 2
                np.testing.assert_array_equal(out, payload(spec, tokens))
            await client.stat()
            assert len(daemon.held()) == 1

    run(main)


def test_a_task_that_is_cancelled_gives_its_room_back(daemon, run, spec):
    async def main():
        async with aio.connect(daemon.path) as client:
            ns = await client.namespace(spec)
            await write(ns, prompt(60))
            daemon.silent.append(m.Store)
            task = asyncio.create_task(write(ns, prompt(61)))
            await client.stat()  # meanwhile the other request went out
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await write(ns, prompt(62)) == STOCK
            assert daemon.held().keys() == client._core.sequences.keys()
            assert len(daemon.held()) == 1

    run(main)


def test_what_another_worker_wrote_is_confirmed_before_it_is_said_to_be_cached(daemon, ns):
    """It may have sealed it a moment ago, and still wait for the disk itself."""
    tokens = prompt(30, STOCK + 1)  # too long for a stock
    write(ns, tokens)
    asked(daemon, ns)
    assert write(ns, tokens) == STOCK + 1
    assert asked(daemon, ns) == [m.Acquire, m.Seal, m.Release]
