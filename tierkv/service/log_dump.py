"""A log as plain documents, one for each segment, frame, record and fault: for ``wal dump``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tierkv_wal.look import Fault, SeenFrame
from tierkv_wal.segment import SegmentFile

from tierkv.core.decode import decode
from tierkv.core.records import RECORD
from tierkv.service.log_tools import StoppedLog

Document = dict[str, Any]
"""Always has the key ``what``: "segment", "frame", "record", "fault" or "end"."""

_CLOCK_SLACK_MS = 24 * 3600 * 1000
_LOW = 2**32


def dump(log: StoppedLog, from_lsn: int = 0, limit: int | None = None) -> Iterator[Document]:
    """Everything that reaches ``from_lsn``, with at most ``limit`` records; then how the log ends.

    Holds one segment at a time. Raises OSError, WalVersion.
    """
    left = float("inf") if limit is None else limit
    for seen in log.look(from_lsn):
        if isinstance(seen, SegmentFile):
            yield _segment(seen)
        elif isinstance(seen, Fault):
            yield {"what": "fault", **asdict(seen)}
        else:
            yield _frame(seen)
            for document in _records(seen, from_lsn):
                yield document
                left -= 1
                if left <= 0:
                    return
    yield {"what": "end", **asdict(log.end())}


def _segment(segment: SegmentFile) -> Document:
    header = segment.header
    return {
        "what": "segment",
        "path": segment.path,
        "seq": segment.seq,
        "epoch": header and header.epoch,
        "first_lsn": header and header.first_lsn,
        "allocated_bytes": segment.file_bytes,
        "created_unix_s": header and header.created_ns / 1e9,
        "fault": segment.fault,
    }


def _frame(seen: SeenFrame) -> Document:
    header = seen.header
    return {
        "what": "frame",
        "lsn": header.lsn,
        "last_lsn": header.last_lsn,
        "path": seen.path,
        "offset": seen.offset,
        "epoch": header.epoch,
        "flags": header.flags,
        "durable_lsn": header.durable_lsn,
        "records": header.records,
        "written_unix_s": _time_ms(seen) / 1e3,
        "is_reached": seen.is_reached,
    }


def _records(seen: SeenFrame, from_lsn: int) -> Iterator[Document]:
    skip = max(0, from_lsn - seen.header.lsn - 1)
    first_lsn = seen.header.lsn + 1
    records = seen.records.view(RECORD).reshape(-1)
    for at in range(skip, len(records)):
        decoded = decode(records[at])
        yield {
            "what": "record",
            "lsn": first_lsn + at,
            "kind": decoded.kind,
            "fields": decoded.fields,
        }


def _time_ms(seen: SeenFrame) -> int:
    """When the frame was built. It has the low 32 bits; the segment was made before, or nearly."""
    earliest = seen.segment.created_ns // 1_000_000 - _CLOCK_SLACK_MS
    return earliest + (seen.header.time_ms - earliest) % _LOW
