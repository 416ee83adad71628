"""The bytes: FORMAT.md's example, and what readers do with other versions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tierkv_wal import EndKind, WalReader, WalVersion
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
    path = _one_frame(log, make_records(1))
    page = bytearray(replace(_header(log, path), minor=9).pack())
    page[100:200] = b"?" * 100
    page[4088:] = xxhash.xxh3_64_intdigest(bytes(page[:4088])).to_bytes(8, "little")
    log.replace(path, bytes(page) + log.content(path)[4096:])
    frames, end = log.read()
    assert (len(frames), end.kind) == (1, EndKind.CLEAN)


def test_a_newer_major_version_is_refused_and_not_taken_for_damage(log, make_records):
    path = _one_frame(log, make_records(1))
    page = replace(_header(log, path), major=2).pack()
    log.replace(path, page + log.content(path)[4096:])
    with pytest.raises(WalVersion, match=r"2\.0 is newer than 1\.0"):
        log.read()


def test_a_newer_frame_version_is_refused_and_not_taken_for_damage(log, make_records):
    path = _one_frame(log, make_records(1))
    data = bytearray(log.content(path))
    data[4100] = FRAME_VERSION + 1
    salt = _header(log, path).salt
    checksum = frame_checksum(memoryview(data)[4096 : 4096 + 128], salt)
    data[4096 + 48 : 4096 + 56] = checksum.to_bytes(8, "little")
    log.replace(path, bytes(data))
    with pytest.raises(WalVersion, match="frame version 2"):
        log.read()


def _one_frame(log, records: bytes) -> str:
    writer = log.writer()
    writer.append(records)
    writer.write()
    return log.segments()[0]


def _header(log, path: str) -> SegmentHeader:
    return unpack_segment_header(log.content(path)[:4096])
