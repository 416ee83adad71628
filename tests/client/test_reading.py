"""Reading without asking: what the daemon still hears, and when it is asked after all."""

from __future__ import annotations

import asyncio
import os
import threading

import msgspec
import numpy as np
import pytest

import tierkv
from tests.client.test_sync import PROMPT, fill
from tierkv import aio
from tierkv.client import uses
from tierkv.core.prefix import chain_hashes
from tierkv.errors import InvalidArgument, ProtocolError, Unavailable
from tierkv.rpc import messages as m

BLOCKS = 2
"""Full blocks of PROMPT."""


@pytest.fixture
def cached(ns):
    """What the blocks of PROMPT hold, u8 [2, block bytes]; nobody holds them."""
    with ns.begin(PROMPT) as sequence:
        fill(ns, sequence, PROMPT)
        held = ns.pool[sequence.block_table[:BLOCKS], : ns.spec.block_bytes].copy()
    ns.lookup([])  # answered after what was not waited for
    return held


@pytest.fixture
def out(spec):
    return np.zeros((BLOCKS, spec.block_bytes), np.uint8)


@pytest.fixture
def at_once(monkeypatch):
    """Every read is told of."""
    monkeypatch.setattr(uses, "TOLD_S", 0.0)


@pytest.fixture
def hardly_ever(monkeypatch):
    """Only when there is much to tell, or the client is closed."""
    monkeypatch.setattr(uses, "TOLD_S", 1e9)


def names(spec, tokens=PROMPT):
    return chain_hashes(spec.digest, np.array(tokens, np.uint32), spec.block_tokens)


def told(daemon):
    return [request for request in daemon.requests if isinstance(request, m.Used)]


@pytest.mark.usefixtures("hardly_ever")
def test_nobody_is_asked_for_what_is_there(daemon, ns, cached, out):
    daemon.requests.clear()
    assert ns.read(PROMPT, out) == BLOCKS
    assert np.array_equal(out, cached)
    assert daemon.requests == []


@pytest.mark.usefixtures("hardly_ever")
def test_the_daemon_is_asked_whether_there_is_more(daemon, ns, cached, out):
    longer = [*PROMPT[:4], *range(500, 508)]
    daemon.requests.clear()
    assert ns.read(longer, np.zeros((3, ns.spec.block_bytes), np.uint8)) == 1
    assert [type(request) for request in daemon.requests] == [m.Lookup]
    assert ns.read([], out) == 0
    assert len(daemon.requests) == 1


def test_what_the_directory_misses_is_read_from_a_sequence(daemon, ns, client, cached, out):
    daemon.places[:] = 0
    daemon.requests.clear()
    assert ns.read(PROMPT, out) == BLOCKS
    assert np.array_equal(out, cached)
    client.stat()
    kinds = [type(request) for request in daemon.requests]
    assert kinds == [m.Lookup, m.Acquire, m.Release, m.Stat]
    assert daemon.held() == {}


def test_a_block_that_is_damaged_is_told_of_and_asked_for_once_more(
    daemon, ns, client, spec, cached, out
):
    with ns.begin(PROMPT) as sequence:
        ns.pool[sequence.block_table[1], 5] ^= 1
    client.stat()
    daemon.requests.clear()
    assert ns.read(PROMPT, out) == 1
    assert np.array_equal(out[0], cached[0])
    client.stat()
    kinds = [type(request) for request in daemon.requests if not isinstance(request, m.Stat)]
    assert kinds == [m.Lookup, m.Acquire, m.Release, m.Used, m.Acquire, m.Release]
    (used,) = told(daemon)
    assert (used.hashes, used.missed) == (b"", 0)
    assert used.damaged == names(spec)[1:].tobytes()
    assert daemon.held() == {}


@pytest.mark.usefixtures("at_once")
def test_blocks_that_were_read_are_told_of_leaf_to_root(daemon, client, ns, spec, cached, out):
    ns.read(PROMPT, out)
    client.stat()
    (used,) = told(daemon)
    assert used.hashes == names(spec)[::-1].tobytes()
    assert used.missed == 0


@pytest.mark.usefixtures("at_once")
def test_blocks_that_were_missed_are_told_of_by_number(daemon, client, ns, spec, cached):
    longer = [*PROMPT[:4], *range(500, 508)]
    ns.read(longer, np.zeros((3, spec.block_bytes), np.uint8))
    client.stat()
    (used,) = told(daemon)
    assert used.hashes == names(spec)[:1].tobytes()
    assert used.missed == 2


@pytest.mark.usefixtures("hardly_ever")
def test_many_reads_are_told_of_together(daemon, client, ns, cached, out):
    for _ in range(uses.TOLD_BLOCKS // BLOCKS - 1):
        ns.read(PROMPT, out)
    client.stat()
    assert told(daemon) == []
    ns.read(PROMPT, out)
    client.stat()
    (used,) = told(daemon)
    assert len(used.hashes) == 16 * uses.TOLD_BLOCKS


@pytest.mark.usefixtures("hardly_ever")
def test_the_rest_is_told_of_in_the_end(daemon, spec, ns, cached, out):
    with tierkv.connect(daemon.path) as other:
        other.namespace(spec).read(PROMPT, out)
        assert told(daemon) == []
    daemon.serving.until(lambda: told(daemon))
    assert told(daemon)[0].hashes == names(spec)[::-1].tobytes()


@pytest.mark.usefixtures("at_once")
def test_a_daemon_that_does_not_answer_is_told_no_more_and_not_waited_for(
    daemon, client, ns, cached, out
):
    daemon.silent.append(m.Used)
    for _ in range(3 * uses.TOLD_BLOCKS):
        assert ns.read(PROMPT, out) == BLOCKS
    daemon.serving.until(lambda: told(daemon))
    assert len(told(daemon)) == 1
    assert len(ns._core.uses._hashes) <= uses.KEPT_BYTES


@pytest.mark.usefixtures("at_once")
def test_reading_goes_on_without_a_daemon_and_another_one_is_taken_up(
    daemon, client, ns, spec, cached, out
):
    daemon.stop()
    for _ in range(3):
        out[:] = 0
        assert ns.read(PROMPT, out) == BLOCKS
        assert np.array_equal(out, cached)
    daemon.start()
    assert ns.lookup(PROMPT).device == BLOCKS
    daemon.stop()
    daemon.new_arena()
    assert (
        ns.read(PROMPT, out) == BLOCKS
    )  # of the old arena, which is mapped as long as nobody asks
    daemon.start()
    client.stat()
    assert ns.read(PROMPT, out) == 0


@pytest.mark.usefixtures("at_once")
def test_reading_waits_for_no_other_thread(daemon, client, ns, cached, out):
    daemon.silent.append(m.Stat)

    def wait() -> None:
        with pytest.raises(Unavailable):
            client.stat()

    waiting = threading.Thread(target=wait)
    waiting.start()
    daemon.serving.until(lambda: daemon.count(m.Stat) == 1)
    assert ns.read(PROMPT, out) == BLOCKS
    assert waiting.is_alive()
    client.close()
    daemon.cut_all()
    waiting.join()


def test_a_client_that_is_closed_reads_nothing(client, ns, cached, out):
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        ns.read(PROMPT, out)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 on
def test_nor_does_a_forked_process(client, ns, cached, out):
    child = os.fork()
    if not child:
        try:
            ns.read(PROMPT, out)
        except InvalidArgument:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    "lie",
    [
        {"entries_offset": 100},
        {"entries_offset": 1 << 20},
        {"entry_bytes": 40},
        {"entry_bytes": 1 << 20},
        {"directory_offset": 0},
        {"directory_offset": 1 << 30},
        {"buckets": 0},
        {"buckets": 3},
        {"buckets": -1},
    ],
)
def test_a_table_that_is_not_there_is_the_daemons_fault(daemon, client, spec, lie):
    told_truth = daemon.open_namespace

    def lying(*arguments):
        return msgspec.structs.replace(told_truth(*arguments), **lie)

    daemon.open_namespace = lying
    with pytest.raises(ProtocolError):
        client.namespace(spec)


@pytest.mark.usefixtures("at_once")
def test_the_asyncio_client_reads_and_tells_the_same(daemon, spec, ns, cached, out, loop_factory):
    async def main():
        async with aio.connect(daemon.path, reconnect_s=5) as client:
            theirs = await client.namespace(spec)
            daemon.requests.clear()
            assert await theirs.read(PROMPT, out) == BLOCKS
            assert np.array_equal(out, cached)
            await client.stat()
            assert [type(request) for request in daemon.requests] == [m.Used, m.Stat]
            assert told(daemon)[0].hashes == names(spec)[::-1].tobytes()
            daemon.silent.append(m.Used)
            for _ in range(10):
                assert await theirs.read(PROMPT, out) == BLOCKS
            await client.stat()
            assert len(told(daemon)) == 2
            daemon.stop()
            out[:] = 0
            assert await theirs.read(PROMPT, out) == BLOCKS
            assert np.array_equal(out, cached)
            daemon.start()
            daemon.places[:] = 0
            assert await theirs.read(PROMPT, out) == BLOCKS
        with pytest.raises(Unavailable, match="closed"):
            await theirs.read(PROMPT, out)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
