"""The memory of real arenas, taken ahead of need beside make-believe work."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tierkv.core.ids import Tier
from tierkv.core.state import PoolShape, State
from tierkv.service import prefault as module
from tierkv.service.prefault import Prefault
from tierkv.tiers.arena import Arena
from tierkv.tiers.linux import is_tmpfs
from tierkv.tiers.sizes import slot_bytes

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
GIB = 1 << 30

OpenArena = Callable[..., Arena]


class Ram:
    """A device tier on a real arena, and the state that gives its slots out."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.state = State(
            {Tier.DEVICE: arena.budget_bytes, Tier.HOST: 0, Tier.DISK: 0}, slot_bytes
        )

    def add_pool(self, block_bytes: int = BLOCK_BYTES) -> int:
        """A pool, as a new namespace makes it."""
        pool = len(self.state.pools)
        self.arena.add_pool(pool, block_bytes, 16)
        self.state.add_namespace(pool, bytes([pool]) * 16, PoolShape(block_bytes, 16))
        return pool

    def fill(self, pool: int, count: int, value: int) -> None:
        """Give slots out and write them."""
        slots = self.state.slots[Tier.DEVICE, pool].hold(count)
        self.arena.payload(pool)[slots] = value

    def prefault(self, *, ahead: bool = True, ram_free_bytes: int = 64 * GIB) -> Prefault:
        """What is tested."""
        arenas = {Tier.DEVICE: self.arena}
        return Prefault(self.state, arenas, ahead=ahead, ram_free_bytes=lambda: ram_free_bytes)


@pytest.fixture
def ram(open_arena: OpenArena, in_memory: Path) -> Ram:
    return Ram(open_arena(directory=in_memory, budget_bytes=32 * MIB))


@pytest.fixture
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose files take memory page by page."""
    if not is_tmpfs("/dev/shm"):
        pytest.skip("there is no tmpfs at /dev/shm")
    path = Path("/dev/shm") / f"tierkv-test-{os.getpid()}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def settle(prefault: Prefault, until: str = "done") -> None:
    """Let it run until it has come to that."""
    run_until(prefault, lambda: prefault.state(Tier.DEVICE) == until)


def run_until(prefault: Prefault, condition: Callable[[], bool]) -> None:
    async def run() -> None:
        running = asyncio.ensure_future(prefault.run())
        while not condition():
            await asyncio.sleep(0)
            assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_all_slots_of_a_single_pool_get_their_memory(ram: Ram) -> None:
    ram.add_pool(5000)
    with closing(ram.prefault()) as prefault:
        assert prefault.state(Tier.DEVICE) == "running"
        settle(prefault)
        assert prefault.missing_bytes(Tier.DEVICE) == 0
    assert ram.arena.memory_bytes == 32 * MIB
    assert not ram.arena.slots(0).any()


def test_blocks_stay_as_they_are(ram: Ram) -> None:
    ram.add_pool()
    ram.fill(0, 100, 7)
    with closing(ram.prefault()) as prefault:
        settle(prefault)
    assert (ram.arena.payload(0)[:100] == 7).all()
    assert ram.arena.memory_bytes == 32 * MIB


def test_slot_tables_get_their_memory_too(ram: Ram, in_memory: Path) -> None:
    ram.add_pool()
    with closing(ram.prefault()) as prefault:
        settle(prefault)
    table = in_memory / "device.table"
    assert table.stat().st_blocks * 512 == table.stat().st_size


def test_before_there_is_a_pool_the_first_ones_memory_is_taken(ram: Ram, in_memory: Path) -> None:
    with closing(ram.prefault()) as prefault:
        settle(prefault)
        assert ram.arena.memory_bytes == 32 * MIB
        pool = ram.add_pool(5000)
        assert ram.arena.memory_bytes == 32 * MIB
        assert not ram.arena.slots(pool).any()
        settle(prefault)
        assert ram.arena.memory_bytes == 32 * MIB
        assert ram.arena.last_backed(pool) == len(ram.arena.slots(pool))
    table = in_memory / "device.table"
    assert table.stat().st_blocks * 512 == table.stat().st_size


def test_memory_taken_before_there_was_a_pool_outlives_the_daemon(
    ram: Ram, open_arena: OpenArena, in_memory: Path
) -> None:
    with closing(ram.prefault()) as prefault:
        settle(prefault)
    next_ram = Ram(open_arena(directory=in_memory, budget_bytes=32 * MIB))
    assert next_ram.arena.adopted
    pool = next_ram.add_pool()
    assert next_ram.arena.memory_bytes == 32 * MIB
    next_ram.fill(pool, 10, 7)
    with closing(next_ram.prefault()) as prefault:
        settle(prefault)
    assert (next_ram.arena.payload(pool)[:10] == 7).all()
    assert next_ram.arena.memory_bytes == 32 * MIB


def test_nothing_is_taken_where_a_new_pool_would_give_it_back(
    ram: Ram, open_arena: OpenArena, in_memory: Path
) -> None:
    ram.add_pool()
    ram.fill(0, 10, 7)
    next_ram = Ram(open_arena(directory=in_memory, budget_bytes=32 * MIB))
    with closing(next_ram.prefault()) as prefault:
        settle(prefault)
        assert next_ram.arena.memory_bytes == 10 * BLOCK_BYTES
        pool = next_ram.add_pool(5000)
        assert next_ram.arena.memory_bytes == 0
        assert not next_ram.arena.slots(pool).any()
        settle(prefault)
    assert next_ram.arena.memory_bytes == 32 * MIB


def test_a_second_pool_gets_memory_that_the_first_has_too_much(ram: Ram) -> None:
    ram.add_pool()
    ram.fill(0, 20, 7)
    with closing(ram.prefault()) as prefault:
        settle(prefault)
        ram.add_pool(256 << 10)
        settle(prefault)
        assert ram.arena.memory_bytes <= 32 * MIB
        assert ram.arena.last_backed(1) > 0
        ram.fill(1, 31 * 4 - 5, 9)
        settle(prefault)
    assert ram.arena.memory_bytes <= 32 * MIB
    assert (ram.arena.payload(0)[:20] == 7).all()
    assert (ram.arena.payload(1)[: 31 * 4 - 5] == 9).all()


def test_without_taking_ahead_an_overdraft_is_given_back(ram: Ram) -> None:
    ram.add_pool()
    with closing(ram.prefault()) as prefault:
        settle(prefault)
    ram.add_pool(256 << 10)
    ram.fill(1, 40, 9)
    assert ram.arena.memory_bytes == 42 * MIB
    with closing(ram.prefault(ahead=False)) as prefault:
        assert prefault.state(Tier.DEVICE) == "off"
        run_until(prefault, lambda: ram.arena.memory_bytes <= 32 * MIB)
    assert (ram.arena.payload(1)[:40] == 9).all()


def test_an_arena_that_outlived_a_daemon_is_taken_on(
    ram: Ram, open_arena: OpenArena, in_memory: Path
) -> None:
    ram.add_pool()
    ram.fill(0, 50, 7)
    next_ram = Ram(open_arena(directory=in_memory, budget_bytes=32 * MIB))
    next_ram.add_pool()
    with closing(next_ram.prefault()) as prefault:
        settle(prefault)
    assert next_ram.arena.memory_bytes == 32 * MIB
    assert (next_ram.arena.payload(0)[:50] == 7).all()


def test_memory_of_the_machine_is_left_alone(ram: Ram, caplog: pytest.LogCaptureFixture) -> None:
    ram.add_pool()
    with closing(ram.prefault(ram_free_bytes=64 * MIB)) as prefault:
        settle(prefault, "short of memory")
    assert ram.arena.memory_bytes == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_full_file_system_is_no_failure_and_is_tried_again(
    open_arena: OpenArena,
    mount_tmpfs: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = mount_tmpfs(40 * MIB)
    ram = Ram(open_arena(directory=directory, budget_bytes=32 * MIB))
    ram.add_pool()
    (directory / "other").write_bytes(bytes(20 * MIB))
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    with closing(ram.prefault()) as prefault:
        settle(prefault, "short of memory")
        assert len(caplog.records) == 1
        assert ram.arena.memory_bytes < 21 * MIB
        (directory / "other").unlink()
        settle(prefault)
    assert ram.arena.memory_bytes == 32 * MIB
    assert len(caplog.records) == 1


def test_closing_ends_it_in_the_middle(ram: Ram) -> None:
    ram.add_pool()
    prefault = ram.prefault()
    run_until(prefault, lambda: ram.arena.memory_bytes > 0)
    prefault.close()
    before = ram.arena.memory_bytes
    assert 0 < before < 32 * MIB
    assert ram.arena.slots(0)[0].sum() == 0
    assert np.count_nonzero(ram.arena.table(0)["id"]) == 0
