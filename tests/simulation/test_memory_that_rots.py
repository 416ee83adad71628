"""Memory outlives the daemon, and may have been written by mistake before the next one starts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

import pytest

from tests.simulation.daemon import SimulatedDaemon
from tests.simulation.ledger import Ledger
from tests.simulation.loop import SimulatedLoop
from tests.simulation.machine import SimulatedMachine
from tests.simulation.plan import Plan
from tests.simulation.run import SHAPE, config_of
from tests.simulation.worker import SIZE, Worker
from tierkv.core.spec import slot_stride

T = TypeVar("T")
PATH = list(range(1, 2 * SIZE + 1))
DAMAGED = 1
"""The slot, and the block of the path, of which a bit flips."""


@pytest.mark.parametrize("disk", [0, 48], ids=["only in memory", "on disk, too"])
def test_a_block_that_rotted_while_no_daemon_ran_is_never_served(disk: int) -> None:
    config = config_of(Plan("kill", device=8, host=0, disk=disk, write="through"))
    machine, ledger = SimulatedMachine(), Ledger()

    async def put() -> None:
        daemon = SimulatedDaemon(config, machine, ledger)
        worker = Worker(0, ledger)
        await worker.connect(daemon, must_resume=False)
        local = await worker.begin(PATH)
        assert local is not None
        assert worker.sequences[local].slots[DAMAGED] == DAMAGED
        await daemon.parts.engine.everything_written()
        await worker.release(local)

    _run(put)
    after = machine.crash("kill", Random(1))
    machine.close()
    arena = after.folder / "device.arena"
    with arena.open("r+b") as file:
        at = DAMAGED * slot_stride(SHAPE.block_bytes) + 5
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))

    async def get() -> int:
        worker = Worker(1, ledger)
        await worker.connect(SimulatedDaemon(config, after, ledger), must_resume=False)
        local = await worker.acquire(PATH)
        assert local is not None
        return worker.sequences[local].sealed

    found = _run(get)
    after.close()
    assert ledger.violations == []
    assert found == (2 if disk else DAMAGED)


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = SimulatedLoop(Random(1))
    try:
        return loop.run_until_complete(work())
    finally:
        loop.forsake()
