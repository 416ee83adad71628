"""The bytes: FORMAT.md's example, and what readers do with other versions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tierkv_wal import EndKind, WalMisuse, WalReader, WalVersion
from tierkv_wal.format import (
    FRAME_HEADER,
    FRAME_VERSION,
    SegmentHeader,
    frame_checksum,
    seal_frame,
    unpack_frame_header,
    unpack_segment_header,
)

FORMAT_MD = Path(__file__).parents[2] / "wal" / "FORMAT.md"

EXAMPLE_HEADER = SegmentHeader(
    store_uuid=bytes.fromhex("00112233445566778899aabbccddeeff"),
    seq=3,
    first_lsn=1001,
    salt=0x0123456789ABCDEF,
    epoch=7,
    segment_bytes=8192,
    created_ns=1_750_000_000_000_000_000,
)


def example_segment() -> bytes:
    """The segment that FORMAT.md shows: two frames, of two records and of one."""
    first = bytearray(64) + bytes(range(64)) + b"\xaa" * 64
    second = bytearray(64) + b"\xbb" * 64
    common = {"time_ms": 0x1234, "epoch": 7, "salt": EXAMPLE_HEADER.salt}
    checksum = seal_frame(first, lsn=1001, durable_lsn=1000, previous_checksum=0, flags=2, **common)
    seal_frame(second, lsn=1004, durable_lsn=1003, previous_checksum=checksum, flags=0, **common)
    return (EXAMPLE_HEADER.pack() + first + second).ljust(8192, b"\0")


def hex_dump(data: bytes) -> str:
    """Lines of 16 bytes; runs of zero lines are left out."""
    rows = ((at, data[at : at + 16]) for at in range(0, len(data), 16))
    return "\n".join(f"{at:04x}  {row.hex(' ')}" for at, row in rows if any(row))


def test_the_worked_example_is_what_the_code_writes():
    (shown,) = re.findall(r"```hex\n(.*?)\n```", FORMAT_MD.read_text(), re.DOTALL)
    assert shown == hex_dump(example_segment())


def test_the_worked_example_can_be_read(log):
    log.replace(f"{log.directory}/{3:016x}.wal", example_segment())
    reader = WalReader(log.storage, log.directory, EXAMPLE_HEADER.store_uuid, 1000)
    first, second = reader.frames()
    assert (first.first_lsn, first.last_lsn, first.epoch, first.flags) == (1002, 1003, 7, 2)
    assert first.records.tobytes() == bytes(range(64)) + b"\xaa" * 64
    assert (second.first_lsn, second.records.tobytes()) == (1005, b"\xbb" * 64)
    assert (reader.end.kind, reader.end.lsn) == (EndKind.CLEAN, 1005)


def test_a_file_of_version_1_0_is_read_byte_by_byte_as_the_page_shows_it(log):
    """Made of the page's bytes alone: what this version writes may change, what it reads not."""
    (shown,) = re.findall(r"```hex\n(.*?)\n```", FORMAT_MD.read_text(), re.DOTALL)
    file = bytearray(8192)
    for line in shown.splitlines():
        at, row = line.split("  ", 1)
        file[int(at, 16) : int(at, 16) + 16] = bytes.fromhex(row)
    assert file[8:12] == b"\x01\x00\x00\x00", "major 1, minor 0"
    log.replace(f"{log.directory}/{3:016x}.wal", bytes(file))
    reader = WalReader(log.storage, log.directory, EXAMPLE_HEADER.store_uuid, 1000)
    frames = [(one.first_lsn, one.flags, one.records.tobytes()) for one in reader.frames()]
    assert frames == [
        (1002, 2, bytes(range(64)) + b"\xaa" * 64),
        (1005, 0, b"\xbb" * 64),
    ]
    assert (reader.end.kind, reader.end.lsn, reader.epoch) == (EndKind.CLEAN, 1005, 7)
    writer = reader.writer(8, 8192)
    writer.append(b"\xcc" * 64)
    writer.write()
    writer.close()
    again = WalReader(log.storage, log.directory, EXAMPLE_HEADER.store_uuid, 1000)
    assert [one.first_lsn for one in again.frames()] == [1002, 1005, 1007]


def test_a_segment_header_survives_the_round_trip():
    assert unpack_segment_header(EXAMPLE_HEADER.pack()) == EXAMPLE_HEADER


def test_struct_and_dtype_of_a_frame_header_agree():
    slot = bytes(np.random.default_rng(0).integers(1, 256, 64, np.uint8))
    (row,) = np.frombuffer(slot, FRAME_HEADER).tolist()
    assert FRAME_HEADER.itemsize == 64
    assert tuple(unpack_frame_header(slot, 0)) == row


def test_the_frame_checksum_takes_its_own_field_as_zero_and_the_salt_as_seed():
    frame = bytearray(64) + b"x" * 64
    checksum = seal_frame(
        frame,
        lsn=1,
        durable_lsn=0,
        previous_checksum=0,
        flags=0,
        time_ms=0,
        epoch=1,
        salt=99,
    )
    assert frame_checksum(memoryview(frame), salt=99) == checksum
    assert frame_checksum(memoryview(frame), salt=98) != checksum
    frame[48:56] = bytes(8)
    assert xxhash.xxh3_64_intdigest(bytes(frame), seed=99) == checksum


def test_a_newer_minor_version_is_read_whatever_its_reserved_bytes_hold(log, make_records):
    records = make_records(1)
    path = _one_frame(log, records)
    page = bytearray(replace(_header(log, path), minor=9).pack())
    page[88:4088] = b"?" * 4000
    page[4088:] = xxhash.xxh3_64_intdigest(bytes(page[:4088])).to_bytes(8, "little")
    frame = bytearray(log.content(path)[4096 : 4096 + 128])
    frame[6:8] = b"\xff\xff"
    frame[40:48] = b"reserved"
    checksum = frame_checksum(memoryview(frame), _header(log, path).salt)
    frame[48:56] = checksum.to_bytes(8, "little")
    log.replace(path, bytes(page) + bytes(frame) + log.content(path)[4096 + 128 :])
    (read,), end = log.read()
    assert (read.records.tobytes(), read.flags) == (records, 0xFFFF)
    assert end.kind is EndKind.CLEAN


def test_a_newer_major_version_is_refused_and_not_taken_for_damage(log, make_records):
    path = _one_frame(log, make_records(1))
    page = replace(_header(log, path), major=2).pack()
    log.replace(path, page + log.content(path)[4096:])
    _is_refused(log, r"2\.0 is newer than 1\.0")


def test_a_newer_frame_version_is_refused_and_not_taken_for_damage(log, make_records):
    path = _one_frame(log, make_records(1))
    data = bytearray(log.content(path))
    data[4100] = FRAME_VERSION + 1
    salt = _header(log, path).salt
    checksum = frame_checksum(memoryview(data)[4096 : 4096 + 128], salt)
    data[4096 + 48 : 4096 + 56] = checksum.to_bytes(8, "little")
    log.replace(path, bytes(data))
    _is_refused(log, "frame version 2")


def _is_refused(log, why: str) -> None:
    """Reading raises, and so there is no end to continue or salvage from; nothing has moved."""
    before = {path: log.content(path) for path in log.segments()}
    reader = log.reader()
    with pytest.raises(WalVersion, match=why):
        list(reader.frames())
    with pytest.raises(WalMisuse):
        reader.writer(99)
    with pytest.raises(WalMisuse):
        reader.salvage(99, "/store/quarantine")
    assert {path: log.content(path) for path in log.segments()} == before
    assert log.storage.listdir("/store/quarantine") == []


def _one_frame(log, records: bytes) -> str:
    writer = log.writer()
    writer.append(records)
    writer.write()
    return log.segments()[0]


def _header(log, path: str) -> SegmentHeader:
    return unpack_segment_header(log.content(path)[:4096])
