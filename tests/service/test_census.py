"""Which namespace, and so which tenant, has how many blocks, and where."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from tests.service.blocks import SPEC, store, tokens
from tests.service.running import Daemon, until
from tierkv.core.ids import Tier
from tierkv.core.records import Kind, blank
from tierkv.core.state import PoolShape, State
from tierkv.service import census as module
from tierkv.service.census import Census

OWNED = msgspec.structs.replace(SPEC, tenant="acme")


def test_the_status_tells_what_each_tenant_has(daemon: Daemon, client) -> None:
    before = _by_tenant(client)
    store(client.namespace(OWNED), tokens(3, seed=7101))
    store(client.namespace(SPEC), tokens(2, seed=7101))
    client.flush()
    held = until(lambda: _grown(before, _by_tenant(client)), "for the blocks to be on disk")
    tiers = held["acme"]["tiers"]
    assert tiers["device"]["bytes"] == 3 * OWNED.block_bytes
    assert tiers["disk"]["bytes"] > tiers["device"]["bytes"]
    assert held["acme"]["digest"] == OWNED.digest.hex()


def _by_tenant(client) -> dict[str, dict]:
    return {one["tenant"]: one for one in client.stat()["namespaces"] if one["model"] == SPEC.model}


def _grown(before: dict, now: dict) -> dict:
    """``now``, once three blocks of one tenant and two of nobody have come, to disk, too."""
    for tenant, blocks in (("acme", 3), ("", 2)):
        for path in (("blocks",), ("tiers", "device", "blocks"), ("tiers", "disk", "blocks")):
            if _at(now.get(tenant), path) - _at(before.get(tenant), path) != blocks:
                return {}
    return now


def _at(found: dict | None, path: tuple[str, ...]) -> int:
    for name in path:
        found = found.get(name, {}) if found else 0
    return found or 0


@pytest.fixture
def state() -> State:
    """Two namespaces, with blocks in different tiers."""
    state = State(dict.fromkeys(Tier, 1 << 20), lambda _tier, _shape: 64)
    for namespace in range(2):
        state.add_namespace(namespace, bytes([namespace] * 16), PoolShape(64, 4))
    return state


def add_blocks(state: State, namespace: int, tier: Tier, count: int) -> None:
    records = blank(count, Kind.ALLOC)
    records["key"] = state.row_set.hold(count)
    records["id"] = np.arange(state.next_block, state.next_block + count)
    records["aux"], records["tier"] = namespace, tier
    records["loc"] = state.slots[tier, 0].hold(count)
    state.apply(records)


def test_few_rows_are_counted_at_once(state: State) -> None:
    census = Census(state)
    assert census.counts().tolist() == [[0, 0, 0, 0]] * 2
    add_blocks(state, 1, Tier.HOST, 5)
    add_blocks(state, 0, Tier.DEVICE, 2)
    assert census.counts().tolist() == [[2, 2, 0, 0], [5, 0, 5, 0]]


@pytest.mark.asyncio
async def test_many_rows_are_counted_a_part_per_turn(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 1000)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    census = Census(state)
    add_blocks(state, 1, Tier.DISK, 9000)
    add_blocks(state, 0, Tier.DEVICE, 2)
    assert census.counts().tolist() == [[0, 0, 0, 0]] * 2
    for _ in range(-(-len(state.blocks) // 1000)):
        await asyncio.sleep(0)
    assert census.counts().tolist() == [[2, 2, 0, 0], [9000, 0, 0, 9000]]
