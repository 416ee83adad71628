"""The bytes of a segment: constants, headers, checksums. ``wal/FORMAT.md`` is the specification.

All integers are little-endian. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from tierkv_wal.errors import WalVersion

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAJOR = 1
MINOR = 0
FRAME_VERSION = 1

SLOT_BYTES = 64
"""Size of a record and of a frame header: a divisor of the 512-byte sector, so none is torn."""

HEADER_BYTES = 4096
"""Size of a segment header; the first slot follows it."""

FRAME_RECORDS_MAX = 65_535
SEGMENT_BYTES = 64 * 1024 * 1024
SEGMENT_BYTES_MIN = 2 * HEADER_BYTES
UUID_BYTES = 16

SEGMENT_MAGIC = b"TKVWAL\x00\x01"
FRAME_MAGIC = b"TKF1"

_SEGMENT = struct.Struct("<8sHHI16sQQQQQQQ")
_SEGMENT_CHECKSUM_AT = HEADER_BYTES - 8
_FRAME = struct.Struct("<4sHHQQQIIQQQ")
_FRAME_CHECKSUM_AT = 48
_U64 = struct.Struct("<Q")
_NO_CHECKSUM = bytes(8)

FRAME_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("lsn", "<u8"),
        ("durable_lsn", "<u8"),
        ("previous_checksum", "<u8"),
        ("records", "<u4"),
        ("time_ms", "<u4"),
        ("reserved", "<u8"),
        ("checksum", "<u8"),
        ("epoch", "<u8"),
    ]
)
"""A frame header as a numpy dtype, to look at many slots at once."""


class BadHeader(Exception):
    """A segment header that no finished segment can have. Its text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The first page of a segment. ``salt`` seeds the checksum of every frame in it."""

    store_uuid: bytes
    seq: int
    first_lsn: int
    salt: int
    epoch: int
    segment_bytes: int
    created_ns: int
    major: int = MAJOR
    minor: int = MINOR

    @property
    def last_lsn(self) -> int:
        """LSN of the last slot there is room for."""
        return self.first_lsn + (self.segment_bytes - HEADER_BYTES) // SLOT_BYTES - 1

    def offset_of(self, lsn: int) -> int:
        """Byte offset of a slot in the file."""
        return HEADER_BYTES + SLOT_BYTES * (lsn - self.first_lsn)

    def pack(self) -> bytes:
        """The header page, HEADER_BYTES long."""
        page = bytearray(HEADER_BYTES)
        _SEGMENT.pack_into(
            page,
            0,
            SEGMENT_MAGIC,
            self.major,
            self.minor,
            HEADER_BYTES,
            self.store_uuid,
            self.seq,
            self.first_lsn,
            self.salt,
            self.first_lsn - 1,
            self.epoch,
            self.segment_bytes,
            self.created_ns,
        )
        checksum = xxhash.xxh3_64_intdigest(page[:_SEGMENT_CHECKSUM_AT])
        _U64.pack_into(page, _SEGMENT_CHECKSUM_AT, checksum)
        return bytes(page)


def unpack_segment_header(page: bytes) -> SegmentHeader:
    """Read a header page.

    Raises BadHeader if it is not a sound one, WalVersion if a newer major version wrote it.
    """
    if len(page) < HEADER_BYTES:
        raise BadHeader(f"the file ends after {len(page)} bytes, within its header")
    magic, major, minor, header_bytes, uuid, seq, first_lsn, salt, prev_end_lsn, epoch, size, at = (
        _SEGMENT.unpack_from(page)
    )
    if magic != SEGMENT_MAGIC:
        raise BadHeader("the file does not start with the magic of a segment")
    (checksum,) = _U64.unpack_from(page, _SEGMENT_CHECKSUM_AT)
    if checksum != xxhash.xxh3_64_intdigest(page[:_SEGMENT_CHECKSUM_AT]):
        raise BadHeader("the checksum of the segment header does not match")
    if major > MAJOR:
        raise WalVersion(
            f"segment format {major}.{minor} is newer than {MAJOR}.{MINOR}, the newest this "
            "version reads; start the version that wrote it"
        )
    if major < MAJOR or header_bytes != HEADER_BYTES:
        raise BadHeader(f"segment format {major}.{minor} with a header of {header_bytes} bytes")
    if first_lsn < 1 or prev_end_lsn != first_lsn - 1:
        raise BadHeader(f"first lsn {first_lsn} does not follow on lsn {prev_end_lsn}")
    if size < SEGMENT_BYTES_MIN or size % HEADER_BYTES:
        raise BadHeader(f"segment_bytes is {size}")
    return SegmentHeader(
        store_uuid=uuid,
        seq=seq,
        first_lsn=first_lsn,
        salt=salt,
        epoch=epoch,
        segment_bytes=size,
        created_ns=at,
        major=major,
        minor=minor,
    )


class FrameHeader(NamedTuple):
    """The slot in front of a frame's records."""

    magic: bytes
    version: int
    flags: int
    lsn: int
    durable_lsn: int
    previous_checksum: int
    records: int
    time_ms: int
    reserved: int
    checksum: int
    epoch: int

    @property
    def last_lsn(self) -> int:
        """LSN of the frame's last record."""
        return self.lsn + self.records


def unpack_frame_header(buffer: Buffer, offset: int) -> FrameHeader:
    """Read the slot at ``offset`` as a frame header, whatever it holds."""
    return FrameHeader._make(_FRAME.unpack_from(buffer, offset))


def frame_checksum(frame: memoryview, salt: int) -> int:
    """xxh3_64 of a whole frame with its checksum field taken as 0, seeded by ``salt``."""
    digest = xxhash.xxh3_64(frame[:_FRAME_CHECKSUM_AT], seed=salt)
    digest.update(_NO_CHECKSUM)
    digest.update(frame[_FRAME_CHECKSUM_AT + 8 :])
    return digest.intdigest()


def seal_frame(
    frame: bytearray,
    *,
    lsn: int,
    durable_lsn: int,
    previous_checksum: int,
    flags: int,
    time_ms: int,
    epoch: int,
    salt: int,
) -> int:
    """Fill in the header of ``frame`` (one slot of any content, then the records).

    Mutates ``frame``. Returns its checksum, which the next frame carries.
    """
    _FRAME.pack_into(
        frame,
        0,
        FRAME_MAGIC,
        FRAME_VERSION,
        flags,
        lsn,
        durable_lsn,
        previous_checksum,
        len(frame) // SLOT_BYTES - 1,
        time_ms,
        0,
        0,
        epoch,
    )
    checksum = xxhash.xxh3_64_intdigest(frame, seed=salt)
    _U64.pack_into(frame, _FRAME_CHECKSUM_AT, checksum)
    return checksum
