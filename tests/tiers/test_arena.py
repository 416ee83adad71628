"""Arenas: what is taken over, what is made anew, and what memory they cost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.sums import checksum
from tierkv.errors import (
    ConfigError,
    InvariantViolation,
    LimitExceeded,
    TierFailed,
    TierFull,
)
from tierkv.tiers.arena import POOLS_MAX, Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.copy import check_entries, verify_blocks
from tierkv.tiers.entry import make_entries
from tierkv.tiers.linux import is_tmpfs

OpenArena = Callable[..., Arena]
BLOCK_BYTES = 8192
BLOCK_TOKENS = 16


def reopened(arena: Arena, open_arena: OpenArena, **kwargs: Any) -> Arena:
    budget_bytes = kwargs.pop("budget_bytes", arena.budget_bytes)
    return open_arena(budget_bytes=budget_bytes, **kwargs)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    if not Path("/dev/shm").is_dir() or not is_tmpfs("/dev/shm"):
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierkv-test-") as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("block_bytes", "stride"), [(64, 64), (100, 128), (4096, 4096), (5000, 8192)]
)
def test_slots_are_aligned_and_fill_the_budget(
    open_arena: OpenArena, block_bytes: int, stride: int
) -> None:
    arena = open_arena(budget_bytes=1 << 20)
    arena.add_pool(0, block_bytes, BLOCK_TOKENS)
    assert arena.slots(0).shape == ((1 << 20) // stride, stride)
    assert arena.payload(0).shape == ((1 << 20) // stride, block_bytes)
    assert arena.table(0).shape == ((1 << 20) // stride,)
    assert arena.slots(0).ctypes.data % 4096 == 0


def test_a_budget_below_one_block_has_no_slots(open_arena: OpenArena) -> None:
    arena = open_arena(budget_bytes=4095)
    arena.add_pool(0, 4096, BLOCK_TOKENS)
    assert arena.slots(0).shape == (0, 4096)
    assert arena.table(0).shape == (0,)
    arena.populate_entries(0, 0, 0, lambda: False)


def shown(arena: Arena, pool: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries and directory of a pool as workers see them, copied."""
    place = arena.table_place(pool)
    slots = len(arena.table(pool))
    entries = os.pread(arena.shown_table_fd, slots * place.entry_bytes, place.entries_offset)
    directory = os.pread(arena.shown_table_fd, 64 * place.buckets, place.directory_offset)
    return np.frombuffer(entries, arena.table(pool).dtype), np.frombuffer(directory, np.uint64)


def test_workers_see_entries_and_directory_of_each_pool(
    open_arena: OpenArena, put_blocks: Any
) -> None:
    arena = open_arena()
    for pool in (0, 1):
        arena.add_pool(pool, BLOCK_BYTES << pool, BLOCK_TOKENS)
        put_blocks(arena, pool, [3, 5], [10 + pool, 20 + pool])
        arena.enter(pool, np.array([3, 5]), np.array([7 << 40, 8 << 40], np.uint64))
        arena.leave(pool, np.array([5]))
    for pool in (0, 1):
        entries, directory = shown(arena, pool)
        assert entries["id"][[3, 5]].tolist() == [10 + pool, 20 + pool]
        assert directory[directory != 0].tolist() == [7 << 40 | 4]


def test_workers_cannot_write_into_the_table(open_arena: OpenArena) -> None:
    fd = open_arena().shown_table_fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 0)
    assert os.fstat(fd).st_mode & 0o077 == 0


def test_the_directory_is_not_taken_over(open_arena: OpenArena, put_blocks: Any) -> None:
    arena = open_arena()
    arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    put_blocks(arena, 0, [3], [10])
    arena.enter(0, np.array([3]), np.array([7 << 40], np.uint64))
    arena.close()
    again = reopened(arena, open_arena)
    assert again.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    entries, directory = shown(again, 0)
    assert entries["id"][3] == 10
    assert not directory.any()


def test_pools_lie_one_region_apart_behind_one_descriptor(
    open_arena: OpenArena, put_blocks: Any
) -> None:
    arena = open_arena(budget_bytes=3 << 20)
    assert arena.region_bytes == 4 << 20
    assert arena.size_bytes == os.fstat(arena.fd).st_size == POOLS_MAX * arena.region_bytes
    arena.add_pool(POOLS_MAX - 1, BLOCK_BYTES, BLOCK_TOKENS)
    payload = put_blocks(arena, POOLS_MAX - 1, [5], [1])
    offset = (POOLS_MAX - 1) * arena.region_bytes + 5 * BLOCK_BYTES
    assert os.pread(arena.fd, BLOCK_BYTES, offset) == payload.tobytes()


def test_a_new_arena_is_sparse(open_arena: OpenArena, tmp_path: Path) -> None:
    arena = open_arena(budget_bytes=64 << 20)
    arena.add_pool(0, 64 << 10, BLOCK_TOKENS)
    files = [tmp_path / "device.arena", tmp_path / "device.table"]
    assert sum(path.stat().st_blocks * 512 for path in files) < 64 << 10


def test_only_touched_pages_exist_and_punching_gives_them_back(
    open_arena: OpenArena, shared_memory: Path, put_blocks: Any
) -> None:
    # On a tmpfs the kernel counts exactly; elsewhere it reserves ahead.
    arena = open_arena(directory=shared_memory, budget_bytes=64 << 20)
    arena.add_pool(0, 64 << 10, BLOCK_TOKENS)
    put_blocks(arena, 0, [3, 4, 5, 9], [1, 2, 3, 4])
    assert os.fstat(arena.fd).st_blocks * 512 == 256 << 10
    arena.punch(0, np.array([9, 4, 5], np.uint32))
    assert os.fstat(arena.fd).st_blocks * 512 == 64 << 10
    assert not arena.slots(0)[[4, 5, 9]].any()
    ids = np.array([1, 2, 3, 4], np.uint64)
    slots = np.array([3, 4, 5, 9], np.uint32)
    assert check_entries(arena, 0, slots, ids).tolist() == [True, False, False, False]
    assert verify_blocks(arena, 0, slots, ids).tolist() == [True, False, False, False]


def test_punching_a_small_slot_leaves_its_neighbours_alone(
    open_arena: OpenArena, put_blocks: Any
) -> None:
    arena = open_arena()
    arena.add_pool(0, 64, 4)
    put_blocks(arena, 0, [0, 1, 2], [1, 2, 3])
    arena.punch(0, np.array([1], np.uint32))
    slots, ids = np.arange(3, dtype=np.uint32), np.array([1, 2, 3], np.uint64)
    assert verify_blocks(arena, 0, slots, ids).tolist() == [True, False, True]


def test_blocks_are_still_there_after_the_arena_is_opened_again(
    open_arena: OpenArena, put_blocks: Any
) -> None:
    first = open_arena()
    assert not first.adopted
    assert first.add_pool(2, BLOCK_BYTES, BLOCK_TOKENS) is False
    payload = put_blocks(first, 2, [0, 7], [41, 42])
    second = reopened(first, open_arena)
    assert second.adopted
    assert second.identity == first.identity
    assert second.add_pool(2, BLOCK_BYTES, BLOCK_TOKENS) is True
    np.testing.assert_array_equal(second.payload(2)[[0, 7]], payload)
    slots, ids = np.array([0, 7], np.uint32), np.array([41, 42], np.uint64)
    assert verify_blocks(second, 2, slots, ids).all()


def test_adding_a_pool_twice_changes_nothing(open_arena: OpenArena, put_blocks: Any) -> None:
    arena = open_arena()
    arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    put_blocks(arena, 0, [1], [1])
    assert arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    assert check_entries(arena, 0, np.array([1], np.uint32), np.array([1], np.uint64)).all()
    with pytest.raises(InvariantViolation, match="another geometry"):
        arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS + 1)


@pytest.mark.parametrize("other", [{"store": bytes(16)}, {"budget_bytes": 2 << 20}])
def test_another_store_or_budget_gets_a_new_arena(
    open_arena: OpenArena, put_blocks: Any, other: dict[str, Any]
) -> None:
    first = open_arena()
    first.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    put_blocks(first, 0, [1], [1])
    second = reopened(first, open_arena, **other)
    assert not second.adopted
    assert second.identity != first.identity
    assert second.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS) is False
    assert not second.table(0)["id"].any()
    assert not second.slots(0)[1].any()


def test_a_tmpfs_arena_of_another_boot_is_made_anew(
    open_arena: OpenArena, shared_memory: Path
) -> None:
    first = open_arena(directory=shared_memory)
    assert reopened(first, open_arena, directory=shared_memory).adopted
    rebooted = reopened(first, open_arena, directory=shared_memory, boot_id="another boot")
    assert not rebooted.adopted
    assert rebooted.identity != first.identity


def test_an_arena_on_disk_outlives_the_boot(open_arena: OpenArena, tmp_path: Path) -> None:
    if is_tmpfs(tmp_path):
        pytest.skip("the directory for temporary files is a tmpfs")
    first = open_arena()
    assert reopened(first, open_arena, boot_id="another boot").adopted


@pytest.mark.parametrize(
    ("block_bytes", "block_tokens"), [(BLOCK_BYTES * 2, BLOCK_TOKENS), (BLOCK_BYTES, 32)]
)
def test_a_pool_of_another_geometry_starts_empty(
    open_arena: OpenArena, put_blocks: Any, block_bytes: int, block_tokens: int
) -> None:
    first = open_arena()
    for pool in (0, 1):
        first.add_pool(pool, BLOCK_BYTES, BLOCK_TOKENS)
        put_blocks(first, pool, [0, 1], [1, 2])
    second = reopened(first, open_arena)
    assert second.add_pool(0, block_bytes, block_tokens) is False
    assert second.add_pool(1, BLOCK_BYTES, BLOCK_TOKENS) is True
    assert not second.table(0)["id"].any()
    assert not second.slots(0)[:2].any()
    slots, ids = np.array([0, 1], np.uint32), np.array([1, 2], np.uint64)
    assert verify_blocks(second, 1, slots, ids).all()
    third = reopened(second, open_arena)
    assert third.add_pool(0, block_bytes, block_tokens) is True


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "device.table").unlink(),
        lambda directory: (directory / "device.arena").unlink(),
        lambda directory: os.truncate(directory / "device.table", 100),
        lambda directory: os.truncate(directory / "device.arena", 4096),
        lambda directory: (directory / "device.table").write_bytes(b"\xff" * 8192),
    ],
    ids=["no table", "no payload", "short table", "short payload", "garbage"],
)
def test_damaged_files_give_a_new_arena(
    open_arena: OpenArena, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first = open_arena()
    first.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    damage(tmp_path)
    second = reopened(first, open_arena)
    assert not second.adopted
    second.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    assert not second.table(0)["id"].any()


@pytest.mark.parametrize("damage", ["record", "length", "last byte"])
def test_a_damaged_pool_table_is_wiped(
    open_arena: OpenArena, tmp_path: Path, put_blocks: Any, damage: str
) -> None:
    first = open_arena()
    first.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    put_blocks(first, 0, [1], [1])
    with (tmp_path / "device.table").open("r+b") as table:
        if damage == "length":
            table.truncate(8192)
        elif damage == "last byte":
            table.truncate(table.seek(0, 2) - 1)
        else:
            table.seek(4096)
            table.write(b"\x01")
    second = reopened(first, open_arena)
    assert second.adopted
    assert second.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS) is False
    assert not second.table(0)["id"].any()


def test_a_file_system_that_is_too_small_is_refused_at_once(
    open_arena: OpenArena, mount_tmpfs: Callable[[int], Path]
) -> None:
    directory = mount_tmpfs(8 << 20)
    with pytest.raises(TierFull, match=r"lower device\.bytes") as refused:
        open_arena(directory=directory, budget_bytes=16 << 20)
    assert refused.value.details == {"free": 8 << 20, "asked": 16 << 20}
    assert list(directory.iterdir()) == []


def test_what_an_arena_holds_already_counts_as_its_space(
    open_arena: OpenArena, mount_tmpfs: Callable[[int], Path]
) -> None:
    directory = mount_tmpfs(8 << 20)
    first = open_arena(directory=directory, budget_bytes=7 << 20)
    first.add_pool(0, 1 << 20, BLOCK_TOKENS)
    first.slots(0)[:6] = 1
    assert open_arena(directory=directory, budget_bytes=7 << 20).adopted
    (directory / "other").write_bytes(b"\1" * (3 << 19))
    with pytest.raises(TierFull):
        open_arena(directory=directory, budget_bytes=7 << 20)
    (directory / "other").unlink()
    assert open_arena(directory=directory, budget_bytes=7 << 20).identity == first.identity


def test_a_directory_that_cannot_be_made_is_a_typed_error(
    open_arena: OpenArena, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierFailed, match="cannot set up the device arena"):
        open_arena(directory=tmp_path / "file")


def test_bad_arguments_are_typed_errors(open_arena: OpenArena) -> None:
    with pytest.raises(ConfigError, match=r"device\.bytes is 0"):
        open_arena(budget_bytes=0)
    arena = open_arena()
    with pytest.raises(LimitExceeded, match="64 pools"):
        arena.add_pool(POOLS_MAX, BLOCK_BYTES, BLOCK_TOKENS)
    with pytest.raises(InvariantViolation, match="pool 3 was not added"):
        arena.slots(3)


def test_closing_leaves_views_usable_and_the_files_in_place(
    open_arena: OpenArena, tmp_path: Path
) -> None:
    arena = Arena.open(ArenaFiles(tmp_path / "own"), "host", 1 << 20, bytes(16), "boot")
    arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    view = arena.slots(0)
    arena.close()
    view[0] = 7
    assert (view[0] == 7).all()
    assert sorted(p.name for p in (tmp_path / "own").iterdir()) == ["host.arena", "host.table"]


def fill_for_ever(directory: Path, ready: Any) -> None:
    """Write blocks 1, 2, 3, ... round and round, payload and entry, until killed."""
    arena = Arena.open(ArenaFiles(directory), "device", 1 << 20, bytes(16), "boot")
    arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    block_id = 0
    while True:
        block_id += 1
        slot = np.array([block_id % len(arena.slots(0))], np.uint32)
        arena.empty(0, slot)
        payload = np.full(BLOCK_BYTES, block_id % 251, np.uint8)
        arena.payload(0)[slot] = payload
        high, low = checksum(payload)
        arena.table(0)[slot] = make_entries(
            ids=np.array([block_id], np.uint64),
            parents=0,
            hash_hi=1,
            hash_lo=1,
            tokens=np.zeros((1, BLOCK_TOKENS), np.uint32),
            length=BLOCK_BYTES,
            digest=bytes(range(16)),
            sum_hi=high,
            sum_lo=low,
        )
        if block_id == 200:
            ready.set()


def test_every_valid_entry_has_its_whole_payload_after_a_kill(
    open_arena: OpenArena, tmp_path: Path
) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    writer = spawn.Process(target=fill_for_ever, args=(tmp_path, ready), daemon=True)
    writer.start()
    assert ready.wait(30)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    arena = open_arena(store=bytes(16), boot_id="boot")
    assert arena.adopted
    assert arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    slots = np.arange(len(arena.slots(0)), dtype=np.uint32)
    ids = arena.table(0)["id"].copy()
    valid = check_entries(arena, 0, slots, ids)
    assert valid.sum() >= len(slots) - 1
    assert verify_blocks(arena, 0, slots[valid], ids[valid]).all()
