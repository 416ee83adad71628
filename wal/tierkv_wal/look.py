"""Looking at all that lies in a log's directory, behind damage too: for tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv_wal.format import SLOT_BYTES, FrameHeader, SegmentHeader
from tierkv_wal.scan import SegmentScan
from tierkv_wal.segment import SegmentFile, find_segments
from tierkv_wal.storage import Storage


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A good frame at ``offset`` of a segment's file; ``records``: uint8 [n, 64], read-only.

    ``is_reached``: no fault lies between it and the start of its segment.
    """

    path: str
    segment: SegmentHeader
    offset: int
    header: FrameHeader
    records: npt.NDArray[np.uint8]
    is_reached: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """A place that is no part of a sound log. ``lsn``: the slot there, if that can be told.

    At the end of the log it may be the torn tail that a crash leaves; ``WalReader.end`` knows.
    """

    path: str
    offset: int
    lsn: int | None
    reason: str


def look(
    storage: Storage, directory: str, store_uuid: bytes, from_lsn: int = 0
) -> Iterator[SegmentFile | SeenFrame | Fault]:
    """Yield each segment, followed by its frames that reach ``from_lsn`` and its faults, in order.

    Goes on behind faults where an intact frame can be found. Holds one segment's bytes at a time;
    a frame keeps those of its segment. Changes nothing.

    Raises OSError, and WalVersion if a newer, incompatible version wrote the log.
    """
    segments = find_segments(storage, directory, store_uuid)
    for index, segment in enumerate(segments):
        yield segment
        if index and segment.seq != segments[index - 1].seq + 1:
            reason = f"segment number {segments[index - 1].seq + 1} is missing"
            yield Fault(segment.path, 0, None, reason)
        following = segments[index + 1] if index + 1 < len(segments) else None
        if segment.header is None:
            yield Fault(segment.path, 0, None, segment.fault)
        elif segment.header.last_lsn >= from_lsn:
            yield from _look_into(storage, segment, segment.header, following, from_lsn)


def _look_into(
    storage: Storage,
    segment: SegmentFile,
    header: SegmentHeader,
    following: SegmentFile | None,
    from_lsn: int,
) -> Iterator[SeenFrame | Fault]:
    fd = storage.open(segment.path, writable=False)
    try:
        data = storage.pread(fd, header.segment_bytes, 0)
    finally:
        storage.close(fd)
    until_lsn = None
    if following is not None and following.header is not None and following.seq == segment.seq + 1:
        until_lsn = following.header.first_lsn - 1
    scan = SegmentScan(data, header, until_lsn)
    is_reached = True
    while True:
        for frame, offset in scan.frames():
            if frame.last_lsn >= from_lsn:
                records = np.frombuffer(data, np.uint8, frame.records * SLOT_BYTES, offset)
                yield SeenFrame(
                    segment.path,
                    header,
                    offset - SLOT_BYTES,
                    frame,
                    records.reshape(frame.records, SLOT_BYTES),
                    is_reached,
                )
        fault = _fault_here(scan, until_lsn)
        if not fault:
            break
        yield Fault(segment.path, scan.offset, scan.lsn + 1, fault)
        is_reached = False
        if not scan.skip():
            break
    if len(data) < header.segment_bytes:
        reason = f"the file ends here, though its header says {header.segment_bytes} bytes"
        yield Fault(segment.path, len(data), None, reason)


def _fault_here(scan: SegmentScan, until_lsn: int | None) -> str:
    """Why the walk stopped before its end; "" if it did not."""
    if until_lsn is None:
        return "" if scan.is_blank() else scan.fault
    if scan.lsn == until_lsn:
        return ""
    fault = scan.fault or "the segment is full"
    return f"{fault}, but the next segment begins at lsn {until_lsn + 1}"
