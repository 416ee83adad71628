"""Walking the frames in one segment's bytes. No I/O: bytes in, frames and a verdict out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierkv_wal.errors import WalVersion
from tierkv_wal.format import (
    FRAME_HEADER,
    FRAME_MAGIC,
    FRAME_RECORDS_MAX,
    FRAME_VERSION,
    SLOT_BYTES,
    FrameHeader,
    SegmentHeader,
    frame_checksum,
    unpack_frame_header,
)


class SegmentScan:
    """One walk over a segment, from its first frame to the first that is not good.

    ``lsn`` and ``offset`` follow the walk: the last LSN of the last good frame, and where the next
    frame begins. Afterwards ``fault`` says why the walk stopped ("" = no slot is left, or
    ``until_lsn`` is reached), and ``intact`` whether the frame there has a matching checksum all
    the same: such a frame was written in full, so no torn write explains it.
    """

    def __init__(self, data: bytes, header: SegmentHeader, until_lsn: int | None) -> None:
        self.lsn = header.first_lsn - 1
        self.fault = ""
        self.intact = False
        self.data = data
        self.until_lsn = until_lsn
        self._data = memoryview(data)[: len(data) // SLOT_BYTES * SLOT_BYTES]
        self._header = header
        self._checksum = 0

    @property
    def offset(self) -> int:
        """Byte offset in the file of the slot behind ``lsn``."""
        return self._header.offset_of(self.lsn + 1)

    def frames(self) -> Iterator[tuple[FrameHeader, int]]:
        """Yield each good frame's header and the byte offset of its first record.

        Raises WalVersion at an intact frame of a newer version.
        """
        while self.offset < len(self._data) and self.lsn != self.until_lsn:
            offset = self.offset
            frame = unpack_frame_header(self._data, offset)
            self.fault = self._fault_of(frame, offset)
            if self.fault:
                return
            self.lsn = frame.last_lsn
            self._checksum = frame.checksum
            yield frame, offset + SLOT_BYTES

    def is_blank(self) -> bool:
        """Whether nothing but zeros follows the last good frame."""
        rest = np.frombuffer(self._data[self.offset :], np.uint64)
        return not rest.any()

    def left_bytes(self) -> int:
        """Bytes behind the last good frame, up to the last that is not zero."""
        return len(bytes(self._data[self.offset :]).rstrip(b"\0"))

    def proof_of_loss(self) -> FrameHeader | None:
        """A later intact frame that knew the bad one to be durable, if there is one.

        Frames reach the device in any order until they are synced, so later frames alone prove
        nothing. But a frame built after the bad one was synced says so in its durable_lsn.
        """
        return next(self._intact_frames(self.lsn + 1), None)

    def skip(self) -> bool:
        """Leave the fault behind and go on at the next intact frame; False if there is none.

        For tools that show what is left. Who trusts the log stops at the fault.
        """
        for frame in self._intact_frames(0):
            if self.until_lsn is None or frame.last_lsn <= self.until_lsn:
                self.lsn = frame.lsn - 1
                self._checksum = frame.previous_checksum
                self.fault = ""
                self.intact = False
                return True
        return False

    def _intact_frames(self, durable_lsn: int) -> Iterator[FrameHeader]:
        """Intact frames of this epoch from here on that knew this LSN to be durable."""
        start = self.offset
        slots = np.frombuffer(self._data[start:], FRAME_HEADER)
        lsns = np.arange(self.lsn + 1, self.lsn + 1 + len(slots), dtype=np.uint64)
        likely = (
            (slots["magic"] == FRAME_MAGIC)
            & (slots["lsn"] == lsns)
            & (slots["epoch"] == self._header.epoch)
            & (slots["durable_lsn"] >= durable_lsn)
        )
        for index in np.flatnonzero(likely).tolist():
            offset = start + index * SLOT_BYTES
            frame = unpack_frame_header(self._data, offset)
            if not self._damage_of(frame, offset):
                yield frame

    def _fault_of(self, frame: FrameHeader, offset: int) -> str:
        damage = self._damage_of(frame, offset)
        if damage:
            return damage
        self.intact = True
        if frame.version > FRAME_VERSION:
            raise WalVersion(
                f"frame version {frame.version} at lsn {frame.lsn} is newer than {FRAME_VERSION}, "
                "the newest this version reads; start the version that wrote it"
            )
        if frame.epoch != self._header.epoch:
            return f"the frame is of epoch {frame.epoch}, its segment of {self._header.epoch}"
        if frame.previous_checksum != self._checksum:
            return "the frame does not follow on the frame before it"
        if self.until_lsn is not None and frame.last_lsn > self.until_lsn:
            return f"the frame reaches beyond lsn {self.until_lsn}, where the next segment begins"
        self.intact = False
        return ""

    def _damage_of(self, frame: FrameHeader, offset: int) -> str:
        """Why the bytes at ``offset`` are no frame that was written there; "" if they are one."""
        if frame.magic != FRAME_MAGIC:
            return "there is no frame"
        if self._header.offset_of(frame.lsn) != offset:
            return f"the frame says it is lsn {frame.lsn}"
        end = offset + (1 + frame.records) * SLOT_BYTES
        if not 1 <= frame.records <= FRAME_RECORDS_MAX or end > len(self._data):
            return f"the frame says it has {frame.records} records"
        if frame_checksum(self._data[offset:end], self._header.salt) != frame.checksum:
            return "the checksum of the frame does not match"
        return ""
