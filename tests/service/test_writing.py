"""Namespace.write with a real daemon behind it: content, twins, evictions, full tiers, restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, fill, payloads, press, sized, store, tokens
from tests.service.running import Daemon, running
from tierkv import aio
from tierkv.errors import PoolExhausted

SLOTS = 128
BLOCKS = SLOTS // 16
"""As many as are written in one round trip."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(sized(SLOTS, 16, 1024)) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def write(ns, ids: np.ndarray, first: int = 0) -> int:
    return ns.write(ids, payloads(SPEC, ids)[first:], first=first)


def found(ns, ids: np.ndarray) -> int:
    """How many blocks are cached; all of them must be right."""
    with ns.begin(ids, keep=0) as sequence:
        check(ns, sequence)
        return sequence.cached_tokens // BLOCK


def asked(daemon: Daemon, verb: str) -> float:
    name = f'tierkv_rpc_requests_total{{code="ok",verb="{verb}"}}'
    return daemon.metrics().get(name, 0)


def test_what_is_written_comes_back_from_every_tier(ns, client, daemon) -> None:
    ids = [tokens(BLOCKS, seed=n) for n in range(4)]
    before = asked(daemon, "acquire"), asked(daemon, "store")
    for one in ids:
        assert write(ns, one) == BLOCKS
    assert (asked(daemon, "acquire"), asked(daemon, "store")) == (before[0] + 1, before[1] + 4)
    out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    for _ in range(2):
        for one in ids:
            assert ns.read(one, out) == BLOCKS
            np.testing.assert_array_equal(out, payloads(SPEC, one))
        press(client, ns, 2 * SLOTS, seed=1000)
        assert ns.lookup(ids[0]).disk == BLOCKS


def test_what_is_held_by_nobody_is_evicted_for_the_next(ns) -> None:
    last = [tokens(BLOCKS, seed=10_000 + n) for n in range(6 * SLOTS // BLOCKS)]
    for one in last:
        assert write(ns, one) == BLOCKS
    assert found(ns, last[-1]) == BLOCKS


def test_where_blocks_are_cached_already_those_are_used(ns, client, daemon) -> None:
    ids = tokens(BLOCKS, seed=20)
    store(ns, ids[: 3 * BLOCK])
    name = "tierkv_deduplicated_blocks_total"
    before = daemon.metrics()[name]
    with ns.begin(ids, keep=0) as sequence:
        assert write(ns, ids) == BLOCKS
        check(ns, sequence)
    assert daemon.metrics()[name] == before + 3
    assert found(ns, ids) == BLOCKS
    press(client, ns, 2 * SLOTS, seed=21_000)
    assert ns.lookup(ids).disk == BLOCKS
    assert write(ns, ids) == BLOCKS
    assert ns.lookup(ids).device == BLOCKS
    assert found(ns, ids) == BLOCKS


def test_a_long_prompt_in_pieces_whose_beginning_has_spilled(ns, client) -> None:
    ids = tokens(4 * BLOCKS, seed=30)
    for first in range(0, 4 * BLOCKS, BLOCKS):
        assert write(ns, ids[: (first + BLOCKS) * BLOCK], first) == BLOCKS
        press(client, ns, 2 * SLOTS, seed=31_000 + 1000 * first)
    assert found(ns, ids) == 4 * BLOCKS


def test_many_blocks_at_once(ns) -> None:
    ids = tokens(SLOTS // 2, seed=40)
    assert write(ns, ids) == SLOTS // 2
    assert found(ns, ids) == SLOTS // 2


def test_extra_keys_make_other_blocks(ns) -> None:
    ids, keys = tokens(2, seed=50), [None, b"image"]
    assert ns.write(ids, payloads(SPEC, ids, keys), extra_keys=keys) == 2
    assert ns.lookup(ids).tokens == BLOCK
    with ns.begin(ids, keep=0, extra_keys=keys) as sequence:
        assert sequence.cached_tokens == 2 * BLOCK
        check(ns, sequence, keys)


def test_a_full_tier_is_said_and_the_room_given_back(ns, client) -> None:
    write(ns, tokens(2, seed=60))
    with fill(ns, tokens(SLOTS - 2, seed=61)):
        with pytest.raises(PoolExhausted):
            write(ns, tokens(3, seed=62))
        assert client.stat()["workers"][0]["sequences"] == 1
        assert write(ns, tokens(1, seed=63)) == 1
        assert write(ns, tokens(1, seed=63)) == 1
    assert write(ns, tokens(3, seed=62)) == 3
    assert found(ns, tokens(3, seed=62)) == 3


def test_many_workers_write_the_same_and_other_things(daemon) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with daemon.connect() as client:
                ns = client.namespace(SPEC)
                for turn in range(60):
                    ids = tokens(BLOCKS, seed=70_000 + turn % 7 + 100 * (number % 2))
                    if stop.is_set():
                        return
                    assert write(ns, ids) == BLOCKS
                    assert found(ns, ids) == BLOCKS
        except BaseException as error:
            failed.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_asyncio_workers_write_too(daemon) -> None:
    prompts = [tokens(2, seed=80 + n) for n in range(8)]

    async def work() -> list[int]:
        async with aio.connect(daemon.socket) as client:
            ns = await client.namespace(SPEC)
            counts = await asyncio.gather(*[write(ns, ids) for ids in prompts])
            for ids in prompts:
                async with await ns.begin(ids, keep=0) as sequence:
                    check(ns, sequence)
                    assert sequence.cached_tokens == 2 * BLOCK
            return counts

    assert asyncio.run(work()) == [2] * 8


def test_pieces_behind_a_beginning_that_was_evicted_are_refused() -> None:
    with running(sized(SLOTS, 0, 0)) as daemon:
        with daemon.connect() as client:
            ns = client.namespace(SPEC)
            ids = tokens(2 * BLOCKS, seed=90)
            assert write(ns, ids[: BLOCKS * BLOCK]) == BLOCKS
            fill(ns, tokens(SLOTS - BLOCKS, seed=91)).end()
            assert write(ns, ids, BLOCKS) == 0
            assert write(ns, ids) == 2 * BLOCKS
            assert found(ns, ids) == 2 * BLOCKS
        assert daemon.stop() == 0, daemon.said()
