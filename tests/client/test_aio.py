"""The asyncio client: the same behaviour, and pipelining."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.client.test_sync import PROMPT
from tierkv import aio
from tierkv.client import sync
from tierkv.errors import InvalidArgument, LeaseLost, Unavailable
from tierkv.rpc import messages as m


@pytest.fixture
def run(loop_factory):
    """Run a coroutine function on the loop under test; the daemon runs on another thread."""

    def run(main):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(main())

    return run


def connect(daemon, **options):
    return aio.connect(daemon.path, **{"reconnect_s": 5, "name": "aio", **options})


async def fill(sequence, tokens):
    await sequence.reserve(len(tokens))
    await sequence.append(tokens)


@pytest.mark.parametrize("kind", ["Client", "Namespace", "Sequence"])
def test_both_clients_have_the_same_names_and_parameters(kind):
    blocking, asynchronous = getattr(sync, kind), getattr(aio, kind)
    names = {name for name in dir(blocking) if not name.startswith("_")}
    assert names == {name for name in dir(asynchronous) if not name.startswith("_")}
    for name in names:
        ours = inspect.getattr_static(blocking, name)
        theirs = inspect.getattr_static(asynchronous, name)
        if callable(ours):
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
    assert inspect.signature(sync.connect).parameters == inspect.signature(aio.connect).parameters


def test_a_prompt_is_computed_once(daemon, run, spec):
    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            async with await ns.begin(PROMPT) as first:
                await fill(first, PROMPT)
                assert first.tokens.tolist() == PROMPT
            assert (await ns.lookup(PROMPT))[:4] == (8, 2, 0, 0)
            second = await ns.begin(PROMPT)
            assert second.cached_tokens == 8
            child = await second.fork()
            await fill(child, [1, 2])
            await second.truncate(3)
            await second.suspend()
            await second.resume()
            await client.release([second, child])
            assert (await client.stat())["epoch"] == client.epoch == 1
            assert client.lease == 1
            await client.flush()
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client.stat()

    run(main)
    assert daemon.held() == {}


def test_connect_may_be_awaited(daemon, run):
    async def main():
        client = await connect(daemon)
        assert client.lease == 1
        await client.close()

    run(main)


def test_calls_are_pipelined_and_may_be_answered_in_any_order(daemon, run, spec):
    waiting = []

    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            original = daemon.request

            def request(connection, request_id, message):
                if not isinstance(message, m.Lookup):
                    original(connection, request_id, message)
                    return
                waiting.append(request_id)
                if len(waiting) == 10:
                    for late in reversed(waiting):
                        connection.reply(late, m.Found(late, late, 0, 0))

            daemon.request = request
            found = await asyncio.gather(*(ns.lookup(PROMPT) for _ in range(10)))
            assert [prefix.device for prefix in found] == waiting

    run(main)


def test_a_cancelled_call_leaves_the_connection_in_order(daemon, run, spec):
    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            daemon.silent.append(m.Acquire)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ns.begin(PROMPT)
            (connection,) = daemon.of_connection
            late = next(iter(connection._in_flight))
            daemon.serving.call(connection.reply, late, m.Done())
            assert (await client.stat())["epoch"] == 1
            await ns.begin(PROMPT)
            assert daemon.count(m.Release) == 1

    run(main)


def test_calls_on_one_sequence_take_turns(daemon, run, spec):
    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            sequence = await ns.begin([])
            await sequence.reserve(40)
            await asyncio.gather(*(sequence.append([i]) for i in range(40)))
            assert sequence.tokens.tolist() == list(range(40))
            seals = [r.first for r in daemon.requests if isinstance(r, m.Seal)]
            assert seals == list(range(10))

    run(main)


def test_all_calls_under_way_outlive_the_daemon(daemon, run, spec):
    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            sequences = [await ns.begin([]) for _ in range(5)]
            daemon.cut_before.append(m.Reserve)
            daemon.cut_after.append(m.Reserve)
            await asyncio.gather(*(sequence.reserve(4) for sequence in sequences))
            assert all(len(sequence.block_table) == 1 for sequence in sequences)
            await asyncio.to_thread(daemon.restart)
            await asyncio.gather(*(sequence.append([1, 2, 3, 4]) for sequence in sequences))
            assert client.epoch == 2
            assert client.lease == 1

    run(main)
    assert daemon.count(m.Hello) == 4


def test_a_daemon_that_forgot_the_lease(daemon, run, spec):
    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            sequence = await ns.begin([])
            await sequence.reserve(4)
            await asyncio.to_thread(daemon.restart, keep_leases=False)
            with pytest.raises(LeaseLost):
                await sequence.reserve(1)
            await sequence.end()
            again = await ns.begin(PROMPT)
            await fill(again, PROMPT)
            assert client.lease == 2

    run(main)


def test_a_daemon_that_does_not_come_is_unavailable(daemon, run, spec):
    async def main():
        async with connect(daemon, reconnect_s=0.2, call_timeout_s=0.5) as client:
            ns = await client.namespace(spec)
            sequence = await ns.begin([])
            await asyncio.to_thread(daemon.stop)
            with pytest.raises(Unavailable, match="no daemon serves"):
                await ns.lookup(PROMPT)
            await sequence.end()
            await asyncio.to_thread(daemon.start)
            assert (await ns.lookup(PROMPT)).tokens == 0
            daemon.silent.append(m.Stat)
            with pytest.raises(Unavailable, match="did not answer"):
                await client.stat()

    run(main)


def test_a_daemon_that_recovers_is_waited_for(daemon, run):
    daemon.state = "recovering"

    async def main():
        with pytest.raises(Unavailable, match="recovering"):
            await connect(daemon, timeout_s=0.1)
        asyncio.get_running_loop().call_later(0.1, setattr, daemon, "state", "serving")
        async with connect(daemon) as client:
            assert client.lease == 1

    run(main)


def test_typed_errors_and_local_checks(daemon, run, spec):
    async def main():
        async with connect(daemon) as client:
            ns = await client.namespace(spec)
            async with await ns.begin([]) as sequence:
                with pytest.raises(InvalidArgument, match="reserve"):
                    await sequence.append([1])
                with pytest.raises(InvalidArgument, match=r"token_ids\[0\]"):
                    await ns.begin([-1])
                daemon.cut_before.extend([m.Stat] * 20)
                with pytest.raises(Unavailable, match="lost 5 times"):
                    await client.stat()

    run(main)
