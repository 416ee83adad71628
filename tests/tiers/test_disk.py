"""The disk tier: round trips, damage at rest, full and failing file systems, restarts."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_wal import RealStorage

from tests.tiers.sums import checksum
from tierkv.core.state import PoolShape
from tierkv.errors import InvariantViolation, TierFailed, TierFull
from tierkv.tiers import uring
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.copy import verify_blocks
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk_io import DiskIO
from tierkv.tiers.entry import make_entries
from tierkv.tiers.reads import ReadList

BLOCK_BYTES = 5000
SLOT_BYTES = 4096 + 8192
BLOCK_TOKENS = 16
POOL = 3
STORE = bytes(range(16))

OpenDisk = Callable[..., DiskTier]
OpenIO = Callable[..., DiskIO]


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


class FaultyStorage(RealStorage):
    """The real file system, which notes calls and refuses those that a test names."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse: dict[str, OSError] = {}
        self.refuse_offset: int | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.refuse:
            raise self.refuse[name]

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._called("pwritev")
        super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append("preadv")
        end = offset + sum(map(len, buffers))
        if self.refuse_offset is not None and offset <= self.refuse_offset < end:
            raise OSError(errno.EIO, "bad sector")
        return super().preadv(fd, buffers, offset)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        self._called("start_writeback")
        super().start_writeback(fd, offset, length)

    def fdatasync(self, fd: int) -> None:
        self._called("fdatasync")
        super().fdatasync(fd)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._called("fallocate")
        super().fallocate(fd, offset, length)

    def rename(self, source: str, target: str) -> None:
        self._called("rename")
        super().rename(source, target)

    def fsync_dir(self, path: str) -> None:
        self._called("fsync_dir")
        super().fsync_dir(path)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> FaultyStorage:
    faulty = FaultyStorage()
    submissions_of = uring.submissions_of

    def with_a_bad_one(reads: ReadList) -> np.ndarray:
        bad, ends = faulty.refuse_offset, reads.offsets + reads.sizes()
        if bad is not None:
            # The kernel itself refuses these.
            hit = (reads.offsets <= bad) & (bad < ends)
            reads = dataclasses.replace(reads, fds=np.where(hit, -1, reads.fds))
        return submissions_of(reads)

    monkeypatch.setattr(uring, "submissions_of", with_a_bad_one)
    return faulty


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def open_disk(data: Path, storage: FaultyStorage, open_io: OpenIO) -> Iterator[OpenDisk]:
    opened: list[DiskTier] = []

    def make(
        directory: Path = data,
        budget_bytes: int = 40 * SLOT_BYTES,
        segment_bytes: int = 16 * SLOT_BYTES,
        block_bytes: int = BLOCK_BYTES,
        store: bytes = STORE,
    ) -> DiskTier:
        disk = DiskTier(str(directory), budget_bytes, segment_bytes, store, storage, open_io)
        disk.add_pool(POOL, block_bytes, BLOCK_TOKENS)
        opened.append(disk)
        return disk

    yield make
    for disk in opened:
        disk.close()


@pytest.fixture
def arena(open_arena: Callable[..., Arena]) -> Arena:
    arena = open_arena(budget_bytes=1 << 20)
    arena.add_pool(POOL, BLOCK_BYTES, BLOCK_TOKENS)
    return arena


def write_calls(disk: DiskTier) -> list[str]:
    """What one run of slots is written by: direct writes are with the device when they return."""
    return ["pwritev"] if "direct" in disk.io else ["pwritev", "start_writeback"]


def scanned(disk: DiskTier, pool: int = POOL) -> dict[int, int]:
    """The ids of the blocks that a scan finds, by slot."""
    return {
        int(slot): int(entry["id"])
        for scan in disk.scan(pool)
        for slot, entry in zip(scan.slots, scan.entries, strict=True)
    }


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [64, 100, 4095, 4096, 5000, 64 << 10, 2 << 20])
def test_blocks_come_back_as_they_were(
    open_arena: Callable[..., Arena], open_disk: OpenDisk, put_blocks: Any, block_bytes: int
) -> None:
    arena = open_arena(budget_bytes=12 << 20)
    arena.add_pool(POOL, block_bytes, BLOCK_TOKENS)
    disk = open_disk(budget_bytes=20 << 20, segment_bytes=8 << 20, block_bytes=block_bytes)
    payload = put_blocks(arena, POOL, [0, 1, 2], [11, 12, 13])
    slots = u32(4, 1, 2)
    result = disk.write(POOL, slots, arena, u32(0, 1, 2))
    assert result.written.all()
    assert result.intact.all()
    assert result.error is None
    back = u32(3, 5, 4)
    assert disk.read(POOL, slots, u64(11, 12, 13), arena, back).ok.all()
    np.testing.assert_array_equal(arena.payload(POOL)[back], payload)
    np.testing.assert_array_equal(arena.table(POOL)[back], arena.table(POOL)[[0, 1, 2]])


def test_consecutive_slots_share_a_system_call_within_a_segment(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, list(range(8)), list(range(1, 9)))
    slots, here = u32(14, 17, 15, 16, 18, 20, 2, 1), np.arange(8, dtype=np.uint32)
    assert disk.write(POOL, slots, arena, here).written.all()
    assert storage.calls.count("pwritev") == 4  # 1-2, 14-15, 16-18, 20
    back = here + np.uint32(8)
    assert disk.read(POOL, slots, np.arange(1, 9, dtype=np.uint64), arena, back).ok.all()
    assert storage.calls.count("preadv") == (0 if "io_uring" in disk.io else 4)
    np.testing.assert_array_equal(arena.payload(POOL)[8:16], arena.payload(POOL)[:8])


def test_slots_have_the_documented_bytes(
    arena: Arena, open_disk: OpenDisk, data: Path, put_blocks: Any
) -> None:
    disk = open_disk()
    payload = put_blocks(arena, POOL, [0], [77])
    disk.write(POOL, u32(17), arena, u32(0))
    assert disk.slot_bytes(POOL) == SLOT_BYTES
    assert disk.slot_count(POOL) == 40
    content = (data / "5000x16-00000001.seg").read_bytes()
    assert len(content) == 16 * SLOT_BYTES
    slot = content[SLOT_BYTES : 2 * SLOT_BYTES]
    entry = arena.table(POOL)[:1].tobytes()
    assert slot[:8] == b"TKVBLK\x00\x01"
    assert slot[8:16] == (2).to_bytes(4, "little") + len(entry).to_bytes(4, "little")
    assert slot[16:32] == STORE
    assert slot[32 : 32 + len(entry)] == entry
    assert not any(slot[32 + len(entry) : 4096])
    assert slot[4096 : 4096 + BLOCK_BYTES] == payload.tobytes()


def test_long_token_lists_take_more_than_one_header_page(
    open_arena: Callable[..., Arena], data: Path, open_io: OpenIO
) -> None:
    disk = DiskTier(str(data), 1 << 20, 1 << 19, STORE, RealStorage(), open_io)
    arena = open_arena()
    arena.add_pool(0, 4096, 2048)
    disk.add_pool(0, 4096, 2048)
    assert disk.slot_bytes(0) == 3 * 4096 + 4096
    payload = np.arange(4096, dtype=np.uint32).view(np.uint8)[:4096]
    tokens = np.arange(2048, dtype=np.uint32)[None, :]
    arena.payload(0)[0] = payload
    arena.table(0)[:1] = make_entries(
        ids=u64(9), parents=8, hash_hi=1, hash_lo=2, tokens=tokens, length=4096, digest=STORE
    )
    assert disk.write(0, u32(3), arena, u32(0)).written.all()
    assert disk.read(0, u32(3), u64(9), arena, u32(1)).ok.all()
    assert arena.table(0)["tokens"][1].tolist() == tokens[0].tolist()
    disk.close()


def test_an_unsealed_block_gets_a_checksum_on_its_way(
    arena: Arena, open_disk: OpenDisk, put_blocks: Any
) -> None:
    disk = open_disk()
    payload = put_blocks(arena, POOL, [0, 1], [1, 2], summed=False)
    result = disk.write(POOL, u32(0, 1), arena, u32(0, 1))
    sums = list(zip(result.sum_hi.tolist(), result.sum_lo.tolist(), strict=True))
    assert sums == [checksum(block) for block in payload]
    assert disk.read(POOL, u32(0, 1), u64(1, 2), arena, u32(5, 6)).ok.all()
    assert verify_blocks(arena, POOL, u32(5, 6), u64(1, 2)).all()


def test_blocks_outlive_the_process_and_segments_are_found_again(
    arena: Arena, open_disk: OpenDisk, data: Path, put_blocks: Any
) -> None:
    first = open_disk()
    put_blocks(arena, POOL, [0, 1], [1, 2])
    first.write(POOL, u32(0, 39), arena, u32(0, 1))
    first.sync()
    (data / "5000x16-00000001.seg.tmp").write_bytes(b"unfinished")
    (data / "unrelated").touch()
    second = open_disk()
    assert sorted(os.listdir(data)) == ["5000x16-00000000.seg", "5000x16-00000002.seg", "unrelated"]
    assert (data / "5000x16-00000002.seg").stat().st_size == 8 * SLOT_BYTES
    assert second.read(POOL, u32(0, 39), u64(1, 2), arena, u32(2, 3)).ok.all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_batches_of_any_sizes_come_back(
    tmp_path_factory: pytest.TempPathFactory, open_io: OpenIO, data: st.DataObject
) -> None:
    block_bytes = data.draw(st.integers(1, 9000))
    block_tokens = data.draw(st.integers(1, 40))
    directory = tmp_path_factory.mktemp("any")
    arena = Arena.open(ArenaFiles(directory), "device", 1 << 20, bytes(16), "boot")
    disk = DiskTier(str(directory / "data"), 1 << 20, 1 << 17, STORE, RealStorage(), open_io)
    arena.add_pool(0, block_bytes, block_tokens)
    disk.add_pool(0, block_bytes, block_tokens)
    width = min(disk.slot_count(0), len(arena.slots(0)) // 2)
    slots = data.draw(st.lists(st.integers(0, disk.slot_count(0) - 1), max_size=30, unique=True))
    slots = slots[:width]
    rng = np.random.default_rng(len(slots))
    payload = rng.integers(0, 256, (len(slots), block_bytes), np.uint8)
    ids = np.arange(1, len(slots) + 1, dtype=np.uint64)
    here = rng.permutation(width)[: len(slots)].astype(np.uint32)
    arena.payload(0)[here] = payload
    arena.table(0)[here] = make_entries(
        ids=ids,
        parents=ids - 1,
        hash_hi=ids,
        hash_lo=ids,
        tokens=np.ones((len(slots), block_tokens), np.uint32),
        length=block_bytes,
        digest=bytes(range(16)),
    )
    assert disk.write(0, np.array(slots, np.uint32), arena, here).written.all()
    back = here + np.uint32(width)
    assert disk.read(0, np.array(slots, np.uint32), ids, arena, back).ok.all()
    np.testing.assert_array_equal(arena.payload(0)[back], payload)
    assert scanned(disk, 0) == dict(zip(sorted(slots), ids[np.argsort(slots)], strict=True))
    disk.close()
    arena.close()


# --- what must not be written, or not be served ---------------------------------------------------


@pytest.mark.parametrize("damage", ["payload", "entry", "empty"])
def test_rotten_blocks_are_never_written(
    arena: Arena, open_disk: OpenDisk, put_blocks: Any, damage: str
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    if damage == "payload":
        arena.payload(POOL)[1, 4999] ^= 1
    elif damage == "entry":
        arena.table(POOL)["tokens"][1, 0] ^= 1
    else:
        arena.empty(POOL, u32(1))
    result = disk.write(POOL, u32(0, 1, 2), arena, u32(0, 1, 2))
    assert result.intact.tolist() == [True, False, True]
    assert result.written.tolist() == [True, False, True]
    assert result.error is None
    assert result.sum_hi[1] == result.sum_lo[1] == 0
    assert scanned(disk) == {0: 1, 2: 3}


def test_another_block_in_the_slot_is_not_served(
    arena: Arena, open_disk: OpenDisk, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1], [1, 2])
    disk.write(POOL, u32(0, 1), arena, u32(0, 1))
    assert disk.read(POOL, u32(0, 1), u64(1, 99), arena, u32(0, 1)).ok.tolist() == [True, False]
    assert arena.table(POOL)["id"][:2].tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 4096 + BLOCK_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_header_or_payload_is_found(
    damaged_block: tuple[Arena, DiskTier, Path], position: int, bit: int
) -> None:
    arena, disk, path = damaged_block
    with path.open("r+b") as file:
        file.seek(SLOT_BYTES + position)
        old = file.read(1)[0]
        file.seek(SLOT_BYTES + position)
        file.write(bytes([old ^ 1 << bit]))
        file.flush()
        good = disk.read(POOL, u32(0, 1, 2), u64(1, 2, 3), arena, u32(5, 6, 7)).ok
        file.seek(SLOT_BYTES + position)
        file.write(bytes([old]))
    assert good.tolist() == [True, False, True]
    assert arena.table(POOL)["id"][5:8].tolist() == [1, 0, 3]
    assert disk.read(POOL, u32(1), u64(2), arena, u32(6)).ok.all()


@pytest.fixture(scope="module")
def damaged_block(tmp_path_factory: pytest.TempPathFactory, open_io: OpenIO) -> Iterator[Any]:
    """Three blocks in one segment, for examples that break the middle one and mend it again."""
    directory = tmp_path_factory.mktemp("damage")
    arena = Arena.open(ArenaFiles(directory), "device", 1 << 20, bytes(16), "boot")
    arena.add_pool(POOL, BLOCK_BYTES, BLOCK_TOKENS)
    disk = DiskTier(
        str(directory / "data"), 40 * SLOT_BYTES, 16 * SLOT_BYTES, STORE, RealStorage(), open_io
    )
    disk.add_pool(POOL, BLOCK_BYTES, BLOCK_TOKENS)
    payload = np.random.default_rng(5).integers(0, 256, (3, BLOCK_BYTES), np.uint8)
    arena.payload(POOL)[:3] = payload
    arena.table(POOL)[:3] = make_entries(
        ids=u64(1, 2, 3),
        parents=0,
        hash_hi=1,
        hash_lo=2,
        tokens=np.zeros((3, BLOCK_TOKENS), np.uint32),
        length=BLOCK_BYTES,
        digest=bytes(range(16)),
    )
    assert disk.write(POOL, u32(0, 1, 2), arena, u32(0, 1, 2)).written.all()
    yield arena, disk, directory / "data" / "5000x16-00000000.seg"
    disk.close()
    arena.close()


@pytest.mark.parametrize("kept_bytes", [0, 100, SLOT_BYTES, SLOT_BYTES + 4096 + 10])
def test_a_truncated_segment_costs_only_what_is_gone(
    arena: Arena, open_disk: OpenDisk, data: Path, put_blocks: Any, kept_bytes: int
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1], [1, 2])
    disk.write(POOL, u32(0, 1), arena, u32(0, 1))
    os.truncate(data / "5000x16-00000000.seg", kept_bytes)
    good = disk.read(POOL, u32(0, 1, 2), u64(1, 2, 3), arena, u32(4, 5, 6)).ok
    assert good.tolist() == [kept_bytes >= SLOT_BYTES, False, False]
    # Not even where the missing bytes happen to be in memory already.
    assert not disk.read(POOL, u32(1), u64(2), arena, u32(1)).ok.any()
    put_blocks(arena, POOL, [1], [2])
    assert disk.read_errors == 0
    again = open_disk()
    assert again.write(POOL, u32(1), arena, u32(1)).written.all()
    assert (data / "5000x16-00000000.seg").stat().st_size == 16 * SLOT_BYTES
    assert again.read(POOL, u32(1), u64(2), arena, u32(5)).ok.all()


def test_a_slot_without_a_segment_is_a_miss(arena: Arena, open_disk: OpenDisk) -> None:
    disk = open_disk()
    assert disk.read(POOL, u32(0, 39), u64(1, 2), arena, u32(0, 1)).ok.tolist() == [False, False]
    assert disk.headers(POOL, u32(0, 39))[1].tolist() == [False, False]
    assert list(disk.scan(POOL)) == []


def test_a_bad_sector_costs_one_block_of_a_batch(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    disk.write(POOL, u32(0, 1, 2), arena, u32(0, 1, 2))
    storage.refuse_offset = SLOT_BYTES + 5000
    result = disk.read(POOL, u32(0, 1, 2), u64(1, 2, 3), arena, u32(4, 5, 6))
    assert result.ok.tolist() == [True, False, True]
    assert isinstance(result.error, TierFailed)
    assert "5000x16-00000000.seg: [Errno 5] Input/output error" in result.error.message
    assert disk.read_errors == 2  # the batch, then the block alone
    assert verify_blocks(arena, POOL, u32(4, 6), u64(1, 3)).all()
    storage.refuse_offset = None
    result = disk.read(POOL, u32(0, 1, 2), u64(1, 2, 3), arena, u32(4, 5, 6))
    assert result.ok.all()
    assert result.error is None


# --- full and failing file systems ----------------------------------------------------------------


def test_a_full_file_system_is_reported_and_earlier_blocks_stay_readable(
    arena: Arena, open_disk: OpenDisk, put_blocks: Any, mount_tmpfs: Callable[[int], Path]
) -> None:
    mounted = mount_tmpfs(20 * SLOT_BYTES)
    disk = open_disk(directory=mounted / "data")
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    assert disk.write(POOL, u32(0, 1), arena, u32(0, 2)).written.all()
    result = disk.write(POOL, u32(20), arena, u32(1))
    assert isinstance(result.error, TierFull)
    assert "lower disk.bytes" in result.error.message
    assert result.written.tolist() == [False]
    assert result.intact.all()
    assert os.listdir(mounted / "data") == ["5000x16-00000000.seg"]
    assert disk.read(POOL, u32(0, 1), u64(1, 3), arena, u32(4, 5)).ok.all()
    assert disk.write(POOL, u32(2), arena, u32(1)).written.all()


@pytest.mark.parametrize("call", ["pwritev", "fallocate", "rename", "fsync_dir"])
@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, TierFailed), (errno.ENOSPC, TierFull)])
def test_a_failed_write_is_a_typed_error_and_can_be_tried_again(
    arena: Arena,
    open_disk: OpenDisk,
    storage: FaultyStorage,
    put_blocks: Any,
    call: str,
    number: int,
    kind: type[Exception],
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0], [1])
    storage.refuse = {call: OSError(number, "refused")}
    result = disk.write(POOL, u32(0), arena, u32(0))
    assert type(result.error) is kind
    assert result.written.tolist() == [False]
    storage.refuse = {}
    assert disk.write(POOL, u32(0), arena, u32(0)).written.all()
    assert disk.read(POOL, u32(0), u64(1), arena, u32(1)).ok.all()


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TierFailed, match="cannot make the directory"):
        DiskTier(str(tmp_path / "missing" / "data"), 1 << 20, 1 << 20, STORE, RealStorage())


def test_slots_outside_the_pool_are_refused(arena: Arena, open_disk: OpenDisk) -> None:
    disk = open_disk()
    with pytest.raises(InvariantViolation, match="slots are in the pool"):
        disk.read(POOL, u32(40), u64(1), arena, u32(0))
    with pytest.raises(InvariantViolation, match="pool 9 was not added"):
        disk.slot_count(9)
    with pytest.raises(InvariantViolation, match="another geometry"):
        disk.add_pool(POOL, BLOCK_BYTES, 1)


# --- sync -----------------------------------------------------------------------------------------


def test_a_segment_is_durable_before_it_has_its_name(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0], [1])
    storage.calls.clear()
    disk.write(POOL, u32(0), arena, u32(0))
    assert storage.calls == ["fallocate", "fdatasync", "rename", "fsync_dir", *write_calls(disk)]


def test_sync_covers_each_dirty_segment_once(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    disk.write(POOL, u32(0, 1, 16), arena, u32(0, 1, 2))
    storage.calls.clear()
    disk.sync()
    assert storage.calls == ["fdatasync"] * 2
    disk.sync()
    assert storage.calls == ["fdatasync"] * 2
    disk.write(POOL, u32(16), arena, u32(2))
    disk.sync()
    assert storage.calls == [*["fdatasync"] * 2, *write_calls(disk), "fdatasync"]


def test_the_device_begins_with_each_piece_before_a_sync(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    disk.write(POOL, u32(0, 1, 4), arena, u32(0, 1, 2))
    storage.calls.clear()
    assert disk.write(POOL, u32(0, 1, 4), arena, u32(0, 1, 2)).written.all()
    disk.sync()
    assert sorted(storage.calls[:-1]) == sorted(write_calls(disk) * 2)
    assert storage.calls[-1] == "fdatasync"
    assert scanned(disk) == {0: 1, 1: 2, 4: 3}


def test_a_damaged_block_between_sound_ones_leaves_its_slot_alone(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2, 3], [1, 2, 3, 4])
    assert disk.write(POOL, u32(5), arena, u32(3)).written.all()
    arena.payload(POOL)[1, 0] ^= 1
    storage.calls.clear()
    assert disk.write(POOL, u32(4, 5, 6), arena, u32(0, 1, 2)).written.tolist() == [
        True,
        False,
        True,
    ]
    assert storage.calls == write_calls(disk) * 2
    assert scanned(disk) == {4: 1, 5: 4, 6: 3}


def test_the_first_sync_covers_what_a_killed_process_left_unsynced(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    put_blocks(arena, POOL, [0, 1], [1, 2])
    open_disk().write(POOL, u32(0, 16), arena, u32(0, 1))
    storage.calls.clear()
    open_disk().sync()
    assert storage.calls.count("fdatasync") == 2
    assert storage.calls.count("fsync_dir") == 2  # the directory's own name, and the segments'


def test_after_a_failed_sync_no_later_one_succeeds(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0], [1])
    disk.write(POOL, u32(0), arena, u32(0))
    storage.refuse = {"fdatasync": OSError(errno.EIO, "refused")}
    with pytest.raises(TierFailed, match="cannot sync"):
        disk.sync()
    storage.refuse = {}
    with pytest.raises(TierFailed, match="cannot sync"):
        disk.sync()


def test_a_sync_waits_for_another_that_took_its_segments(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0], [1])
    disk.write(POOL, u32(0), arena, u32(0))
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []
    plain = storage.fdatasync

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(30)
        plain(fd)
        done.append("synced")

    storage.fdatasync = slow  # type: ignore[method-assign]  # a pause in the middle of a sync
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(disk.sync)
        assert begun.wait(30)
        second = pool.submit(lambda: (disk.sync(), done.append("second returned")))
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        go_on.set()
        first.result()
        second.result()
    assert done == ["synced", "second returned"]


# --- headers --------------------------------------------------------------------------------------


def test_headers_and_scan_read_entries_without_payload(
    arena: Arena, open_disk: OpenDisk, data: Path, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    disk.write(POOL, u32(35, 1, 17), arena, u32(0, 1, 2))
    with (data / "5000x16-00000001.seg").open("r+b") as file:
        file.seek(SLOT_BYTES + 40)
        file.write(b"\xff")
    entries, ok = disk.headers(POOL, u32(35, 17, 2, 1))
    assert ok.tolist() == [True, False, False, True]
    assert entries["id"].tolist() == [1, 0, 0, 2]
    np.testing.assert_array_equal(entries["tokens"][0], arena.table(POOL)["tokens"][0])
    assert scanned(disk) == {1: 2, 35: 1}
    scans = list(disk.scan(POOL))
    assert [scan.looked_at for scan in scans] == [16, 16, 8]
    assert sum(scan.looked_at for scan in scans) == disk.present_slots(POOL)
    assert [scan.damaged for scan in scans] == [0, 1, 0]


def test_a_bad_sector_costs_a_scan_one_slot(
    arena: Arena, open_disk: OpenDisk, storage: FaultyStorage, put_blocks: Any
) -> None:
    disk = open_disk()
    put_blocks(arena, POOL, [0, 1, 2], [1, 2, 3])
    disk.write(POOL, u32(0, 1, 2), arena, u32(0, 1, 2))
    storage.refuse_offset = SLOT_BYTES + 10
    assert [scan.damaged for scan in disk.scan(POOL)] == [1]
    assert scanned(disk) == {0: 1, 2: 3}


def test_slots_of_another_store_are_as_good_as_empty(
    arena: Arena, open_disk: OpenDisk, put_blocks: Any
) -> None:
    put_blocks(arena, POOL, [0, 1], [1, 2])
    open_disk().write(POOL, u32(0, 1), arena, u32(0, 1))
    other = open_disk(store=bytes(16))
    assert not other.read(POOL, u32(0), u64(1), arena, u32(5)).ok.any()
    assert scanned(other) == {}
    assert other.write(POOL, u32(0), arena, u32(0)).written.all()
    assert scanned(other) == {0: 1}


def test_the_segments_say_of_which_geometry_their_blocks_are(
    open_arena: Callable[..., Arena], open_disk: OpenDisk, data: Path, put_blocks: Any
) -> None:
    disk, arena = open_disk(), open_arena()
    shapes = [PoolShape(100, 15), PoolShape(100, 16), PoolShape(5000, 16)]
    for pool, shape in enumerate(shapes):
        for tier in (arena, disk):
            tier.add_pool(10 + pool, shape.block_bytes, shape.block_tokens)
        put_blocks(arena, 10 + pool, [0], [pool + 1])
        assert disk.write(10 + pool, u32(0), arena, u32(0)).written.all()
    (data / "0x16-00000000.seg").touch()
    (data / "100x17-1.seg").touch()
    again = open_disk()
    assert again.shapes() == shapes
    for pool, shape in enumerate(shapes[:2]):
        again.add_pool(20 + pool, shape.block_bytes, shape.block_tokens)
        assert scanned(again, 20 + pool) == {0: pool + 1}


def test_threads_write_and_read_at_the_same_time(
    open_arena: Callable[..., Arena], open_disk: OpenDisk, put_blocks: Any
) -> None:
    arena = open_arena(budget_bytes=4 << 20)
    arena.add_pool(POOL, BLOCK_BYTES, BLOCK_TOKENS)
    disk = open_disk(budget_bytes=160 * SLOT_BYTES)
    every = list(range(160))
    payload = put_blocks(arena, POOL, every, [slot + 1 for slot in every])

    def cycle(part: int) -> bool:
        slots = np.arange(part, 160, 4, dtype=np.uint32)
        result = disk.write(POOL, slots, arena, slots)
        disk.sync()
        good = disk.read(POOL, slots, slots.astype(np.uint64) + 1, arena, slots + np.uint32(160)).ok
        return result.error is None and bool(result.written.all() and good.all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(cycle, range(4)))
    np.testing.assert_array_equal(arena.payload(POOL)[160:320], payload)
