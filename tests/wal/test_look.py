"""Looking behind damage: what a tool sees of a log that a reader gives up."""

from __future__ import annotations

import pytest
from tierkv_wal import WalVersion
from tierkv_wal.format import frame_checksum, unpack_segment_header
from tierkv_wal.look import Fault, SeenFrame, look
from tierkv_wal.segment import SegmentFile


def seen(log, from_lsn: int = 0) -> list[SegmentFile | SeenFrame | Fault]:
    return list(look(log.storage, log.directory, log.uuid, from_lsn))


def frames(log, from_lsn: int = 0) -> list[tuple[int, bool]]:
    """LSN of each frame and whether a reader would get there."""
    found = (one for one in seen(log, from_lsn) if isinstance(one, SeenFrame))
    return [(one.header.lsn, one.is_reached) for one in found]


def faults(log) -> list[tuple[str, int, int | None]]:
    found = (one for one in seen(log) if isinstance(one, Fault))
    return [(one.path, one.offset, one.lsn) for one in found]


@pytest.fixture
def filled(log, make_records):
    """Three segments with frames of two records, all synced."""
    writer = log.writer()
    while writer.segment_count < 3:
        writer.append(make_records(2))
        writer.write()
        writer.sync()
    return log


def test_of_a_sound_log_it_sees_what_a_reader_sees(filled) -> None:
    read, _ = filled.read()
    found = [one for one in seen(filled) if isinstance(one, SeenFrame)]
    assert [one.records.tobytes() for one in found] == [one.records.tobytes() for one in read]
    assert all(one.is_reached for one in found)
    assert faults(filled) == []
    assert [one.path for one in seen(filled) if isinstance(one, SegmentFile)] == filled.segments()


def test_it_begins_where_it_is_told(filled) -> None:
    assert frames(filled, from_lsn=6) == [one for one in frames(filled) if one[0] + 2 >= 6]
    assert frames(filled, from_lsn=5)[0] == (4, True)


@pytest.mark.parametrize("byte", [0, 8, 32, 48, 64])
def test_behind_a_rotten_frame_it_goes_on_in_the_same_segment(filled, byte: int) -> None:
    before = frames(filled)
    first = filled.segments()[0]
    filled.flip(first, 4096 + 64 * 3 + byte)
    assert faults(filled) == [(first, 4096 + 64 * 3, 4)]
    in_first = [lsn for lsn, _ in before if lsn <= 63]
    assert frames(filled) == [
        (lsn, lsn not in in_first[1:]) for lsn, _ in before if lsn != in_first[1]
    ]


def test_a_frame_of_another_history_is_a_fault_once(filled) -> None:
    """Its checksum is right and its predecessor another: shown, then walked on from it."""
    first = filled.segments()[0]
    data = bytearray(filled.content(first))
    at = 4096 + 64 * 3
    data[at + 24 : at + 32] = b"\x01" * 8
    salt = unpack_segment_header(bytes(data[:4096])).salt
    checksum = frame_checksum(memoryview(data)[at : at + 192], salt)
    data[at + 48 : at + 56] = checksum.to_bytes(8, "little")
    filled.replace(first, bytes(data))
    # The frame behind it carries the checksum of the one that was there.
    assert [lsn for _, _, lsn in faults(filled)] == [4, 7]
    assert [lsn for lsn, _ in frames(filled)][:4] == [1, 4, 7, 10]


def test_a_missing_segment_and_a_bad_header_are_faults_at_byte_0(filled) -> None:
    first, second, third = filled.segments()
    filled.flip(second, 40)
    assert (second, 0, None) in faults(filled)
    filled.storage.unlink(second)
    assert (third, 0, None) in faults(filled)
    assert {lsn > 63 for lsn, _ in frames(filled)} == {False, True}
    assert first in {one.path for one in seen(filled) if isinstance(one, SeenFrame)}


def test_a_segment_that_is_too_short_is_a_fault_where_it_ends(filled) -> None:
    *_, last = filled.segments()
    filled.replace(last, filled.content(last)[: 4096 + 64 * 20])
    assert (last, 4096 + 64 * 20, None) in faults(filled)


def test_a_segment_that_ends_before_the_next_begins_is_a_fault(filled) -> None:
    first, *_ = filled.segments()
    data = filled.content(first)
    filled.replace(first, data[: 4096 + 64 * 6].ljust(len(data), b"\0"))
    assert faults(filled) == [(first, 4096 + 64 * 6, 7)]


def test_what_an_earlier_torn_tail_left_is_not_looked_at(log, make_records) -> None:
    writer = log.writer()
    for _ in range(3):
        writer.append(make_records(1))
        writer.write()
    first = log.segments()[0]
    log.flip(first, 4096 + 64 * 3)
    again = log.writer()
    again.append(make_records(1))
    again.write()
    assert faults(log) == []
    assert [lsn for lsn, _ in frames(log)] == [1, 3]


def test_a_newer_version_is_refused(filled) -> None:
    page = bytearray(filled.content(filled.segments()[0]))
    page[4100] = 9
    salt = unpack_segment_header(bytes(page[:4096])).salt
    checksum = frame_checksum(memoryview(page)[4096 : 4096 + 192], salt)
    page[4096 + 48 : 4096 + 56] = checksum.to_bytes(8, "little")
    filled.replace(filled.segments()[0], bytes(page))
    with pytest.raises(WalVersion):
        seen(filled)
