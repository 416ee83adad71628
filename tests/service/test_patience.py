"""How long calls take when the daemon hangs, and when it is gone: two limits, kept apart."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import tierkv
from tests.service.blocks import SPEC, payloads, tokens
from tests.service.running import WAIT_S, Daemon, running, until
from tierkv import Pages, aio
from tierkv.client.sync import POSTED_MAX
from tierkv.errors import Unavailable

LONG_S = 1000.0
"""Only a call that keeps to the wrong limit takes so long."""

SHORT_S = 0.1


class Blocking:
    """Both clients by one interface: this one blocks anyway."""

    def connect(self, daemon: Daemon, **limits: float) -> Any:
        return tierkv.connect(daemon.socket, **limits)

    def do(self, call: Callable[[], Any]) -> Any:
        return call()

    def close(self) -> None:
        pass


class Asyncio:
    """The other one, call by call on a loop of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def connect(self, daemon: Daemon, **limits: float) -> Any:
        return self.do(lambda: aio.connect(daemon.socket, **limits))

    def do(self, call: Callable[[], Any]) -> Any:
        async def main() -> Any:
            result = call()
            return await result if inspect.isawaitable(result) else result

        return self._runner.run(main())

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(params=[Blocking, Asyncio])
def kind(request) -> Iterator[Blocking | Asyncio]:
    one = request.param()
    yield one
    one.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """One that knows the namespace: to map its pools takes longer than the shorter limit."""
    with running() as daemon:
        with daemon.connect() as client:
            client.namespace(SPEC)
        yield daemon


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """It hangs: it is there, and answers nobody."""
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


def unavailable(kind, call: Callable[[], Any]) -> None:
    """The call gives up, long before the longer of its limits."""
    began_s = time.monotonic()
    with pytest.raises(Unavailable):
        kind.do(call)
    assert time.monotonic() - began_s < WAIT_S


def verbs(client, ns, sequence) -> dict[str, Callable[[], Any]]:
    """Every verb that asks the daemon something."""
    ids = tokens(3, seed=9)
    pages = Pages([np.zeros((3, SPEC.block_bytes), np.uint8)])
    return {
        "lookup": lambda: ns.lookup(ids),
        "begin": lambda: ns.begin(ids),
        "write": lambda: ns.write(ids, payloads(SPEC, ids)),
        "write_pages": lambda: ns.write_pages(ids, pages, [0, 1, 2]),
        "read": lambda: ns.read(ids, np.zeros((3, SPEC.block_bytes), np.uint8)),
        "read_pages": lambda: ns.read_pages(ids, pages, [0, 1, 2]),
        "exists": lambda: ns.exists(np.zeros((1, 16), np.uint8)),
        "append": lambda: sequence.append(tokens(1, seed=1)),
        "reserve": lambda: sequence.reserve(1000),
        "fork": lambda: sequence.fork(),
        "stat": lambda: client.stat(),
        "flush": lambda: client.flush(timeout_s=SHORT_S),
    }


def test_a_daemon_that_hangs_holds_no_call_longer_than_it_may_take(daemon, kind) -> None:
    client = kind.connect(daemon, call_timeout_s=SHORT_S, reconnect_s=LONG_S)
    ns = kind.do(lambda: client.namespace(SPEC))
    sequence = kind.do(lambda: ns.begin([], reserve=16))
    with stopped(daemon):
        calls = verbs(client, ns, sequence)
        for call in calls.values():
            unavailable(kind, call)
        for _ in range(POSTED_MAX + 2):  # each leaves something to release
            unavailable(kind, calls["write"])
        began_s = time.monotonic()
        kind.do(lambda: client.release([sequence]))
        assert not kind.do(client.ping)
        assert time.monotonic() - began_s < WAIT_S
    until(lambda: kind.do(client.ping))
    assert kind.do(lambda: ns.lookup(tokens(1, seed=2))).tokens == 0
    kind.do(client.close)


def test_nor_does_one_that_hangs_before_it_greets(daemon, kind) -> None:
    client = kind.connect(daemon, call_timeout_s=SHORT_S, reconnect_s=LONG_S)
    ns = kind.do(lambda: client.namespace(SPEC))
    daemon.process.kill()
    daemon.wait()
    daemon.start()
    with stopped(daemon):
        for call in (lambda: ns.lookup(tokens(1, seed=2)), client.stat):
            unavailable(kind, call)
    until(lambda: kind.do(client.ping))
    kind.do(client.close)


def test_one_that_is_gone_is_not_waited_for_longer_than_that(daemon, kind) -> None:
    client = kind.connect(daemon, call_timeout_s=LONG_S, reconnect_s=0)
    ns = kind.do(lambda: client.namespace(SPEC))
    sequence = kind.do(lambda: ns.begin([], reserve=16))
    lease, epoch = client.lease, client.epoch
    daemon.process.kill()
    daemon.wait()
    calls = verbs(client, ns, sequence)
    for call in calls.values():
        unavailable(kind, call)
    assert not kind.do(client.ping)
    daemon.start()
    assert kind.do(client.ping)
    assert client.epoch > epoch
    assert client.lease == lease
    assert kind.do(calls["lookup"]).tokens == 0
    kind.do(calls["reserve"])
    kind.do(client.close)
    with pytest.raises(Unavailable, match="closed"):
        kind.do(client.ping)


def test_what_it_was_away_does_not_count_as_its_answer(daemon, kind) -> None:
    client = kind.connect(daemon, call_timeout_s=2.0, reconnect_s=LONG_S)
    ns = kind.do(lambda: client.namespace(SPEC))
    daemon.process.kill()
    daemon.wait()
    starting = threading.Timer(3.0, daemon.launch)
    starting.start()
    assert kind.do(lambda: ns.lookup(tokens(1, seed=2))).tokens == 0
    starting.join()
    kind.do(client.close)


def test_connecting_takes_no_longer_than_it_may(daemon, kind) -> None:
    with stopped(daemon):
        unavailable(kind, lambda: _connected(kind, daemon, timeout_s=SHORT_S))
    daemon.process.kill()
    daemon.wait()
    unavailable(kind, lambda: _connected(kind, daemon, timeout_s=SHORT_S))


def _connected(kind, daemon: Daemon, **limits: float) -> Any:
    connect = tierkv.connect if isinstance(kind, Blocking) else aio.connect
    return connect(daemon.socket, call_timeout_s=LONG_S, reconnect_s=LONG_S, **limits)


def test_threads_that_share_a_client_wait_no_longer_together(daemon) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(
            tierkv.connect(daemon.socket, call_timeout_s=SHORT_S, reconnect_s=LONG_S)
        )
        ns, gave_up = client.namespace(SPEC), []

        def ask() -> None:
            try:
                ns.lookup(tokens(1, seed=2))
            except Unavailable as error:
                gave_up.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        with stopped(daemon):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert len(gave_up) == len(threads)
        until(client.ping)
