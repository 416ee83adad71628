"""Moves between the tiers, as the core asks for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tierkv_wal import RealStorage

from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.errors import TierFailed
from tierkv.tiers.arena import Arena
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.mover import Mover

POOL, BLOCK_BYTES, BLOCK_TOKENS = 0, 8192, 4
IDS = np.array([1, 2], np.uint64)


class RefusingStorage(RealStorage):
    """The real file system, which refuses to be read while ``refuse`` is set."""

    refuse = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.refuse:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_what_the_disk_refuses_to_read_is_not_called_damaged(
    open_arena: Callable[..., Arena], put_blocks: Any, tmp_path: Path
) -> None:
    storage = RefusingStorage()
    arena, disk = (
        open_arena(),
        DiskTier(str(tmp_path / "data"), 1 << 20, 1 << 20, bytes(16), storage),
    )
    for tier in (arena, disk):
        tier.add_pool(POOL, BLOCK_BYTES, BLOCK_TOKENS)
    payload = put_blocks(arena, POOL, [0, 1], [1, 2])
    mover = Mover({Tier.DEVICE: arena}, disk, durable_writes=False)
    down = Move(POOL, IDS, Tier.DEVICE, slots(0, 1), Tier.DISK, slots(3, 4))
    up = Move(POOL, IDS, Tier.DISK, slots(3, 4), Tier.DEVICE, slots(5, 6))
    assert mover.perform(down).ok.all()
    storage.refuse = True
    with pytest.raises(TierFailed, match=r"cannot read .*Input/output error"):
        mover.perform(up)
    storage.refuse = False
    assert mover.perform(up).ok.all()
    assert np.array_equal(arena.payload(POOL)[5:7], payload)
    damaged = Move(POOL, IDS + np.uint64(1), Tier.DISK, slots(3, 4), Tier.DEVICE, slots(5, 6))
    assert not mover.perform(damaged).ok.any()
    disk.close()
