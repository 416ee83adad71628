"""Damage at rest and failing I/O: flagged, or torn where that is legal, never a wrong record."""

from __future__ import annotations

import errno
from dataclasses import replace
from random import Random

import pytest
from tierkv_wal import EndKind, WalCorrupt, WalDead, WalMisuse
from tierkv_wal.format import unpack_segment_header

HEADER = 4096
SLOT = 64
EIO = OSError(errno.EIO, "I/O error")
ENOSPC = OSError(errno.ENOSPC, "no space left")


@pytest.fixture
def filled(log, make_records):
    """A log of one segment with 6 frames of 2 records; the first 3 are known to be durable.

    Frame i has its header at lsn 3i + 1. The 4th and later say durable_lsn = 9.
    """
    writer = log.writer()
    for index in range(6):
        writer.append(make_records(2))
        writer.write()
        if index == 2:
            writer.sync()
    return log


@pytest.fixture
def long(log, make_records):
    """A log of 4 segments with one frame of 60 records each."""
    writer = log.writer()
    for _ in range(4):
        writer.append(make_records(60))
    writer.write()
    return log


def test_a_hole_in_frames_that_were_not_synced_is_a_torn_tail(filled):
    (path,) = filled.segments()
    before, _ = filled.read()
    for frame in (3, 4, 5):
        filled.flip(path, HEADER + SLOT * 3 * frame + 100)
        frames, end = filled.read()
        assert (end.kind, end.lsn) == (EndKind.TORN, 3 * frame)
        assert end.offset == HEADER + SLOT * 3 * frame
        assert end.reason == "the checksum of the frame does not match"
        assert [f.last_lsn for f in frames] == [f.last_lsn for f in before[:frame]]
        filled.flip(path, HEADER + SLOT * 3 * frame + 100)


def test_a_hole_in_synced_frames_is_corruption_because_a_later_frame_knew_them(filled):
    (path,) = filled.segments()
    for frame in (0, 1, 2):
        filled.flip(path, HEADER + SLOT * 3 * frame + 100)
        frames, end = filled.read()
        assert (end.kind, end.lsn, len(frames)) == (EndKind.CORRUPT, 3 * frame, frame)
        assert "the frame at lsn 10 knew it to be durable" in end.reason
        filled.flip(path, HEADER + SLOT * 3 * frame + 100)


def test_a_synced_frame_that_became_zero_is_corruption_and_an_unsynced_one_is_torn(filled):
    (path,) = filled.segments()
    data = filled.content(path)
    for frame, kind in ((1, EndKind.CORRUPT), (4, EndKind.TORN)):
        at = HEADER + SLOT * 3 * frame
        filled.replace(path, data[:at] + bytes(3 * SLOT) + data[at + 3 * SLOT :])
        assert filled.read()[1].kind is kind


def test_a_log_that_lost_its_last_frame_entirely_is_clean(filled):
    (path,) = filled.segments()
    at = HEADER + SLOT * 15
    filled.replace(path, filled.content(path)[:at].ljust(8192, b"\0"))
    assert filled.read()[1].kind is EndKind.CLEAN


def test_a_checkpoint_beyond_the_end_is_corruption(filled):
    (path,) = filled.segments()
    assert filled.read(after_lsn=18)[1].kind is EndKind.CLEAN
    assert filled.read(after_lsn=18)[1].left_bytes == 0
    filled.flip(path, HEADER + SLOT * 15)
    end = filled.read(after_lsn=15)[1]
    assert end.kind is EndKind.TORN
    assert 2 * SLOT < end.left_bytes <= 3 * SLOT  # a frame of two records, but for its last zeros
    _, end = filled.read(after_lsn=18)
    assert (end.kind, end.lsn) == (EndKind.CORRUPT, 15)
    assert end.reason == "the log ends at lsn 15, though the checkpoint is at lsn 18"


def test_a_frame_of_another_place_is_not_taken(filled):
    (path,) = filled.segments()
    data = filled.content(path)
    frame = data[HEADER + SLOT * 12 : HEADER + SLOT * 15]
    filled.replace(path, data[: HEADER + SLOT * 15] + frame + data[HEADER + SLOT * 18 :])
    frames, end = filled.read()
    assert (end.kind, end.lsn, len(frames)) == (EndKind.TORN, 15, 5)
    assert end.reason == "the frame says it is lsn 13"


def test_an_intact_frame_that_does_not_follow_on_its_predecessor_is_corruption(new_log):
    """Two writers' frames of one size, mixed: every checksum is right, the chain is not."""
    contents = []
    for fill in (b"a", b"b"):
        log = new_log()
        writer = log.writer()
        writer._segment = replace(writer._segment, salt=5)  # as if by the same salt
        for _ in range(2):
            writer.append(fill * 64)
            writer.write()
        (path,) = log.segments()
        data = log.content(path)
        header = replace(unpack_segment_header(data[:HEADER]), salt=5)
        contents.append(header.pack() + data[HEADER:])
    log.replace(path, contents[0][: HEADER + 2 * SLOT] + contents[1][HEADER + 2 * SLOT :])
    frames, end = log.read()
    assert (end.kind, end.lsn, len(frames)) == (EndKind.CORRUPT, 2, 1)
    assert end.reason == "the frame does not follow on the frame before it"


def test_every_flipped_bit_is_noticed_or_harmless(filled):
    """One bit of every byte that was written, one at a time."""
    (path,) = filled.segments()
    pristine = filled.content(path)
    good, _ = filled.read()
    used = [*range(96), *range(4080, HEADER + SLOT * 18)]
    for byte in used:
        filled.flip(path, byte, byte % 8)
        frames, end = filled.read()
        frame = (byte - HEADER) // (3 * SLOT)
        if frame < 0:
            assert (end.kind, frames) == (EndKind.CORRUPT, []), byte
        else:
            assert end.kind is (EndKind.CORRUPT if frame < 3 else EndKind.TORN), byte
            assert len(frames) == frame
        for found, expected in zip(frames, good, strict=False):
            assert found.first_lsn == expected.first_lsn
            assert found.records.tobytes() == expected.records.tobytes()
        filled.replace(path, pristine)


@pytest.mark.parametrize("index", range(4))
def test_a_segment_cut_at_any_slot_is_corruption_and_its_rest_is_still_read(long, index):
    """Preallocated files never shrink by themselves, so a short one is no torn tail."""
    path = long.segments()[index]
    pristine = long.content(path)
    good, _ = long.read()
    for length in [*range(0, len(pristine), 7 * SLOT), 8191]:
        long.replace(path, pristine[:length])
        frames, end = long.read()
        whole = index + (length >= HEADER + 61 * SLOT)
        assert (end.kind, end.path) == (EndKind.CORRUPT, path)
        assert [f.records.tobytes() for f in frames] == [f.records.tobytes() for f in good[:whole]]


@pytest.mark.parametrize("index", range(4))
def test_a_missing_segment_is_corruption_unless_it_was_the_last(long, index):
    """Of a lost last segment nothing can know but the checkpoint."""
    long.storage.unlink(long.segments()[index])
    frames, end = long.read()
    if index == 3:
        assert (end.kind, len(frames)) == (EndKind.CLEAN, 3)
        assert long.read(after_lsn=4 * 61)[1].kind is EndKind.CORRUPT
    else:
        assert (end.kind, end.lsn, len(frames)) == (EndKind.CORRUPT, 61 * index, index)
        assert "missing" in end.reason


def test_segments_before_the_checkpoint_may_be_damaged_or_missing(long):
    first, second, *_ = long.segments()
    long.flip(first, 8)
    long.storage.unlink(second)
    frames, end = long.read(after_lsn=2 * 61)
    assert (end.kind, len(frames)) == (EndKind.CLEAN, 2)


def test_damage_in_a_segment_with_a_successor_is_corruption_even_if_it_was_never_synced(long):
    long.flip(long.segments()[1], HEADER + 100)
    _, end = long.read()
    assert (end.kind, end.lsn, end.path) == (EndKind.CORRUPT, 61, long.segments()[1])
    assert "the next segment begins at lsn 123" in end.reason


def test_a_segment_of_another_store_is_corruption(long):
    long.uuid = b"another store..!"
    frames, end = long.read()
    assert (end.kind, frames) == (EndKind.CORRUPT, [])
    assert "is of store" in end.reason


def test_a_segment_under_another_name_is_corruption(long):
    long.storage.rename(long.segments()[3], f"{long.directory}/{9:016x}.wal")
    _, end = long.read()
    assert (end.kind, end.reason) == (EndKind.CORRUPT, "the file holds segment number 4")


def test_segments_that_do_not_connect_are_corruption(long):
    path = long.segments()[2]
    data = long.content(path)
    for first_lsn, frames_left, lsn in ((200, 2, 122), (124, 2, 122), (122, 1, 61), (50, 1, 61)):
        header = replace(unpack_segment_header(data[:HEADER]), first_lsn=first_lsn)
        long.replace(path, header.pack() + data[HEADER:])
        frames, end = long.read()
        assert (end.kind, end.lsn, len(frames)) == (EndKind.CORRUPT, lsn, frames_left), first_lsn


def test_a_log_that_begins_after_the_checkpoint_is_corruption(long):
    long.storage.unlink(long.segments()[0])
    assert long.read(after_lsn=61)[1].kind is EndKind.CLEAN
    frames, end = long.read(after_lsn=60)
    assert (frames, end.kind, end.lsn) == ([], EndKind.CORRUPT, 60)
    assert end.reason == "the segment with lsn 61 is missing"


def test_a_torn_tail_that_became_whole_after_the_next_writer_began_is_not_read(filled):
    (path,) = filled.segments()
    filled.flip(path, HEADER + SLOT * 12)
    writer = filled.writer()
    filled.flip(path, HEADER + SLOT * 12)
    writer.append(b"x" * SLOT)
    writer.write()
    frames, end = filled.read()
    assert [f.last_lsn for f in frames] == [3, 6, 9, 12, 14]
    assert (end.kind, frames[-1].records.tobytes()) == (EndKind.CLEAN, b"x" * SLOT)


def test_an_empty_directory_behind_a_checkpoint_is_corruption(log):
    _, end = log.read(after_lsn=5)
    assert (end.kind, end.lsn) == (EndKind.CORRUPT, 5)


# --- going on ------------------------------------------------------------------------------------


def test_a_torn_log_is_continued_in_a_new_segment(filled, make_records):
    (path,) = filled.segments()
    filled.flip(path, HEADER + SLOT * 12)
    torn = filled.content(path)
    writer = filled.writer()
    assert writer.appended_lsn == 12
    records = make_records(2)
    writer.append(records)
    writer.write()
    frames, end = filled.read()
    assert (end.kind, end.lsn) == (EndKind.CLEAN, 15)
    assert [f.last_lsn for f in frames] == [3, 6, 9, 12, 15]
    assert frames[-1].records.tobytes() == records
    assert filled.content(path) == torn


def test_a_corrupt_log_has_no_writer(filled):
    filled.flip(filled.segments()[0], HEADER)
    with pytest.raises(WalCorrupt, match="durable"):
        filled.writer()


def test_salvage_moves_the_old_segments_and_starts_above_every_lsn(long, make_records):
    old = long.segments()
    long.flip(old[1], 8)  # its header
    long.flip(old[3], 8)
    reader = long.reader()
    assert len(list(reader.frames())) == 1
    assert reader.end.kind is EndKind.CORRUPT
    resume_lsn = reader.resume_lsn
    assert resume_lsn >= 4 * 61
    writer = reader.salvage(2, "/store/quarantine", 8192)
    assert long.storage.listdir("/store/quarantine") == [path.split("/")[-1] for path in old]
    assert writer.segment_count == len(long.segments()) == 1
    assert writer.append(make_records(1)) == resume_lsn + 2
    writer.write()
    frames, end = long.read(after_lsn=resume_lsn)
    assert (len(frames), end.kind, end.lsn) == (1, EndKind.CLEAN, resume_lsn + 2)


def test_salvage_keeps_what_the_quarantine_holds(log, make_records):
    for epoch in (1, 2):
        log.replace(f"{log.directory}/{1:016x}.wal", b"damage %d" % epoch)
        reader = log.reader()
        list(reader.frames())
        reader.salvage(epoch, "/store/quarantine", 8192).close()
        for path in log.segments():
            log.storage.unlink(path)
    name = f"{1:016x}.wal"
    assert log.storage.listdir("/store/quarantine") == [name, name + "~"]
    assert log.content(f"/store/quarantine/{name}") == b"damage 1"


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("is_corrupt", [True, False])
def test_a_crash_within_salvage_leaves_a_log_that_follows_on_the_checkpoint(
    long, new_log, mode, is_corrupt
):
    if is_corrupt:
        long.flip(long.segments()[1], HEADER)
    reader = long.reader()
    list(reader.frames())
    resume_lsn = reader.resume_lsn
    salvaged_without_crash = 0
    for nth in range(1, 30):
        log = new_log(long.storage.crash(Random(0), "kill"))
        reader = log.reader()
        list(reader.frames())
        log.storage.inject(KeyboardInterrupt(), nth=nth)
        try:
            reader.salvage(2, "/store/quarantine", 8192)
            salvaged_without_crash += 1
        except KeyboardInterrupt:
            pass
        after = new_log(log.storage.crash(Random(nth), mode))
        reader = after.reader(resume_lsn)
        assert list(reader.frames()) == []
        if reader.end.kind is EndKind.CORRUPT:  # the new segment was not there yet
            reader.salvage(3, "/store/quarantine", 8192)
            _, end = after.read(resume_lsn)
            assert (end.kind, end.lsn) == (EndKind.CLEAN, resume_lsn)
        else:
            assert (reader.end.kind, reader.end.lsn) == (EndKind.CLEAN, resume_lsn)
    assert 0 < salvaged_without_crash < 29


def test_a_sound_log_without_its_checkpoint_can_be_salvaged(filled):
    old = filled.segments()
    reader = filled.reader(after_lsn=None)
    frames = list(reader.frames())
    reader.salvage(2, "/store/quarantine", 8192)
    assert filled.storage.listdir("/store/quarantine") == [path.split("/")[-1] for path in old]
    _, end = filled.read(frames[-1].last_lsn)
    assert (end.kind, end.lsn) == (EndKind.CLEAN, frames[-1].last_lsn)


# --- failing I/O ---------------------------------------------------------------------------------


def test_a_read_error_is_raised_and_is_not_the_end_of_the_log(long):
    before = len(long.storage.history)
    long.read()
    calls = len(long.storage.history) - before
    assert calls > 4 * 6
    for nth in range(1, calls + 1):
        reader = long.reader()
        long.storage.inject(EIO, nth=nth)
        with pytest.raises(OSError, match="I/O error"):
            list(reader.frames())
        with pytest.raises(WalMisuse):
            _ = reader.end


def test_what_the_kernel_lost_in_a_failed_sync_is_not_read(log, make_records):
    """The page cache goes on showing it, so the reader looks at the device."""
    writer = log.writer()
    writer.append(make_records(1))
    writer.write()
    writer.sync()
    writer.append(make_records(10))
    writer.write()
    log.storage.inject(EIO, "fdatasync")
    with pytest.raises(OSError, match="I/O error"):
        writer.sync()
    frames, end = log.read()
    assert (len(frames), end.lsn, end.kind) == (1, 2, EndKind.CLEAN)


@pytest.mark.parametrize("error", [EIO, ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("pwrite", "write"),
        ("fdatasync", "sync"),
        ("pwrite", "append"),
        ("fdatasync", "append"),
        ("open", "append"),
        ("fallocate", "append"),
        ("rename", "append"),
        ("fsync_dir", "append"),
    ],
)
def test_after_an_error_of_a_write_or_a_sync_the_writer_is_dead(
    log, make_records, error, call, step
):
    writer = log.writer()
    writer.append(make_records(40))
    writer.write()
    durable_lsn = writer.durable_lsn
    writer.append(make_records(5))
    log.storage.inject(error, call, written_bytes=100)
    steps = {
        "write": writer.write,
        "sync": writer.sync,
        "append": lambda: writer.append(make_records(40)),
    }
    with pytest.raises(OSError, match=error.strerror) as raised:
        steps[step]()
    assert raised.value is error
    for again in (*steps.values(), writer.prepare_spare, lambda: writer.forget(1)):
        with pytest.raises(WalDead, match=error.strerror):
            again()
    if (call, step) != ("fdatasync", "append"):
        assert writer.durable_lsn in (durable_lsn, writer.written_lsn)
    writer.close()
    assert log.read()[1].kind is not EndKind.CORRUPT


@pytest.mark.parametrize("call", ["open", "fallocate", "fdatasync", "fsync_dir"])
def test_a_spare_that_cannot_be_made_leaves_the_writer_alive(log, make_records, call):
    writer = log.writer()
    log.storage.inject(ENOSPC, call)
    with pytest.raises(OSError, match="no space left"):
        writer.prepare_spare()
    for _ in range(2):
        writer.append(make_records(60))
    writer.close()
    assert [len(f.records) for f in log.read()[0]] == [60, 60]


def test_a_segment_that_cannot_be_removed_leaves_the_writer_alive(log, make_records):
    writer = log.writer()
    for _ in range(3):
        writer.append(make_records(60))
    log.storage.inject(EIO, "unlink", nth=2)
    with pytest.raises(OSError, match="I/O error"):
        writer.forget(10**6)
    assert writer.segment_count == len(log.segments()) == 2
    assert writer.forget(10**6) == 1
