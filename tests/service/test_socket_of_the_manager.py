"""Sockets that a service manager keeps: they take connections while no daemon runs.

So a worker finds out that its daemon is gone, and that it is back, without failing to connect.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tierkv
from tests.crash.supervisor import PASS_DESCRIPTORS
from tests.service.blocks import BLOCK, SPEC, check, fill, store, tokens
from tests.service.running import WAIT_S, Daemon, until
from tierkv import aio
from tierkv.errors import Unavailable
from tierkv.integrations.attachment import Attachment

FALLBACK_S = 0.1
"""How soon a worker that waits for no daemon must go on without one."""

LOG = logging.getLogger("tierkv.test")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose sockets are the manager's."""
    with socket.socket(socket.AF_UNIX) as workers, socket.socket(socket.AF_UNIX) as pages:
        passed = [workers.fileno(), pages.fileno()]
        daemon = Daemon(
            extra={"LISTEN_FDS": "2", "LISTEN_FDNAMES": "rpc:metrics"},
            launcher=[sys.executable, "-c", PASS_DESCRIPTORS, *map(str, passed), "--"],
            pass_fds=passed,
        )
        with daemon:
            for one, path in ((workers, daemon.socket), (pages, daemon.metrics_socket)):
                one.bind(str(path))
                one.listen(512)
            yield daemon.start()


def killed(daemon: Daemon) -> None:
    daemon.signal(signal.SIGKILL)
    daemon.wait()


def fastest(call: Callable[[], Any]) -> float:
    """The shortest time of some tries that a call needs to say that there is no daemon.

    (The machine may do something else meanwhile; a call that waits for too much always does.)
    """
    times = []
    for _ in range(5):
        began = time.perf_counter()
        with pytest.raises(Unavailable):
            call()
        times.append(time.perf_counter() - began)
    return min(times)


def test_a_call_under_way_and_those_after_it_end_at_once_when_the_daemon_dies(
    daemon: Daemon, record_property: Callable[[str, object], None]
) -> None:
    client = tierkv.connect(daemon.socket, timeout_s=WAIT_S, reconnect_s=0.0)
    ended: list[float] = []

    def call() -> None:
        with pytest.raises(Unavailable):
            client.stat()
        ended.append(time.perf_counter())

    daemon.signal(signal.SIGSTOP)
    pending = threading.Thread(target=call)
    pending.start()
    until(lambda: client._lock.locked(), "for the call to be under way")
    died = time.perf_counter()
    daemon.signal(signal.SIGKILL)
    pending.join()
    daemon.wait()
    took = {"pending_s": ended[0] - died, "next_s": fastest(client.stat)}
    for name, seconds in took.items():
        record_property(name, seconds)
    print(took)
    assert took["next_s"] < FALLBACK_S
    # One try only, and the death itself takes some of it.
    assert took["pending_s"] < 10 * FALLBACK_S
    client.close()


def test_the_asyncio_client_does_not_wait_either(daemon: Daemon) -> None:
    async def main() -> float:
        async with aio.connect(daemon.socket, timeout_s=WAIT_S, reconnect_s=0.0) as client:
            killed(daemon)
            times = []
            for _ in range(5):
                began = time.perf_counter()
                with pytest.raises(Unavailable):
                    await client.stat()
                times.append(time.perf_counter() - began)
            return min(times)

    assert asyncio.run(main()) < FALLBACK_S


def test_who_waits_for_the_daemon_sees_no_error(daemon: Daemon) -> None:
    """Neither a worker that it had nor one that comes while there is none."""
    with daemon.connect() as client:
        namespace = client.namespace(SPEC)
        sequence = fill(namespace, tokens(3, seed=1))
        killed(daemon)
        came: list[int] = []

        def come() -> None:
            with tierkv.connect(daemon.socket, timeout_s=WAIT_S, reconnect_s=0.0) as newcomer:
                came.append(newcomer.namespace(SPEC).lookup(tokens(3, seed=1)).tokens)

        newcomer = threading.Thread(target=come)
        newcomer.start()
        daemon.launch()
        sequence.reserve(1)
        check(namespace, sequence)
        newcomer.join()
        assert came == [3 * BLOCK]


def test_an_engine_has_its_cache_back_as_soon_as_the_daemon_serves(
    daemon: Daemon, record_property: Callable[[str, object], None]
) -> None:
    attachment = Attachment(
        lambda: tierkv.connect(daemon.socket, timeout_s=1.0, reconnect_s=0.0), [SPEC], "t", LOG
    )
    try:
        namespaces = attachment.namespaces
        assert namespaces is not None
        killed(daemon)
        with pytest.raises(Unavailable) as error:
            namespaces[0].lookup(tokens(3, seed=1))
        attachment.lost(error.value)
        daemon.launch()
        daemon.connect().close()
        served = time.perf_counter()
        assert attachment.wait(WAIT_S) is not None
        took_s = time.perf_counter() - served
    finally:
        attachment.close()
    record_property("reattached_s", took_s)
    print(f"attached {took_s:.3f} s after the daemon served again")
    assert took_s < 1.0


def test_the_sockets_outlive_the_daemon(daemon: Daemon) -> None:
    with daemon.connect() as client:
        store(client.namespace(SPEC), tokens(2, seed=1))
    assert daemon.get("/readyz") == (200, "serving\n")
    assert daemon.stop() == 0, daemon.said()
    assert daemon.socket.is_socket()
    assert daemon.metrics_socket.is_socket()
    probe = http.client.HTTPConnection("localhost", timeout=WAIT_S)
    probe.sock = socket.socket(socket.AF_UNIX)
    probe.sock.settimeout(WAIT_S)
    probe.sock.connect(str(daemon.metrics_socket))
    probe.request("GET", "/healthz")
    daemon.start()
    assert probe.getresponse().read() == b"ok\n"
    probe.close()
    with daemon.connect() as client:
        assert client.namespace(SPEC).lookup(tokens(2, seed=1)).tokens == 2 * BLOCK
