"""Segment files: their names, making one, reading their headers."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from tierkv_wal.format import (
    HEADER_BYTES,
    BadHeader,
    SegmentHeader,
    unpack_segment_header,
)
from tierkv_wal.storage import Storage

SPARE = "next.tmp"
"""The file that becomes the next segment. Whatever it holds, it is not part of the log yet."""

_NAME = re.compile(r"([0-9a-f]{16})\.wal")


def segment_path(directory: str, seq: int) -> str:
    """Where the segment with this sequence number lies."""
    return posixpath.join(directory, f"{seq:016x}.wal")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment found in a directory. ``header`` is None if it is bad; ``fault`` says why."""

    seq: int
    path: str
    file_bytes: int
    header: SegmentHeader | None
    fault: str


@dataclass(frozen=True, slots=True)
class ClosedSegment:
    """A segment that is no longer written; it holds nothing beyond ``last_lsn``."""

    path: str
    last_lsn: int


def find_segments(storage: Storage, directory: str, store_uuid: bytes) -> list[SegmentFile]:
    """All segments of a directory in order, each flushed and then read from the device.

    Without the flush a frame that a killed process wrote but never synced could be read now and
    vanish in a power loss later, after new frames were built on it.

    Raises OSError, and WalVersion if a segment is of a newer major version.
    """
    found = []
    for name in storage.listdir(directory):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        path = posixpath.join(directory, name)
        fd = storage.open(path, writable=False)
        try:
            storage.fdatasync(fd)
            storage.drop_cache(fd)
            page = storage.pread(fd, HEADER_BYTES, 0)
        finally:
            storage.close(fd)
        seq = int(match[1], 16)
        header, fault = _read_header(page, seq, store_uuid)
        found.append(SegmentFile(seq, path, storage.size(path), header, fault))
    return found


def _read_header(page: bytes, seq: int, store_uuid: bytes) -> tuple[SegmentHeader | None, str]:
    try:
        header = unpack_segment_header(page)
    except BadHeader as error:
        return None, str(error)
    if header.store_uuid != store_uuid:
        return None, f"the segment is of store {header.store_uuid.hex()}, not {store_uuid.hex()}"
    if header.seq != seq:
        return None, f"the file holds segment number {header.seq}"
    return header, ""


def open_spare(storage: Storage, directory: str, segment_bytes: int) -> int:
    """Make the spare, or take the one that is there; returns its descriptor.

    A leftover spare holds at most a header and zeros, since no frame is written before the rename.

    Crash: a spare of any length, which the next call completes.
    """
    path = posixpath.join(directory, SPARE)
    if SPARE in storage.listdir(directory) and storage.size(path) > segment_bytes:
        # Made for larger segments. A new file is surely zero, a shortened one only by promise.
        storage.unlink(path)
    fd = storage.open(path, create=True)
    try:
        storage.fallocate(fd, 0, segment_bytes)
    except BaseException:
        storage.close(fd)
        raise
    return fd


def create_segment(storage: Storage, directory: str, header: SegmentHeader) -> int:
    """Make the segment that ``header`` describes; returns a descriptor to write frames to.

    fdatasync is enough for the file itself: it also flushes size and allocation.

    Crash: before the rename there is a spare and no segment. After it the segment is whole, and
    empty; power loss may still undo the rename until this returns.
    """
    fd = open_spare(storage, directory, header.segment_bytes)
    try:
        storage.pwrite(fd, header.pack(), 0)
        storage.fdatasync(fd)
        storage.rename(posixpath.join(directory, SPARE), segment_path(directory, header.seq))
        storage.fsync_dir(directory)
    except BaseException:
        storage.close(fd)
        raise
    return fd
