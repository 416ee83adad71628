"""A long prefix costs one request, whatever its length."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.service.blocks import check, fill, tokens
from tests.service.running import Daemon, running
from tierkv import KVSpec

BLOCKS = 8192
TINY = KVSpec(model="tiny", layers=1, kv_heads=1, head_dim=4, dtype="uint8", block_tokens=4)
"""Blocks of 32 bytes in slots of 64."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    settings = {"device.bytes": "1MiB", "host.bytes": "0", "disk.bytes": "0"}
    # A request's records go into one segment of the log.
    with running(settings | {"wal.segment_bytes": "8MiB"}) as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


def requests(daemon: Daemon) -> dict[str, float]:
    """Requests answered so far, by verb."""
    prefix, suffix = 'tierkv_rpc_requests_total{code="ok",verb="', '"}'
    return {
        name.removeprefix(prefix).removesuffix(suffix): value
        for name, value in daemon.metrics().items()
        if name.startswith("tierkv_rpc_requests_total")
    }


def test_a_prefix_of_8192_blocks_is_one_lookup_and_one_acquire(
    daemon: Daemon, client, record_property
) -> None:
    ns = client.namespace(TINY)
    ids = tokens(BLOCKS, seed=400, block_tokens=4)
    with fill(ns, ids) as sequence:
        assert len(sequence.block_table) == BLOCKS
    client.stat()  # answered after the end of the sequence, for which nobody waits
    before = requests(daemon)
    assert before == dict.fromkeys(before, 1) | {"hello": before["hello"]}

    started = time.perf_counter()
    found = ns.lookup(ids)
    record_property("lookup_8192_blocks_s", time.perf_counter() - started)
    assert found[:4] == (4 * BLOCKS, BLOCKS, 0, 0)
    assert requests(daemon) == before | {"lookup": 1}

    started = time.perf_counter()
    sequence = ns.begin(ids, keep=0)
    record_property("acquire_8192_blocks_s", time.perf_counter() - started)
    assert requests(daemon) == before | {"lookup": 1, "acquire": 2}
    assert sequence.cached_from == (4 * BLOCKS, BLOCKS, 0, 0)
    assert len(set(sequence.block_table.tolist())) == BLOCKS
    check(ns, sequence)
    sequence.end()
    client.stat()
    assert requests(daemon) == before | {"lookup": 1, "acquire": 2, "release": 2, "stat": 2}


def test_the_longest_cached_part_is_found_wherever_it_ends(client) -> None:
    ns = client.namespace(TINY)
    ids = tokens(BLOCKS, seed=400, block_tokens=4)
    for shared in (0, 1, 2, 4095, 4096, 8191):
        other = ids.copy()
        other[4 * shared :] += 1
        assert ns.lookup(other).tokens == 4 * shared
        with ns.begin(other, keep=0) as sequence:
            assert sequence.cached_tokens == 4 * shared
    assert ns.lookup(ids, keep=1).tokens == 4 * (BLOCKS - 1)
    assert ns.lookup(ids[: 4 * 100 + 3]).tokens == 400
