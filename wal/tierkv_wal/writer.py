"""Writing the log: records gather in an open frame, one write puts it on disk, one sync keeps it.

One thread (the event loop) appends and writes. ``sync``, ``prepare_spare`` and ``forget`` may run
in other threads meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierkv_wal.errors import WalDead, WalMisuse
from tierkv_wal.format import (
    FRAME_RECORDS_MAX,
    HEADER_BYTES,
    SEGMENT_BYTES_MIN,
    SLOT_BYTES,
    SegmentHeader,
    seal_frame,
)
from tierkv_wal.segment import ClosedSegment, create_segment, open_spare, segment_path
from tierkv_wal.storage import Storage

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FLAGS_MAX = 0xFFFF
_U32 = 0xFFFFFFFF


class WalWriter:
    """The end of the log. Made by ``WalReader.writer``, always with a new segment.

    After any error of a write or a sync the writer is dead: every later call raises WalDead. The
    process should exit and recover; see ``WalDead`` for why it must not try again.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        store_uuid: bytes,
        *,
        epoch: int,
        segment_bytes: int,
        seq: int,
        end_lsn: int,
        closed: Iterable[ClosedSegment],
    ) -> None:
        if segment_bytes < SEGMENT_BYTES_MIN or segment_bytes % HEADER_BYTES:
            raise ValueError(
                f"segment_bytes is {segment_bytes}; it must be a multiple of {HEADER_BYTES}, "
                f"at least {SEGMENT_BYTES_MIN}"
            )
        self._storage = storage
        self._directory = directory
        self._store_uuid = store_uuid
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._append_records_max = min(
            FRAME_RECORDS_MAX, (segment_bytes - HEADER_BYTES) // SLOT_BYTES - 1
        )
        self._closed = deque(closed)
        self._appended_lsn = self._written_lsn = self._durable_lsn = end_lsn
        self._bytes_written = self._frames_written = 0
        self._frame = bytearray(SLOT_BYTES)
        self._flags = 0
        self._checksum = 0
        self._has_spare = False
        self._spare_lock = threading.Lock()
        # Held while a descriptor is synced, so that a rotation cannot close it meanwhile.
        self._sync_lock = threading.Lock()
        self._death: BaseException | None = None
        self._is_closed = False
        self._segment, self._fd = self._create_segment(seq)

    @property
    def appended_lsn(self) -> int:
        """LSN of the last record appended."""
        return self._appended_lsn

    @property
    def written_lsn(self) -> int:
        """Everything up to here survives the death of the process."""
        return self._written_lsn

    @property
    def durable_lsn(self) -> int:
        """Everything up to here survives power loss."""
        return self._durable_lsn

    @property
    def bytes_written(self) -> int:
        """Bytes of all frames written by this writer."""
        return self._bytes_written

    @property
    def frames_written(self) -> int:
        """Frames written by this writer."""
        return self._frames_written

    @property
    def append_records_max(self) -> int:
        """Most records that one append takes."""
        return self._append_records_max

    @property
    def segment_count(self) -> int:
        """Segments on disk, the current one included."""
        return len(self._closed) + 1

    def append(self, records: Buffer, flags: int = 0) -> int:
        """Add records (n x 64 bytes, C-contiguous) to the open frame; all stay in one frame.

        Copies the bytes. ``flags`` (16 bits, their meaning is the caller's) are or-ed into the
        frame's. If the frame or the segment is full, it is written and a new one begun, which
        may rotate: that syncs. Returns the LSN of the last record.

        Raises ValueError for a wrong length, WalDead, OSError.

        Crash: none of the records is on disk.
        """
        self._require_alive()
        view = memoryview(records)
        count, odd_bytes = divmod(view.nbytes, SLOT_BYTES)
        if odd_bytes or not view.c_contiguous or not 1 <= count <= self._append_records_max:
            raise ValueError(
                f"records has {view.nbytes} bytes; it must be a C-contiguous buffer of 1 to "
                f"{self._append_records_max} records of {SLOT_BYTES} bytes"
            )
        if not 0 <= flags <= _FLAGS_MAX:
            raise ValueError(f"flags is {flags:#x}; it must fit 16 bits")
        frame_records = len(self._frame) // SLOT_BYTES - 1
        is_open = frame_records > 0
        if is_open and frame_records + count > FRAME_RECORDS_MAX:
            self.write()
            is_open = False
        header_slots = 0 if is_open else 1
        if self._appended_lsn + header_slots + count > self._segment.last_lsn:
            self.write()
            self._rotate()
            header_slots = 1
        self._frame.extend(view)
        self._flags |= flags
        self._appended_lsn += header_slots + count
        return self._appended_lsn

    def write(self) -> int:
        """Close the open frame and write it, by one call. Returns ``written_lsn``.

        Raises WalDead, OSError (the writer is dead then).

        Crash: any part of the frame may be on disk; the reader takes it whole or not at all.
        """
        self._require_alive()
        frame = self._frame
        if len(frame) == SLOT_BYTES:
            return self._written_lsn
        lsn = self._written_lsn + 1
        with self._dying():
            self._checksum = seal_frame(
                frame,
                lsn=lsn,
                durable_lsn=self._durable_lsn,
                previous_checksum=self._checksum,
                flags=self._flags,
                time_ms=time.time_ns() // 1_000_000 & _U32,
                epoch=self._epoch,
                salt=self._segment.salt,
            )
            self._storage.pwrite(self._fd, frame, self._segment.offset_of(lsn))
        self._bytes_written += len(frame)
        self._frames_written += 1
        self._written_lsn = self._appended_lsn
        self._flags = 0
        del frame[SLOT_BYTES:]
        return self._written_lsn

    def sync(self) -> int:
        """Make every frame written so far durable. Returns ``durable_lsn``. Any thread.

        Raises WalDead, OSError (the writer is dead then).

        Crash: frames beyond the old ``durable_lsn`` may be lost, the last ones first.
        """
        with self._sync_lock:
            self._require_alive()
            # Taken before the sync: a frame written while it runs may miss it.
            written_lsn = self._written_lsn
            if written_lsn > self._durable_lsn:
                with self._dying():
                    self._storage.fdatasync(self._fd)
                self._durable_lsn = written_lsn
            return self._durable_lsn

    def prepare_spare(self) -> None:
        """Allocate the next segment's file ahead of the rotation. Any thread.

        Raises WalDead, OSError (which does not kill the writer: the log is untouched).

        Crash: a spare of any length; the next rotation completes it.
        """
        self._require_alive()
        with self._spare_lock:
            if self._has_spare:
                return
            fd = open_spare(self._storage, self._directory, self._segment_bytes)
            try:
                self._storage.fdatasync(fd)
            finally:
                self._storage.close(fd)
            self._storage.fsync_dir(self._directory)
            self._has_spare = True

    def forget(self, lsn: int) -> int:
        """Remove segments that hold nothing beyond ``lsn``, oldest first; returns how many.

        Never the current one. Any one thread. Raises WalDead, OSError (the writer stays alive).

        Crash: some of them are still there, or are back after power loss: the reader skips them.
        """
        self._require_alive()
        count = 0
        while self._closed and self._closed[0].last_lsn <= lsn:
            self._storage.unlink(self._closed[0].path)
            self._closed.popleft()
            count += 1
        return count

    def close(self) -> None:
        """Write the open frame, sync, and give the file back. Twice does nothing.

        A dead writer only gives the file back. Raises OSError.
        """
        if self._is_closed:
            return
        try:
            if self._death is None:
                self.write()
                self.sync()
        finally:
            with self._sync_lock:
                self._is_closed = True
                self._storage.close(self._fd)

    def _rotate(self) -> None:
        """Go on to a new segment. The old one is synced first, whatever durability is wanted:
        the reader takes a segment with a successor to be complete.

        Crash: the old segment is whole; the new one is not there, or empty.
        """
        with self._sync_lock, self._dying():
            self._storage.fdatasync(self._fd)
            self._durable_lsn = self._written_lsn
            old_path = segment_path(self._directory, self._segment.seq)
            old_fd = self._fd
            self._segment, self._fd = self._create_segment(self._segment.seq + 1)
            self._checksum = 0
            self._closed.append(ClosedSegment(old_path, self._written_lsn))
            self._storage.close(old_fd)

    def _create_segment(self, seq: int) -> tuple[SegmentHeader, int]:
        header = SegmentHeader(
            store_uuid=self._store_uuid,
            seq=seq,
            first_lsn=self._written_lsn + 1,
            salt=int.from_bytes(os.urandom(8), "little"),
            epoch=self._epoch,
            segment_bytes=self._segment_bytes,
            created_ns=time.time_ns(),
        )
        with self._spare_lock:
            self._has_spare = False
            return header, create_segment(self._storage, self._directory, header)

    def _require_alive(self) -> None:
        if self._death is not None:
            raise WalDead(
                f"an earlier write or sync failed ({self._death!r}); exit and recover"
            ) from self._death
        if self._is_closed:
            raise WalMisuse("the writer is closed")

    @contextmanager
    def _dying(self) -> Iterator[None]:
        """Whatever is raised inside kills the writer: what reached the disk is not known."""
        try:
            yield
        except BaseException as error:
            self._death = error
            raise
