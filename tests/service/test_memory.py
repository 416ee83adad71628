"""The memory of the RAM tiers as operators and workers see it: taken ahead, mapped ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierkv
from tests.service.blocks import SPEC, check, fill, tokens
from tests.service.running import Daemon, running, until

MIB = 1 << 20
SETTINGS = {"device.bytes": "8MiB", "host.bytes": "4MiB"}


def memory(daemon: Daemon) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = daemon.status()["memory"]
    return found


def is_done(daemon: Daemon) -> bool:
    return all(tier["prefault"] == "done" for tier in memory(daemon).values())


def mapped_bytes(array: np.ndarray) -> int:
    """How much of the arena that holds ``array`` this process has mapped."""
    ours, address = False, array.ctypes.data
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            ours = first <= address < last
        elif ours and name == "Rss:":
            return int(rest.split()[0]) << 10
    raise AssertionError("the array lies in no mapping")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(SETTINGS) as daemon:
        until(lambda: is_done(daemon))  # no worker has said yet how large its blocks are
        assert memory(daemon)["device"]["memory_bytes"] == 8 * MIB
        with daemon.connect() as client:
            client.namespace(SPEC)
            until(lambda: is_done(daemon))
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def test_the_daemon_takes_all_memory_and_says_so(daemon: Daemon) -> None:
    assert memory(daemon) == {
        tier: {
            "memory_bytes": size,
            "prefault": "done",
            "missing_bytes": 0,
            "huge_bytes": memory(daemon)[tier]["huge_bytes"],
            "numa": "",
        }
        for tier, size in (("device", 8 * MIB), ("host", 4 * MIB))
    }
    metrics = daemon.metrics()
    assert metrics['tierkv_arena_memory_bytes{tier="device"}'] == 8 * MIB
    assert metrics['tierkv_arena_prefault_missing_bytes{tier="host"}'] == 0
    assert 'tierkv_arena_huge_bytes{tier="device"}' in metrics


def test_a_worker_maps_its_pool_in_the_background(daemon: Daemon) -> None:
    with daemon.connect() as client:
        ns = client.namespace(SPEC)
        until(lambda: not client.populating)
        assert mapped_bytes(ns.pool) == ns.pool.nbytes == 8 * MIB


def test_a_worker_may_do_without(daemon: Daemon) -> None:
    with tierkv.connect(daemon.socket, populate=False) as client:
        ns = client.namespace(SPEC)
        assert not client.populating
        assert mapped_bytes(ns.pool) == 0


@pytest.mark.asyncio
async def test_the_asyncio_worker_does_the_same(daemon: Daemon) -> None:
    async with tierkv.aio.connect(daemon.socket) as client:
        ns = await client.namespace(SPEC)
        until(lambda: not client.populating)
        assert mapped_bytes(ns.pool) == 8 * MIB


def test_a_worker_takes_no_memory_that_it_does_not_write() -> None:
    with running({**SETTINGS, "arena.prefault": "off"}) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        sequence = fill(ns, tokens(4, seed=1))
        taken = memory(daemon)["device"]["memory_bytes"]
        assert 4 * SPEC.block_bytes <= taken < 8 * MIB  # type: ignore[operator]  # an int
        until(lambda: not client.populating)
        assert memory(daemon)["device"]["memory_bytes"] == taken
        assert memory(daemon)["device"]["prefault"] == "off"
        check(ns, sequence)


def test_after_a_kill_memory_is_taken_and_mapped_on() -> None:
    with running(SETTINGS) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        sequence = fill(ns, tokens(4, seed=1))
        daemon.signal(9)
        daemon.wait()
        daemon.start()
        until(lambda: is_done(daemon))
        sequence.reserve(1)
        until(lambda: not client.populating)
        assert mapped_bytes(ns.pool) == memory(daemon)["device"]["memory_bytes"] == 8 * MIB
        check(ns, sequence)


def test_a_node_that_is_not_there_is_a_mistake_in_the_configuration() -> None:
    with Daemon({"arena.numa": "999"}) as daemon:
        daemon.launch()
        assert daemon.wait() == 78
        assert "arena.numa is 999" in daemon.said()
