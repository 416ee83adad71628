"""What is written behind, and that nothing is written twice: the engine on make-believe tiers."""

from __future__ import annotations

import asyncio
from typing import cast

from tests.core.world import FakeTiers, World
from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.core.state import PoolShape
from tierkv.service.engine import Engine
from tierkv.service.journal import Journal
from tierkv.tiers.mover import Mover

SHAPE = PoolShape(block_bytes=16 << 20, block_tokens=4)
"""Two blocks make a batch."""
WAIT_S = 30.0


class SlowDisk(FakeTiers):
    """Keeps writers waiting until it is told; remembers which blocks they brought."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.written: list[int] = []
        self.asked = asyncio.Event()
        self._loop = loop
        self._go_on: asyncio.Future[None] = loop.create_future()

    def perform(self, effect):
        if isinstance(effect, Move) and effect.target is Tier.DISK:
            self.written += effect.ids.tolist()
            self._loop.call_soon_threadsafe(self.asked.set)
            asyncio.run_coroutine_threadsafe(self._wait(), self._loop).result(WAIT_S)
        return super().perform(effect)

    def go_on(self) -> None:
        self._go_on.set_result(None)

    async def _wait(self) -> None:
        await asyncio.shield(self._go_on)


class UnwrittenLog:
    """A log that has nothing to settle."""

    async def settle(self) -> None:
        pass


def test_a_flush_does_not_write_again_what_is_being_written() -> None:
    asyncio.run(_flush_while_writing())


async def _flush_while_writing() -> None:
    disk = SlowDisk(asyncio.get_running_loop())
    world = World(device=12, host=0, disk=40, shape=SHAPE, tiers=disk)
    world.store(1, list(range(40)))
    world.planner.take_sealed()
    engine = Engine(
        world.planner,
        cast(Journal, UnwrittenLog()),
        cast(Mover, disk),
        write_through=True,
        durable_seal=False,
        queue_blocks=100,
    )
    engine.write_all_behind()
    behind = asyncio.create_task(engine.write_behind())
    await asyncio.wait_for(disk.asked.wait(), WAIT_S)
    flush = asyncio.create_task(engine.everything_written())
    await asyncio.sleep(0)  # it has looked what is to be written
    assert not flush.done()
    disk.go_on()
    await asyncio.wait_for(flush, WAIT_S)
    assert sorted(disk.written) == sorted(set(disk.written))
    assert len(disk.written) == 10
    behind.cancel()
    await engine.close()
