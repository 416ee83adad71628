"""Reading the log from its checkpoint to its end; only then can it be written again."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tierkv_wal.errors import WalCorrupt, WalError, WalMisuse
from tierkv_wal.format import (
    SEGMENT_BYTES,
    SLOT_BYTES,
    UUID_BYTES,
    FrameHeader,
    SegmentHeader,
)
from tierkv_wal.scan import SegmentScan
from tierkv_wal.segment import ClosedSegment, SegmentFile, find_segments
from tierkv_wal.storage import Storage
from tierkv_wal.writer import WalWriter


class EndKind(Enum):
    """How a log can end."""

    CLEAN = "clean"
    """Behind the last frame there is nothing."""
    TORN = "torn"
    """Behind the last frame lie pieces of frames that were never known to be durable: legal."""
    CORRUPT = "corrupt"
    """Something that was durable is missing or damaged."""


@dataclass(frozen=True, slots=True)
class End:
    """Where the log ends: the last good ``lsn``, and what lies at ``offset`` of ``path``.

    ``left_bytes``: how much lies there that is not read; what another segment holds is not counted.
    """

    kind: EndKind
    lsn: int
    path: str
    offset: int
    reason: str
    left_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Records that were written together: all of them, or none, survive a crash.

    ``records`` is uint8 [n, 64], C-contiguous and read-only; row i has the LSN ``first_lsn + i``.
    It is a view that keeps its whole segment's bytes in memory: copy what you keep.
    """

    first_lsn: int
    last_lsn: int
    records: npt.NDArray[np.uint8]
    epoch: int
    flags: int


class WalReader:
    """Reads the frames beyond ``after_lsn`` (the checkpoint's; 0 = all), once.

    ``after_lsn=None`` starts with the oldest segment there is, for tools that have no checkpoint.
    Changes nothing on disk. ``end`` and ``writer`` work after the iteration has ended.
    """

    def __init__(
        self, storage: Storage, directory: str, store_uuid: bytes, after_lsn: int | None
    ) -> None:
        if len(store_uuid) != UUID_BYTES:
            raise ValueError(f"store_uuid has {len(store_uuid)} bytes; it must have {UUID_BYTES}")
        self._storage = storage
        self._directory = directory
        self._store_uuid = store_uuid
        self._after_lsn = after_lsn
        self._segments: list[SegmentFile] = []
        self._started = False
        self._end: End | None = None
        self._has_writer = False

    def frames(self) -> Iterator[Frame]:
        """Yield the frames in order. A frame that ``after_lsn`` divides comes without its start.

        Raises OSError if anything cannot be read: that is not the end of the log. Raises
        WalVersion if a newer, incompatible version wrote the log.
        """
        if self._started:
            raise WalMisuse("frames() can be read once; make a new WalReader to read again")
        self._started = True
        return self._frames()

    @property
    def end(self) -> End:
        """Where and how the log ends. Raises WalMisuse before the iteration has ended."""
        if self._end is None:
            raise WalMisuse("the end is known only after frames() was read to its end")
        return self._end

    @property
    def epoch(self) -> int:
        """The highest epoch of any segment, 0 if there is none; the next one must be above it."""
        if self._end is None:
            raise WalMisuse("the epoch is known only after frames() was read to its end")
        return max((header.epoch for header in self._headers()), default=0)

    @property
    def records_at_most(self) -> int:
        """``frames()`` yields no more records than these; 0 before it has begun."""
        last = self._segments[-1] if self._segments else None
        if last is None or last.header is None:
            return 0
        return last.header.first_lsn + last.file_bytes // SLOT_BYTES - (self._after_lsn or 0)

    @property
    def begins_late(self) -> bool:
        """Whether what was asked for is older than the log: its checkpoint is not the last one."""
        if self._end is None:
            raise WalMisuse("the beginning is known only after frames() was read to its end")
        first = self._segments[0].header if self._segments else None
        return first is not None and first.first_lsn > (self._after_lsn or 0) + 1

    @property
    def resume_lsn(self) -> int:
        """The LSN that a writer continues after.

        ``end.lsn``; after a CORRUPT end, an LSN above every one that can have been given out.
        """
        if self.end.kind is not EndKind.CORRUPT:
            return self.end.lsn
        known = [header.last_lsn for header in self._headers()]
        unknown = [s.file_bytes // SLOT_BYTES for s in self._segments if s.header is None]
        return max(self.end.lsn, self._after_lsn or 0, *known) + sum(unknown)

    def writer(self, epoch: int, segment_bytes: int = SEGMENT_BYTES) -> WalWriter:
        """Continue the log in a new segment. ``epoch`` must be above ``self.epoch``.

        Raises WalCorrupt after a CORRUPT end (see ``salvage``), WalMisuse before the end or the
        second time, OSError.

        Crash: the old segments as they were, and perhaps an empty one behind them.
        """
        if self.end.kind is EndKind.CORRUPT:
            raise WalCorrupt(
                f"{self.end.path} at byte {self.end.offset}: {self.end.reason}; "
                "nothing may be appended to a corrupt log"
            )
        return self._make_writer(epoch, segment_bytes, self._closed_segments())

    def salvage(self, epoch: int, quarantine: str, segment_bytes: int = SEGMENT_BYTES) -> WalWriter:
        """Give up all there is and start a new segment after ``resume_lsn``.

        For a log with a CORRUPT end, or one whose checkpoint is lost. Every old segment moves to
        the directory ``quarantine`` (of the same file system). Call it only after a checkpoint at
        ``resume_lsn`` that holds what is to be kept, for the next reader finds no older record.
        Raises WalMisuse before the end or the second time, OSError.

        Crash: the new segment follows on the checkpoint; a segment that still lies in front of it
        is not needed and not looked at.
        """
        writer = self._make_writer(epoch, segment_bytes, [])
        taken = set(self._storage.listdir(quarantine))
        for segment in self._segments:
            name = posixpath.basename(segment.path)
            while name in taken:
                name += "~"
            taken.add(name)
            self._storage.rename(segment.path, posixpath.join(quarantine, name))
        self._storage.fsync_dir(quarantine)
        self._storage.fsync_dir(self._directory)
        return writer

    # --- reading ---------------------------------------------------------------------------------

    def _frames(self) -> Iterator[Frame]:
        segments = self._segments = find_segments(self._storage, self._directory, self._store_uuid)
        start = self._find_start()
        if start is None:
            self._end = self._end_without_start()
            return
        lsn = self._header(start).first_lsn - 1
        after_lsn = lsn if self._after_lsn is None else self._after_lsn
        for index in range(start, len(segments)):
            path = segments[index].path
            fault = self._gap_before(index) if index > start else ""
            if fault:
                self._end = End(EndKind.CORRUPT, lsn, path, 0, fault)
                return
            scan, is_short = self._open_scan(index)
            for header, offset in scan.frames():
                if header.last_lsn > after_lsn:
                    yield _frame(scan.data, header, offset, after_lsn)
            lsn = scan.lsn
            is_last = index == len(segments) - 1
            kind, fault = _judge(scan, is_short, is_last)
            if is_last and kind is not EndKind.CORRUPT and lsn < after_lsn:
                kind = EndKind.CORRUPT
                fault = f"the log ends at lsn {lsn}, though the checkpoint is at lsn {after_lsn}"
            if is_last or kind is EndKind.CORRUPT:
                left_bytes = 0 if kind is EndKind.CLEAN else scan.left_bytes()
                self._end = End(kind, lsn, path, scan.offset, fault, left_bytes)
                return

    def _find_start(self) -> int | None:
        """Index of the last segment that begins at or before the first LSN asked for."""
        for index in reversed(range(len(self._segments))):
            header = self._segments[index].header
            if self._after_lsn is None:
                if index == 0 and header is not None:
                    return 0
            elif header is not None and header.first_lsn <= self._after_lsn + 1:
                return index
        return None

    def _end_without_start(self) -> End:
        lsn = self._after_lsn or 0
        if not self._segments:
            if lsn == 0:
                return End(EndKind.CLEAN, 0, self._directory, 0, "")
            fault = f"there is no segment, though the checkpoint is at lsn {lsn}"
            return End(EndKind.CORRUPT, lsn, self._directory, 0, fault)
        first = next((s for s in self._segments if s.header is None), self._segments[0])
        fault = first.fault or f"the segment with lsn {lsn + 1} is missing"
        return End(EndKind.CORRUPT, lsn, first.path, 0, fault)

    def _gap_before(self, index: int) -> str:
        """Why the segment cannot follow on the one before it. (LSNs are compared by the scan.)"""
        before, segment = self._segments[index - 1 : index + 1]
        if segment.header is not None and segment.seq != before.seq + 1:
            return f"segment number {before.seq + 1} is missing"
        return segment.fault

    def _open_scan(self, index: int) -> tuple[SegmentScan, bool]:
        """A scan of the whole segment, and whether its file is too short."""
        segment, header = self._segments[index], self._header(index)
        fd = self._storage.open(segment.path, writable=False)
        try:
            data = self._storage.pread(fd, header.segment_bytes, 0)
        finally:
            self._storage.close(fd)
        until_lsn = None
        if index + 1 < len(self._segments) and not self._gap_before(index + 1):
            until_lsn = self._header(index + 1).first_lsn - 1
        return SegmentScan(data, header, until_lsn), len(data) < header.segment_bytes

    # --- going on to write -----------------------------------------------------------------------

    def _make_writer(
        self, epoch: int, segment_bytes: int, closed: list[ClosedSegment]
    ) -> WalWriter:
        if self._has_writer:
            raise WalMisuse("this reader has made its writer already")
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} must be above {self.epoch}, which the log has seen")
        self._has_writer = True
        return WalWriter(
            self._storage,
            self._directory,
            self._store_uuid,
            epoch=epoch,
            segment_bytes=segment_bytes,
            seq=self._segments[-1].seq + 1 if self._segments else 1,
            end_lsn=self.resume_lsn,
            closed=closed,
        )

    def _closed_segments(self) -> list[ClosedSegment]:
        """The old segments, each with the checkpoint from which on it is not needed."""
        closed: list[ClosedSegment] = []
        last_lsn = self.end.lsn
        for segment in reversed(self._segments):
            closed.append(ClosedSegment(segment.path, last_lsn))
            if segment.header is not None:
                last_lsn = segment.header.first_lsn - 1
        return closed[::-1]

    def _headers(self) -> list[SegmentHeader]:
        return [segment.header for segment in self._segments if segment.header is not None]

    def _header(self, index: int) -> SegmentHeader:
        header = self._segments[index].header
        if header is None:
            raise WalError(f"{self._segments[index].path}: {self._segments[index].fault}")
        return header


def _frame(data: bytes, header: FrameHeader, offset: int, after_lsn: int) -> Frame:
    skip = max(0, after_lsn - header.lsn)
    count = header.records - skip
    start = offset + skip * SLOT_BYTES
    records = np.frombuffer(data, np.uint8, count * SLOT_BYTES, start)
    return Frame(
        first_lsn=header.lsn + 1 + skip,
        last_lsn=header.last_lsn,
        records=records.reshape(count, SLOT_BYTES),
        epoch=header.epoch,
        flags=header.flags,
    )


def _judge(scan: SegmentScan, is_short: bool, is_last: bool) -> tuple[EndKind, str]:
    """What the end of one segment's scan means. A segment before the last may only be CLEAN."""
    if is_short:
        return EndKind.CORRUPT, "the file is shorter than its header says"
    if scan.until_lsn is not None and scan.lsn != scan.until_lsn:
        fault = scan.fault or "the segment is full"
        return EndKind.CORRUPT, f"{fault}, but the next segment begins at lsn {scan.until_lsn + 1}"
    if not scan.fault or not is_last or scan.is_blank():
        return EndKind.CLEAN, ""
    if scan.intact:
        return EndKind.CORRUPT, scan.fault
    proof = scan.proof_of_loss()
    if proof is None:
        return EndKind.TORN, scan.fault
    fault = f"{scan.fault}, but the frame at lsn {proof.lsn} knew it to be durable"
    return EndKind.CORRUPT, fault
