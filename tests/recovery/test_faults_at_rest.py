"""A store that was damaged while no daemon ran: cut off, with bits flipped, with files gone.

Every case copies one store, damages the copy in one place, and lets another process recover it:
it must not die or hang, must never show a wrong byte, and keeps what the damage did not touch.
TIERKV_CRASH_SEED chooses the places.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from damaged import CHAINS, HELD, Found, LogFrame, Recoverer, Store, make_store, temporary_folder
from recovery_harness import DISK_SEGMENT_BYTES, SHAPE, SIZE
from tierkv_wal.format import HEADER_BYTES

from tierkv.core.spec import PAGE
from tierkv.tiers.disk import disk_slot_bytes

SEED = int(os.environ.get("TIERKV_CRASH_SEED", "20253"))
WHOLE = [len(tokens) // SIZE for tokens in CHAINS]
SLOT_BYTES = disk_slot_bytes(SHAPE.block_bytes, SHAPE.block_tokens)
SLOTS_PER_SEGMENT = DISK_SEGMENT_BYTES // SLOT_BYTES
pytestmark = pytest.mark.timeout(180)

Damage = Callable[[Path], None]


@dataclass
class Bench:
    """Damages copies of the store and sees what recovery makes of them."""

    store: Store
    folder: Path
    recoverer: Recoverer
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def after(self, path: Path, damage: Damage, *, with_ram: bool = False) -> Found:
        """What is found after ``damage`` was done to the file or folder; no wrong byte."""
        copy = self.store.copy(self.folder / str(next(self._numbers)), with_ram=with_ram)
        damage(copy / path)
        try:
            found = self.recoverer.recover(copy)
        finally:
            shutil.rmtree(copy)
        assert found.wrong == []
        return found

    def offsets(self, count: int, begin: int, end: int) -> list[int]:
        """So many places between two others, the first and the last among them."""
        inner = self.chance.sample(range(begin, end), min(count, end - begin))
        return sorted({begin, end - 1, *inner})


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    print(f"TIERKV_CRASH_SEED={SEED}")
    with temporary_folder() as folder, Recoverer() as recoverer:
        bench = Bench(make_store(Path(folder) / "whole"), Path(folder), recoverer)
        yield bench
        print(f"{next(bench._numbers)} damaged stores were recovered")


def flip(offset: int, bit: int) -> Damage:
    """Invert one bit."""

    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit]))

    return damage


def cut_to(size: int) -> Damage:
    """Truncate."""
    return lambda path: os.truncate(path, size)


def remove(path: Path) -> None:
    """Unlink a file, or a folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def keeps_what_was_acknowledged_before(bench: Bench, found: Found, lsn: int) -> None:
    for number, acknowledged in enumerate(bench.store.lsn_of):
        if acknowledged < lsn:
            assert found.blocks[number] == WHOLE[number], f"chain {number} of {acknowledged}"


# --- the log --------------------------------------------------------------------------------------


def is_provably_lost(bench: Bench, damaged: LogFrame) -> bool:
    """Whether the log can tell that this frame had been synced."""
    frames = bench.store.frames()
    return damaged.path != frames[-1].path or any(
        later.durable_lsn >= damaged.lsn
        for later in frames
        if later.path == damaged.path and later.lsn > damaged.lsn
    )


def test_the_store_is_worth_damaging(bench: Bench) -> None:
    found = bench.after(Path(), lambda _path: None, with_ram=True)
    assert (found.blocks, found.wal_end, found.quarantined) == (WHOLE, "clean", [])
    frames = bench.store.frames()
    assert len(bench.store.log()) >= 3
    assert len(bench.store.payload_segments()) >= 4
    assert 0 < sum(is_provably_lost(bench, frame) for frame in frames) < len(frames)


def test_a_bit_flipped_in_a_frame_costs_what_came_after_it(bench: Bench) -> None:
    frames = bench.store.frames()
    for frame in [*frames[::2], *frames[-6:]]:
        offset = bench.chance.randrange(frame.offset, frame.end)
        found = bench.after(frame.path, flip(offset, bench.chance.randrange(8)))
        keeps_what_was_acknowledged_before(bench, found, frame.lsn)
        flagged = found.wal_end == "corrupt"
        assert flagged == is_provably_lost(bench, frame), f"{frame} at {offset}: {found}"
        assert bool(found.quarantined) == flagged


def test_a_bit_flipped_in_a_segments_header_is_corruption(bench: Bench) -> None:
    for path in bench.store.log():
        lsn = next(frame.lsn for frame in bench.store.frames() if frame.path == path)
        for offset in bench.offsets(6, 0, HEADER_BYTES):
            found = bench.after(path, flip(offset, bench.chance.randrange(8)))
            assert found.wal_end == "corrupt", (path, offset)
            assert found.quarantined
            keeps_what_was_acknowledged_before(bench, found, lsn)


def test_a_bit_flipped_behind_the_last_frame_costs_nothing(bench: Bench) -> None:
    for path in bench.store.log():
        end = max(frame.end for frame in bench.store.frames() if frame.path == path)
        if end == bench.store.size(path):
            continue
        for offset in bench.offsets(4, end, bench.store.size(path)):
            found = bench.after(path, flip(offset, bench.chance.randrange(8)))
            assert found.blocks == WHOLE
            assert found.wal_end in ("clean", "torn")
            assert not found.quarantined


def test_a_log_segment_that_was_cut_off_is_corruption(bench: Bench) -> None:
    for path in bench.store.log():
        frames = [frame for frame in bench.store.frames() if frame.path == path]
        for size in [0, 1, *bench.offsets(8, HEADER_BYTES, bench.store.size(path))]:
            found = bench.after(path, cut_to(size))
            assert found.wal_end == "corrupt", (path, size)
            assert found.quarantined
            kept = [frame.last_lsn for frame in frames if frame.end <= size]
            keeps_what_was_acknowledged_before(bench, found, max(kept, default=frames[0].lsn - 1))


def test_a_log_segment_that_is_gone_is_missed(bench: Bench) -> None:
    *all_but_last, last = bench.store.log()
    for path in all_but_last:
        lsn = next(frame.lsn for frame in bench.store.frames() if frame.path == path)
        found = bench.after(path, remove)
        # Without its beginning the log says nothing, and the slots are asked instead.
        assert found.wal_end == ("set aside" if path == all_but_last[0] else "corrupt"), path
        assert found.quarantined
        keeps_what_was_acknowledged_before(bench, found, lsn)
    # That there was one more, nothing tells.
    found = bench.after(last, remove)
    lsn = next(frame.lsn for frame in bench.store.frames() if frame.path == last)
    keeps_what_was_acknowledged_before(bench, found, lsn)


def test_a_log_that_is_gone_leaves_what_the_checkpoint_holds(bench: Bench) -> None:
    found = bench.after(Path("state/wal"), remove)
    assert found.wal_end == "corrupt"
    keeps_what_was_acknowledged_before(bench, found, 1)


# --- the index ------------------------------------------------------------------------------------

INDEX = Path("state/index/data.mdb")


def keeps_every_block(found: Found) -> None:
    """Whatever happened to the index, slot headers and log still tell what is on disk."""
    assert not found.refused
    assert found.blocks == WHOLE
    assert bool(found.quarantined) == (found.wal_end == "set aside"), found


def test_an_index_that_was_cut_off_is_noticed(bench: Bench) -> None:
    size = bench.store.size(INDEX)
    pages = range(0, size, PAGE)
    odd = bench.offsets(12, 1, size)
    for length in sorted({*pages[:6], *pages[:: max(1, len(pages) // 12)], *odd, size - 1}):
        keeps_every_block(bench.after(INDEX, cut_to(length)))


def test_a_bit_flipped_in_the_index_is_noticed(bench: Bench) -> None:
    size = bench.store.size(INDEX)
    meta_pages = bench.offsets(24, 0, 200) + bench.offsets(24, PAGE, PAGE + 200)
    for offset in [*meta_pages, *bench.offsets(70, 2 * PAGE, size)]:
        keeps_every_block(bench.after(INDEX, flip(offset, bench.chance.randrange(8))))


@pytest.mark.parametrize("path", [INDEX, INDEX.parent, INDEX.with_name("lock.mdb")], ids=str)
def test_an_index_that_is_gone_is_noticed(bench: Bench, path: Path) -> None:
    keeps_every_block(bench.after(path, remove))


# --- payload on disk ------------------------------------------------------------------------------


def expected_without(bench: Bench, slots: set[int]) -> list[int]:
    """Leading blocks of each chain if these disk slots hold nothing."""
    expected = list(WHOLE)
    for (number, block), slot in bench.store.places.items():
        if slot in slots:
            expected[number] = min(expected[number], block)
    return expected


def in_segment(bench: Bench, index: int) -> set[int]:
    used = set(bench.store.places.values())
    return {slot for slot in used if slot // SLOTS_PER_SEGMENT == index}


def test_a_bit_flipped_in_a_slot_costs_that_block_only(bench: Bench) -> None:
    for slot in sorted(set(bench.store.places.values()))[::5]:
        segment, place = divmod(slot, SLOTS_PER_SEGMENT)
        path, start = bench.store.payload_segments()[segment], place * SLOT_BYTES
        payload = start + SLOT_BYTES - PAGE
        header = bench.offsets(2, start, payload)
        content = bench.offsets(1, payload, payload + SHAPE.block_bytes)
        for offset in [*header, *content]:
            found = bench.after(path, flip(offset, bench.chance.randrange(8)))
            assert found.blocks == expected_without(bench, {slot}), (path, offset)
            assert (found.wal_end, found.quarantined) == ("clean", [])
        behind = bench.chance.randrange(payload + SHAPE.block_bytes, start + SLOT_BYTES)
        assert bench.after(path, flip(behind, 0)).blocks == WHOLE


def test_a_payload_segment_that_was_cut_off_costs_what_lay_behind(bench: Bench) -> None:
    for index, path in enumerate(bench.store.payload_segments()):
        for size in [0, *bench.offsets(3, 1, bench.store.size(path))]:
            # A slot is whole up to the end of its payload: what comes then has no meaning.
            gone = {
                slot
                for slot in in_segment(bench, index)
                if slot % SLOTS_PER_SEGMENT * SLOT_BYTES + SLOT_BYTES - PAGE + SHAPE.block_bytes
                > size
            }
            found = bench.after(path, cut_to(size))
            assert found.blocks == expected_without(bench, gone), (path, size)


def test_a_payload_segment_that_is_gone_costs_its_blocks_only(bench: Bench) -> None:
    for index, path in enumerate(bench.store.payload_segments()):
        found = bench.after(path, remove)
        assert found.blocks == expected_without(bench, in_segment(bench, index))


# --- FORMAT ---------------------------------------------------------------------------------------

FORMAT = Path("state/FORMAT")


def test_a_damaged_format_is_refused(bench: Bench) -> None:
    size = bench.store.size(FORMAT)
    for offset in bench.offsets(12, 0, size - 1):
        found = bench.after(FORMAT, flip(offset, bench.chance.randrange(8)))
        assert found.refused.startswith("CorruptionError"), (offset, found)
    for length in [0, 1, size // 2, size - 2]:
        found = bench.after(FORMAT, cut_to(length))
        assert found.refused.startswith("CorruptionError"), (length, found)


def test_a_format_that_is_gone_makes_the_log_a_strangers(bench: Bench) -> None:
    found = bench.after(FORMAT, remove, with_ram=True)
    assert found.wal_end == "corrupt"
    assert found.quarantined


# --- RAM tiers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["device.table", "host.table"])
def test_a_damaged_slot_table_costs_copies_but_no_block(bench: Bench, name: str) -> None:
    path = Path("arena") / name
    size = bench.store.size(path)
    header, pools = bench.offsets(10, 0, 128), bench.offsets(6, PAGE, PAGE + 64)
    for offset in [*header, *pools, *bench.offsets(16, 2 * PAGE, size)]:
        found = bench.after(path, flip(offset, bench.chance.randrange(8)), with_ram=True)
        assert found.blocks == WHOLE, offset
    for length in [0, 1, *bench.offsets(5, 2, size)]:
        assert bench.after(path, cut_to(length), with_ram=True).blocks == WHOLE, length
    assert bench.after(path, remove, with_ram=True).blocks == WHOLE


def test_a_damaged_payload_in_the_device_arena_is_read_from_disk(bench: Bench) -> None:
    path = Path("arena/device.arena")
    for (number, block), start in list(bench.store.device.items())[::3]:
        offset = start + bench.chance.randrange(SHAPE.block_bytes)
        found = bench.after(path, flip(offset, bench.chance.randrange(8)), with_ram=True)
        expected = list(WHOLE)
        if number == HELD:
            # A worker has it mapped, so it stays where it is, and nobody else is given it.
            expected[number] = block
        assert found.blocks == expected


@pytest.mark.parametrize("name", ["device.arena", "host.arena"])
def test_an_arena_that_was_cut_off_or_is_gone_is_made_anew(bench: Bench, name: str) -> None:
    path = Path("arena") / name
    for length in [0, 1, PAGE, bench.store.size(path) - 1]:
        assert bench.after(path, cut_to(length), with_ram=True).blocks == WHOLE
    assert bench.after(path, remove, with_ram=True).blocks == WHOLE
