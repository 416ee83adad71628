"""Whole blocks in and out by copy, with a real daemon behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from tests.service.blocks import BLOCK, SPEC, check, payloads, press, sized, tokens
from tests.service.running import Daemon, running
from tierkv import aio

BLOCKS = 8


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Small tiers of 64, 16 and 512 blocks."""
    with running(sized(64, 16, 512)) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def put(ns, ids: np.ndarray) -> None:
    with ns.begin(ids, keep=0) as sequence:
        sequence.reserve(len(ids) - sequence.cached_tokens)
        first = sequence.cached_tokens // BLOCK
        sequence.write_blocks(first, payloads(SPEC, ids)[first:])
        sequence.append(ids[first * BLOCK :])


def test_copied_blocks_come_back_from_every_tier(ns, client) -> None:
    ids = tokens(BLOCKS, seed=100)
    put(ns, ids)
    out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    for _ in range(2):
        with ns.begin(ids, keep=0) as sequence:
            check(ns, sequence)
            assert sequence.read_blocks(0, out) == BLOCKS
        np.testing.assert_array_equal(out, payloads(SPEC, ids))
        press(client, ns, 70, seed=1000)
        assert ns.lookup(ids).device < BLOCKS
        out[:] = 0


def test_a_block_that_was_spoilt_after_its_checksum_is_a_miss_and_never_served(
    ns, client, daemon
) -> None:
    """The worker writes past write_blocks: its checksums no longer fit the bytes."""
    ids = tokens(BLOCKS, seed=101)
    before = _failures(daemon)
    with ns.begin(ids, keep=0) as sequence:
        sequence.reserve(len(ids))
        sequence.write_blocks(0, payloads(SPEC, ids))
        ns.pool[sequence.block_table[3], 17] ^= 1
        sequence.append(ids)
    out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
    assert ns.read(ids, out) == 3
    np.testing.assert_array_equal(out[:3], payloads(SPEC, ids)[:3])
    press(client, ns, 70, seed=2000)
    assert _failures(daemon) > before
    with ns.begin(ids, keep=0) as sequence:
        assert sequence.cached_tokens == 3 * BLOCK
        check(ns, sequence)


def _failures(daemon: Daemon) -> float:
    name = "tierkv_checksum_failures_total"
    return sum(value for key, value in daemon.metrics().items() if key.startswith(name))


def test_asyncio_workers_copy_too(daemon) -> None:
    ids = tokens(BLOCKS, seed=102)

    async def work() -> np.ndarray:
        out = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        async with aio.connect(daemon.socket) as client:
            ns = await client.namespace(SPEC)
            sequence = await ns.begin(ids, keep=0)
            await sequence.reserve(len(ids))
            # Long copies: a thread's work, for they free the GIL.
            await asyncio.to_thread(sequence.write_blocks, 0, payloads(SPEC, ids))
            await sequence.append(ids)
            await asyncio.to_thread(sequence.read_blocks, 0, out)
            await sequence.end()
        return out

    np.testing.assert_array_equal(asyncio.run(work()), payloads(SPEC, ids))


@pytest.mark.parametrize("asked", ["auto", "off"])
def test_a_daemon_says_whether_its_loops_are_native(asked: str) -> None:
    with running(sized(64, 16, 512), extra={"TIERKV_NATIVE": asked}) as daemon:
        with daemon.connect() as client:
            status, ns = client.stat(), client.namespace(SPEC)
            assert status["native"] is (asked == "auto")
            assert status["native_missing"] == ("" if asked == "auto" else "TIERKV_NATIVE is off")
            put(ns, tokens(BLOCKS, seed=103))
            press(client, ns, 70, seed=3000)
            with ns.begin(tokens(BLOCKS, seed=103), keep=0) as sequence:
                assert sequence.cached_tokens == BLOCKS * BLOCK
                check(ns, sequence)
        assert daemon.stop() == 0, daemon.said()
