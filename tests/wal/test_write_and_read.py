"""What is written is read: LSNs, frames, segments, rotation, the spare, forgetting."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tierkv_wal import (
    FRAME_RECORDS_MAX,
    EndKind,
    RealStorage,
    WalMisuse,
    WalReader,
)

SLOTS = 64  # of a segment of 8 KiB


def test_an_empty_directory_is_a_clean_log_that_ends_at_0(log):
    frames, end = log.read()
    assert frames == []
    assert (end.kind, end.lsn, end.reason) == (EndKind.CLEAN, 0, "")


def test_append_returns_the_exact_lsn_while_the_frame_is_open(log, make_records):
    writer = log.writer()
    assert writer.append(make_records(1)) == 2  # slot 1 is the frame's header
    assert writer.append(make_records(3)) == 5
    assert (writer.appended_lsn, writer.written_lsn, writer.durable_lsn) == (5, 0, 0)
    assert writer.write() == 5
    assert (writer.appended_lsn, writer.written_lsn, writer.durable_lsn) == (5, 5, 0)
    assert writer.append(make_records(1)) == 7
    assert writer.sync() == 5  # the open frame is not written, so not synced
    assert writer.write() == 7
    assert writer.sync() == 7
    assert writer.bytes_written == 7 * 64


@pytest.mark.parametrize("after_lsn", [0, 30])
def test_how_many_records_are_to_be_read_is_known_at_the_first_frame(log, make_records, after_lsn):
    writer = log.writer()
    for _ in range(50):
        writer.append(make_records(2))
        writer.write()
    reader = log.reader(after_lsn)
    assert reader.records_at_most == 0
    frames = reader.frames()
    records = len(next(frames).records)
    at_most = reader.records_at_most
    records += sum(len(frame.records) for frame in frames)
    assert records <= at_most <= writer.appended_lsn - after_lsn + 2 * SLOTS


def test_frames_come_back_as_they_were_written(log, make_records):
    writer = log.writer()
    first, second, third = make_records(2), make_records(3), make_records(1)
    writer.append(first, flags=1)
    writer.append(second, flags=4)
    writer.write()
    writer.append(third)
    writer.write()
    frames, end = log.read()
    assert (end.kind, end.lsn, end.offset) == (EndKind.CLEAN, 8, 4096 + 8 * 64)
    assert [(f.first_lsn, f.last_lsn, f.epoch, f.flags) for f in frames] == [
        (2, 6, 1, 5),
        (8, 8, 1, 0),
    ]
    records = frames[0].records
    assert records.tobytes() == first + second
    assert records.shape == (5, 64)
    assert records.dtype == np.uint8
    assert records.flags.c_contiguous
    assert not records.flags.writeable
    assert frames[1].records.tobytes() == third


def test_any_contiguous_buffer_of_records_is_taken(log):
    structured = np.zeros(3, np.dtype([("a", "<u4"), ("b", "S60")]))
    structured["a"] = [7, 8, 9]
    writer = log.writer()
    writer.append(structured)
    writer.append(structured.view(np.uint8).reshape(3, 64))
    writer.append(memoryview(structured.tobytes()))
    writer.write()
    frames, _ = log.read()
    assert frames[0].records.tobytes() == structured.tobytes() * 3


@pytest.mark.parametrize(
    "records",
    [b"", bytes(63), bytes(65), bytes(64 * SLOTS), np.zeros((4, 128), np.uint8)[:, ::2]],
    ids=["none", "too short", "odd", "more than a segment", "not contiguous"],
)
def test_append_refuses_what_is_not_records(log, records):
    writer = log.writer()
    with pytest.raises(ValueError, match="must be a C-contiguous buffer of 1 to 63 records"):
        writer.append(records)
    assert writer.appended_lsn == 0


def test_append_refuses_flags_beyond_16_bits(log, make_records):
    with pytest.raises(ValueError, match="16 bits"):
        log.writer().append(make_records(1), flags=1 << 16)


def test_write_without_records_writes_nothing(log):
    writer = log.writer()
    before = len(log.storage.history)
    assert writer.write() == 0
    assert writer.sync() == 0
    assert len(log.storage.history) == before


def test_a_frame_is_one_pwrite(log, make_records):
    writer = log.writer()
    writer.append(make_records(20))
    before = len(log.storage.history)
    writer.write()
    assert [name for name, _ in log.storage.history[before:]] == ["pwrite"]


def test_the_largest_frame_is_full_and_the_next_append_opens_another(log):
    writer = log.writer(segment_bytes=16 << 20)
    half = np.arange(40_000 * 8, dtype="<u8").reshape(-1, 8)
    assert writer.append(half) == 40_001
    assert writer.append(half) == 80_002
    assert writer.written_lsn == 40_001
    largest = np.arange(FRAME_RECORDS_MAX * 8, dtype="<u8").reshape(-1, 8)
    writer.append(largest)
    with pytest.raises(ValueError, match="1 to 65535 records"):
        writer.append(bytes(64 * (FRAME_RECORDS_MAX + 1)))
    writer.write()
    frames, end = log.read()
    assert [len(f.records) for f in frames] == [40_000, 40_000, FRAME_RECORDS_MAX]
    assert np.array_equal(frames[2].records.view("<u8"), largest)
    assert end.lsn == writer.written_lsn


def test_many_frames_over_many_segments(log, make_records):
    writer = log.writer()
    written = {}
    for index in range(200):
        records = make_records(1 + index * 7 % 20)
        written[writer.append(records)] = records
        if index % 3 == 0:
            writer.write()
    writer.write()
    assert writer.segment_count == len(log.segments()) > 30
    frames, end = log.read()
    assert (end.kind, end.lsn) == (EndKind.CLEAN, writer.written_lsn)
    rows = {f.first_lsn + i: row for f in frames for i, row in enumerate(f.records)}
    for last_lsn, records in written.items():
        count = len(records) // 64
        found = b"".join(rows.pop(last_lsn - count + 1 + i).tobytes() for i in range(count))
        assert found == records
    assert not rows


def test_an_append_that_does_not_fit_goes_whole_into_the_next_segment(log, make_records):
    writer = log.writer()
    writer.append(make_records(SLOTS - 2))  # with its header all slots but one
    assert writer.append(make_records(1)) == SLOTS
    assert writer.segment_count == 1
    assert writer.append(make_records(1)) == SLOTS + 2
    assert (writer.segment_count, writer.written_lsn) == (2, SLOTS)
    assert writer.append(make_records(SLOTS - 2)) == 2 * SLOTS
    writer.write()
    frames, _ = log.read()
    assert [len(f.records) for f in frames] == [SLOTS - 1, SLOTS - 1]


def test_after_lsn_skips_what_the_checkpoint_holds(log, make_records):
    writer = log.writer()
    chunks = [make_records(10) for _ in range(12)]
    for chunk in chunks:
        writer.append(chunk)
        writer.write()
    assert writer.segment_count == 3
    everything, _ = log.read()
    for index, frame in enumerate(everything):
        beyond, end = log.read(after_lsn=frame.last_lsn)
        assert [f.first_lsn for f in beyond] == [f.first_lsn for f in everything[index + 1 :]]
        assert (end.kind, end.lsn) == (EndKind.CLEAN, writer.written_lsn)


def test_a_frame_that_after_lsn_divides_comes_without_its_start(log, make_records):
    writer = log.writer()
    records = make_records(5)
    writer.append(records)
    writer.write()
    (frame,), _ = log.read(after_lsn=4)
    assert (frame.first_lsn, frame.last_lsn) == (5, 6)
    assert frame.records.tobytes() == records[3 * 64 :]


def test_rotation_syncs_the_old_segment_before_the_new_one_appears(log, make_records):
    writer = log.writer()
    writer.append(make_records(50))
    before = len(log.storage.history)
    writer.append(make_records(50))
    old, new = log.segments()
    spare = f"{log.directory}/next.tmp"
    steps = [step for step in log.storage.history[before:] if step[0] != "listdir"]
    assert steps == [
        ("pwrite", old),
        ("fdatasync", old),
        ("open", spare),
        ("fallocate", spare),
        ("pwrite", spare),
        ("fdatasync", spare),
        ("rename", spare),
        ("fsync_dir", log.directory),
        ("close", old),
    ]
    assert writer.durable_lsn == writer.written_lsn == 51
    assert log.storage.size(new) == 8192


def test_a_writer_never_touches_an_old_segment(log, make_records):
    writer = log.writer()
    for _ in range(3):
        writer.append(make_records(30))
        writer.write()
    before = {path: log.content(path) for path in log.segments()}
    start = len(log.storage.history)
    second = log.writer()
    second.append(make_records(30))
    second.write()
    assert {path: log.content(path) for path in before} == before
    writes = [path for name, path in log.storage.history[start:] if name == "pwrite"]
    assert not set(writes) & set(before)


def test_a_new_writer_continues_after_the_end_with_a_higher_epoch(log, make_records):
    writer = log.writer()
    writer.append(make_records(3))
    writer.write()
    writer.append(make_records(2))  # never written: dies with the process
    second = log.writer()
    assert second.appended_lsn == second.written_lsn == second.durable_lsn == 4
    second.append(make_records(1))
    second.write()
    frames, end = log.read()
    assert [(f.first_lsn, f.epoch) for f in frames] == [(2, 1), (6, 2)]
    assert end.lsn == 6


def test_writers_that_wrote_nothing_leave_no_gap(log, make_records):
    for _ in range(3):
        log.writer()
    writer = log.writer()
    writer.append(make_records(1))
    writer.write()
    (frame,), end = log.read()
    assert (frame.epoch, end.kind, len(log.segments())) == (4, EndKind.CLEAN, 4)


def test_an_epoch_cannot_come_again(log):
    log.writer()
    reader = log.reader()
    list(reader.frames())
    assert reader.epoch == 1
    with pytest.raises(ValueError, match="epoch 1 must be above 1"):
        reader.writer(epoch=1)


def test_a_prepared_spare_becomes_the_next_segment(log, make_records):
    writer = log.writer()
    writer.prepare_spare()
    before = len(log.storage.history)
    writer.prepare_spare()
    assert len(log.storage.history) == before
    writer.append(make_records(60))
    writer.append(make_records(60))
    assert "next.tmp" not in log.storage.listdir(log.directory)
    writer.prepare_spare()
    assert log.storage.size(f"{log.directory}/next.tmp") == 8192
    writer.write()
    frames, _ = log.read()
    assert [len(f.records) for f in frames] == [60, 60]


@pytest.mark.parametrize("leftover", [100, 8192, 20_000], ids=["shorter", "same", "longer"])
def test_a_leftover_spare_of_any_size_is_used(log, make_records, leftover):
    log.replace(f"{log.directory}/next.tmp", bytes(leftover))
    writer = log.writer()
    writer.append(make_records(1))
    writer.write()
    assert [log.storage.size(path) for path in log.segments()] == [8192]
    assert log.read()[1].kind is EndKind.CLEAN


def test_forget_removes_only_segments_that_the_checkpoint_covers(log, make_records):
    writer = log.writer()
    ends = [writer.append(make_records(60)) for _ in range(4)]
    writer.write()
    assert writer.forget(ends[0] - 1) == 0
    assert writer.forget(ends[1]) == 2
    assert writer.segment_count == len(log.segments()) == 2
    frames, end = log.read(after_lsn=ends[1])
    assert [f.last_lsn for f in frames] == ends[2:]
    assert writer.forget(10**9) == 1  # the current one stays
    assert writer.segment_count == 1
    assert (end.kind, log.read(ends[3])[1].lsn) == (EndKind.CLEAN, ends[3])


def test_a_new_writer_forgets_the_segments_of_its_predecessors(log, make_records):
    first = log.writer()
    ends = [first.append(make_records(60)) for _ in range(3)]
    first.write()
    second = log.writer(after_lsn=ends[1])
    assert second.segment_count == 4
    assert second.forget(ends[1]) == 2
    assert second.forget(ends[2]) == 1
    assert second.segment_count == len(log.segments()) == 1


def test_without_a_checkpoint_a_tool_reads_from_the_oldest_segment(log, make_records):
    writer = log.writer()
    ends = [writer.append(make_records(60)) for _ in range(3)]
    writer.write()
    writer.forget(ends[0])
    frames, end = log.read(after_lsn=None)
    assert [f.last_lsn for f in frames] == ends[1:]
    assert end.kind is EndKind.CLEAN


def test_other_files_in_the_directory_are_not_segments(log, make_records):
    writer = log.writer()
    writer.append(make_records(1))
    writer.write()
    for name in ("1.wal", "0000000000000009.wal.bak", "README", "next.tmp"):
        log.replace(f"{log.directory}/{name}", b"something")
    frames, end = log.read()
    assert (len(frames), end.kind) == (1, EndKind.CLEAN)


def test_end_and_writer_need_a_finished_reader(log, make_records):
    writer = log.writer()
    for _ in range(2):
        writer.append(make_records(1))
        writer.write()
    reader = log.reader()
    iterator = reader.frames()
    next(iterator)
    for use in (lambda: reader.end, lambda: reader.epoch, lambda: reader.writer(9)):
        with pytest.raises(WalMisuse):
            use()
    list(iterator)
    assert reader.end.kind is EndKind.CLEAN
    with pytest.raises(WalMisuse):
        reader.frames()
    reader.writer(9, 8192)
    with pytest.raises(WalMisuse):
        reader.writer(10, 8192)


def test_close_writes_and_syncs_the_open_frame(log, make_records):
    writer = log.writer()
    writer.append(make_records(1))
    writer.close()
    writer.close()
    assert writer.durable_lsn == 2
    assert log.read()[1].lsn == 2
    with pytest.raises(WalMisuse):
        writer.append(make_records(1))


@pytest.mark.parametrize("segment_bytes", [4096, 8193, 0])
def test_segment_bytes_must_be_pages(log, segment_bytes):
    with pytest.raises(ValueError, match="multiple of 4096"):
        log.writer(segment_bytes=segment_bytes)


def test_on_real_files_with_syncs_and_spares_in_another_thread(tmp_path):
    storage, directory, uuid = RealStorage(), str(tmp_path), bytes(16)
    reader = WalReader(storage, directory, uuid, 0)
    assert list(reader.frames()) == []
    writer = reader.writer(1, segment_bytes=64 * 1024)
    stop = threading.Event()
    durable: list[int] = []
    failures: list[BaseException] = []

    def keep_syncing() -> None:
        try:
            while not stop.is_set():
                durable.append(writer.sync())
                writer.prepare_spare()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=keep_syncing)
    thread.start()
    records = np.random.default_rng(1).integers(0, 256, (5_000, 64), np.uint8)
    for start in range(0, 5_000, 25):
        writer.append(records[start : start + 25])
        writer.write()
    stop.set()
    thread.join()
    writer.close()
    assert not failures
    assert durable == sorted(durable)
    assert writer.durable_lsn == writer.written_lsn == 5_200
    reader = WalReader(storage, directory, uuid, 0)
    found = np.concatenate([frame.records for frame in reader.frames()])
    assert np.array_equal(found, records)
    assert (reader.end.kind, writer.segment_count) == (EndKind.CLEAN, 6)
