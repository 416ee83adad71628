"""Durability "power": a seal is acknowledged when it and all before it are on disk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.world import World
from tests.crash.daemon import Daemon
from tests.crash.pattern import SMALL, payload
from tierkv.core.ids import Tier
from tierkv.errors import TierFailed
from tierkv.service.engine import Engine

TOKENS = list(range(1000, 1040))


def durable_engine(world: World) -> Engine:
    parts: Any = None  # no journal and no mover: flows are driven by the world
    return Engine(
        world.planner, parts, parts, write_through=True, durable_seal=True, queue_blocks=8
    )


def seal(world: World, engine: Engine, local: int, tokens: list[int]) -> None:
    """Begin, write what is not cached, and seal as a session does."""
    chain = world.chain(tokens)
    planner, lease = world.planner, world.lease
    have = len(world.run(planner.acquire(lease, world.namespace, local, chain)).slots)
    view = world.run(planner.reserve(lease, local, have * 4, len(tokens)))
    payloads = [repr(tokens[: (n + 1) * 4]).encode() for n in range(have, len(chain))]
    hi, lo = world.write(view.slots, have, payloads)
    flow = planner.seal(lease, local, have, chain.part(have, len(chain)), hi, lo)
    world.run(engine.sealing(planner.sequence(lease, local), flow))


def on_disk(world: World, local: int) -> list[bool]:
    rows = world.planner.sequence(world.lease, local).rows
    return world.state.blocks.has_copy(rows, Tier.DISK).tolist()


def test_a_prefix_that_another_worker_has_sealed_but_not_yet_on_disk_is_written_first() -> None:
    world = World(16, 0, 16)
    engine = durable_engine(world)
    world.store(1, TOKENS[:8])
    assert on_disk(world, 1) == [False, False]
    seal(world, engine, 2, TOKENS[:12])
    assert on_disk(world, 2) == [True, True, True]


def test_a_twin_that_another_worker_has_sealed_but_not_yet_on_disk_is_written_first() -> None:
    world = World(16, 0, 16)
    engine = durable_engine(world)
    planner, lease = world.planner, world.lease
    world.run(planner.acquire(lease, world.namespace, 2, world.chain([])))
    view = world.run(planner.reserve(lease, 2, 0, 8))
    hi, lo = world.write(view.slots, 0, [b"one", b"two"])
    world.store(1, TOKENS[:8])
    flow = planner.seal(lease, 2, 0, world.chain(TOKENS[:8]), hi, lo)
    world.run(engine.sealing(planner.sequence(lease, 2), flow))
    assert planner.sequence(lease, 2).rows.tolist() == planner.sequence(lease, 1).rows.tolist()
    assert on_disk(world, 2) == [True, True]


def test_blocks_found_instead_of_those_that_a_fork_holds_too_are_on_disk() -> None:
    world = World(16, 0, 16)
    engine = durable_engine(world)
    planner, lease = world.planner, world.lease
    view = world.stock(1, 2)
    planner.fork(lease, 1, 2, 8)
    world.store(3, TOKENS[:8])
    assert on_disk(world, 3) == [False, False]
    sums = world.write(view.slots, 0, [b"one", b"two"])
    flow = planner.seal(lease, 1, 0, world.chain(TOKENS[:8]), *sums)
    world.run(engine.sealing(planner.sequence(lease, 1), flow))
    assert on_disk(world, 1) == on_disk(world, 3) == [True, True]


def test_what_is_stored_is_on_disk_and_so_is_all_before_it() -> None:
    world = World(16, 0, 16)
    engine = durable_engine(world)
    world.stock(1, 2)
    assert world.put(1, 2, TOKENS[:8]) == 2
    wanted = world.to_store(2, 3, TOKENS[:16], 2)
    stored = world.run(world.planner.store(world.lease, world.namespace, wanted))
    assert not world.state.blocks.has_copy(stored.rows, Tier.DISK).any()
    world.run(engine.on_disk(stored.rows, stored.ids))
    assert world.state.blocks.has_copy(stored.rows, Tier.DISK).all()
    assert len(stored.rows) == 4


def test_what_left_before_it_was_on_disk_is_not_promised() -> None:
    world = World(4, 0, 16)
    engine = durable_engine(world)
    world.stock(1, 2)
    wanted = world.to_store(1, 2, TOKENS[:8])
    stored = world.run(world.planner.store(world.lease, world.namespace, wanted))
    world.planner.placement.disk_paused = True
    world.stock(3, 4)
    world.planner.placement.disk_paused = False
    with pytest.raises(TierFailed, match="did not take them"):
        world.run(engine.on_disk(stored.rows, stored.ids))


def test_only_what_is_promised_on_disk_waits_for_a_sync() -> None:
    with Daemon(wal__durability="power") as daemon:
        daemon.start()
        with daemon.connect() as client:

            def syncs() -> float:
                return daemon.metric("tierkv_wal_fsync_duration_seconds_count")

            namespace = client.namespace(SMALL)
            sequence = namespace.begin(TOKENS)
            sequence.reserve(len(TOKENS))
            assert syncs() == 0
            sequence.append(TOKENS)
            assert syncs() >= 1
            before = syncs()
            sequence.end()
            namespace.begin(TOKENS).end()
            assert syncs() == before
            tokens = [token + 1 for token in TOKENS]
            data = payload(SMALL, tokens).reshape(-1, SMALL.block_bytes)
            namespace.write(tokens, data)
            assert syncs() >= before + 1
