"""An arena on a GPU, over the stand-in driver: its memory, its one pool, and moves."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from tierkv.core.effects import Check, Move
from tierkv.core.ids import Tier
from tierkv.errors import ConfigError, InvariantViolation, LimitExceeded, TierFull
from tierkv.gpu import Gpu, GpuMemory
from tierkv.service.pinning import Pinning
from tierkv.tiers import gpu_arena as module
from tierkv.tiers import window
from tierkv.tiers.arena import Arena
from tierkv.tiers.copy import verify_blocks
from tierkv.tiers.entry import make_entries, payload_sums
from tierkv.tiers.gpu_arena import gpu_arena
from tierkv.tiers.mover import Mover

BLOCK_BYTES, BLOCK_TOKENS, COUNT = 8192, 16, 24


@pytest.fixture
def gpu(standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    own = shutil.copy(standin_driver, tmp_path / "own.so")
    monkeypatch.setenv("TIERKV_LIBCUDA", str(own))
    return Gpu.open(0)


def with_pool(arena: Arena) -> Arena:
    arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    return arena


def fill(arena: Arena, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sealed blocks in slots of host memory; their ids and payloads."""
    random = np.random.default_rng(7)
    payload = random.integers(0, 256, (len(slots), BLOCK_BYTES), np.uint8)
    ids = np.arange(1, len(slots) + 1, dtype=np.uint64)
    arena.payload(0)[slots] = payload
    hi, lo = payload_sums(arena.payload(0), slots)
    arena.table(0)[slots] = make_entries(
        ids=ids,
        parents=0,
        hash_hi=ids,
        hash_lo=ids,
        tokens=np.zeros((len(slots), BLOCK_TOKENS), np.uint32),
        length=BLOCK_BYTES,
        digest=bytes(range(16)),
        sum_hi=hi,
        sum_lo=lo,
    )
    return ids, payload


def moved(source: Tier, target: Tier, at: np.ndarray, to: np.ndarray, ids: np.ndarray) -> Move:
    return Move(0, ids, source, at.astype(np.int64), target, to.astype(np.int64))


@pytest.mark.parametrize("window_bytes", [1, 5 * BLOCK_BYTES, 1 << 20])
def test_blocks_go_up_across_and_down(
    gpu: Gpu, open_arena, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    monkeypatch.setattr(window, "WINDOW_BYTES", window_bytes)
    device = with_pool(gpu_arena(gpu, "device", COUNT * BLOCK_BYTES))
    host = with_pool(open_arena(name="host", budget_bytes=COUNT * BLOCK_BYTES))
    mover = Mover({Tier.DEVICE: device, Tier.HOST: host}, None, durable_writes=False)
    at = np.array([1, 2, 3, 9, 5, 4, 20], np.uint32)
    to = np.array([8, 9, 10, 11, 3, 2, 23], np.uint32)
    there = np.array([0, 1, 12, 13, 14, 15, 16], np.uint32)
    ids, payload = fill(host, at)

    up = mover.perform(moved(Tier.HOST, Tier.DEVICE, at, to, ids))
    assert up.ok.all()
    sound = mover.perform(Check(0, ids, Tier.DEVICE, to.astype(np.int64)))
    assert sound.all()
    across = mover.perform(moved(Tier.DEVICE, Tier.DEVICE, to, there, ids))
    assert across.ok.all()
    host.payload(0)[:] = 0
    down = mover.perform(moved(Tier.DEVICE, Tier.HOST, there, at, ids))
    assert down.ok.all()
    assert np.array_equal(host.payload(0)[at], payload)
    assert verify_blocks(host, 0, at, ids).all()
    assert np.array_equal(down.sum_hi, up.sum_hi)

    rows = device.gpu(0)
    assert rows is not None
    rotten = np.zeros((1, BLOCK_BYTES), np.uint8)
    rows.store(to[3:4], rotten, np.array([0]))
    for effect in (
        Check(0, ids, Tier.DEVICE, to.astype(np.int64)),
        moved(Tier.DEVICE, Tier.HOST, to, at, ids),
        moved(Tier.DEVICE, Tier.DEVICE, to, there, ids),
    ):
        result = mover.perform(effect)
        good = result if isinstance(effect, Check) else result.ok
        assert good.tolist() == [True, True, True, False, True, True, True]
    device.close()


def test_a_block_that_became_another_while_it_was_copied(gpu: Gpu, open_arena) -> None:
    device = with_pool(gpu_arena(gpu, "device", COUNT * BLOCK_BYTES))
    host = with_pool(open_arena(name="host", budget_bytes=COUNT * BLOCK_BYTES))
    mover = Mover({Tier.DEVICE: device, Tier.HOST: host}, None, durable_writes=False)
    at = np.arange(3, dtype=np.uint32)
    ids, _ = fill(host, at)
    others = ids.copy()
    others[1] = 99
    up = mover.perform(moved(Tier.HOST, Tier.DEVICE, at, at, others))
    assert up.ok.tolist() == [True, False, True]
    device.close()


def test_a_window_whose_user_fails_is_used_again(gpu: Gpu) -> None:
    """Its memory is pinned: the GPU would go on using it if it were unmapped."""
    device = with_pool(gpu_arena(gpu, "device", COUNT * BLOCK_BYTES))
    windows, used = window.Windows(), []

    def fail() -> None:
        for one, _ in windows.onto(device, 0, 3):
            used.append(one)
            raise OSError("the disk is full")

    for _ in range(2):
        with pytest.raises(OSError, match="the disk is full"):
            fail()
    assert np.shares_memory(used[0].slots(0), used[1].slots(0))
    device.close()


def test_pinning_that_is_cancelled_leaves_nothing_pinned(
    gpu: Gpu, open_arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = with_pool(gpu_arena(gpu, "device", COUNT * BLOCK_BYTES))
    host = with_pool(open_arena(name="host", budget_bytes=COUNT * BLOCK_BYTES))
    begun, cancelled, pin = threading.Event(), threading.Event(), gpu.pin

    def pin_late(memory: np.ndarray) -> None:
        begun.set()
        cancelled.wait()
        pin(memory)

    monkeypatch.setattr(gpu, "pin", pin_late)
    pinning = Pinning({Tier.DEVICE: device, Tier.HOST: host}, lambda: True)

    async def cancel_midway() -> None:
        running = asyncio.create_task(pinning.run())
        await asyncio.to_thread(begun.wait)
        running.cancel()
        await asyncio.wait([running])
        cancelled.set()

    asyncio.run(cancel_midway())
    pinning.close()
    assert gpu.edges == []
    device.close()


def test_it_has_one_pool_and_no_host_memory(gpu: Gpu) -> None:
    arena = gpu_arena(gpu, "device", COUNT * BLOCK_BYTES)
    assert not arena.adopted
    assert arena.on_gpu is gpu
    assert not arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    assert arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    with pytest.raises(LimitExceeded, match="another state directory"):
        arena.add_pool(1, 2 * BLOCK_BYTES, BLOCK_TOKENS)
    with pytest.raises(InvariantViolation):
        arena.slots(0)
    arena.punch(0, np.array([1], np.uint32))
    arena.close()
    arena.close()
    assert arena.fd < 0
    with pytest.raises(ConfigError, match=r"device\.bytes is 0"):
        gpu_arena(gpu, "device", 0)


def test_memory_that_is_given_back_is_waited_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_BYTES", str(6 << 20))
    of_others = GpuMemory.make(gpu, 4 << 20)
    later = threading.Timer(0.3, of_others.close)
    later.start()
    arena = gpu_arena(gpu, "device", 4 << 20)
    later.join()
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    with pytest.raises(TierFull, match="workers of an earlier daemon keep its memory"):
        gpu_arena(gpu, "device", 4 << 20)
    arena.close()
