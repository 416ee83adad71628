"""The log of a stopped store, for people: everything in it, its measures, whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tierkv_wal import EndKind, WalReader
from tierkv_wal.format import HEADER_BYTES, SLOT_BYTES
from tierkv_wal.look import Fault, SeenFrame, look
from tierkv_wal.segment import SegmentFile

from tierkv.config.schema import Config
from tierkv.core.records import RECORD, Kind, require_known
from tierkv.errors import ConfigError, CorruptionError
from tierkv.service.machine import RealMachine
from tierkv.service.progress import Tell, tell_nobody
from tierkv.service.recovery import read_checkpoint, recover, require_new
from tierkv.service.site import Site, refusing_newer_logs
from tierkv.service.store import StateDirectory, StoreFormat

CLEAN, TORN, CORRUPT = (kind.value for kind in EndKind)


@dataclass
class LogEnd:
    """Where the log that a daemon would read ends. ``kind``: "clean", "torn" or "corrupt".

    ``lsn``: the last good one. At ``offset`` of ``path`` lies what ``reason`` says.
    """

    kind: str
    lsn: int
    path: str
    offset: int
    reason: str


@dataclass
class SegmentStat:
    """One file of the log. Without a sound header all but ``file``, ``seq`` and ``fault`` is 0."""

    file: str
    seq: int
    fault: str
    epoch: int = 0
    first_lsn: int = 0
    last_lsn: int = 0
    used_bytes: int = 0
    allocated_bytes: int = 0
    created_unix_s: float = 0.0


@dataclass
class LogStat:
    """Measures of everything in the log's directory.

    ``checkpoint_lsn`` is None if the index cannot say. ``behind_checkpoint_bytes``: what the next
    start replays. ``unreached_records``: intact, but a reader stops before them.
    """

    directory: str
    segments: list[SegmentStat]
    frames: int
    records: int
    records_by_kind: dict[str, int]
    records_per_frame_mean: float
    records_per_frame_max: int
    unreached_records: int
    checkpoint_lsn: int | None
    behind_checkpoint_bytes: int
    end: LogEnd


@dataclass
class LogVerdict:
    """Whether everything that was durable is there. ``findings`` is empty if so.

    Counts are of what lies behind the checkpoint. ``unreached_records``: intact ones behind the
    log's end; after a mere kill, in which every write survives, they tell of a torn tail that it
    was damaged later.
    """

    frames: int
    records: int
    unreached_records: int
    end: LogEnd
    findings: list[str] = field(default_factory=list)


@dataclass
class RepairPlan:
    """What a repair keeps and gives up.

    ``kept_records``: behind the checkpoint and before the damage. ``lost_records``: intact behind
    the damage; of others nobody knows how many there were. ``segments`` move to ``quarantine``.
    """

    end: LogEnd
    kept_records: int
    lost_records: int
    segments: list[str]
    quarantine: str

    @property
    def is_needed(self) -> bool:
        """Whether the log is corrupt at all."""
        return self.end.kind == CORRUPT


@dataclass
class Repaired:
    """What a repair left: blocks that are kept, those without any copy, leases that ended."""

    blocks: int
    dropped_blocks: int
    leases_closed: int
    records: int
    log_was: str
    quarantined: list[str]


@contextmanager
def open_log(config: Config) -> Iterator[StoppedLog]:
    """Lock a stopped store and look at its log.

    Raises NotReady while a daemon holds it, ConfigError if a newer version wrote it, OSError.
    """
    path = Path(config.server.state_dir)
    directory = StateDirectory.open(path)
    try:
        stored = directory.read_format()
        if stored is None:
            raise ConfigError(f"no store is in {path}: it has no file FORMAT")
        with refusing_newer_logs():
            yield StoppedLog(config, directory, stored)
    finally:
        directory.close()


class StoppedLog:
    """The log of a store that this process has locked; made by ``open_log``.

    ``checkpoint_lsn`` is None, and ``index_fault`` says why, if the index is damaged or lost.
    """

    def __init__(self, config: Config, directory: StateDirectory, stored: StoreFormat) -> None:
        self._site = Site(config, directory, stored, False, RealMachine(), tell_nobody)
        self._directory = directory
        self.index_fault = ""
        self.checkpoint_lsn: int | None = None
        try:
            self.checkpoint_lsn = self._read_checkpoint_lsn()
        except CorruptionError as error:
            self.index_fault = error.message

    def look(self, from_lsn: int = 0) -> Iterator[SegmentFile | SeenFrame | Fault]:
        """Everything in the log's directory that reaches ``from_lsn``, behind damage too."""
        site = self._site
        return look(site.machine.storage, str(site.directory.wal), site.stored.store_uuid, from_lsn)

    def end(self) -> LogEnd:
        """How the log ends for a daemon. Reads all behind the checkpoint."""
        reader = self._site.open_log(self.checkpoint_lsn)
        for _ in reader.frames():
            pass
        return _end_of(reader)

    def stat(self) -> LogStat:
        """Measure the log. Reads all of it."""
        segments: list[SegmentStat] = []
        kinds = np.zeros(256, np.int64)
        sizes: list[int] = []
        unreached = 0
        for seen in self.look():
            if isinstance(seen, SegmentFile):
                segments.append(_segment_stat(seen))
            elif isinstance(seen, SeenFrame):
                records = seen.records.view(RECORD).reshape(-1)
                kinds += np.bincount(records["type"], minlength=256)
                sizes.append(len(records))
                unreached += 0 if seen.is_reached else len(records)
                segments[-1].last_lsn = seen.header.last_lsn
                slots = seen.header.last_lsn + 1 - segments[-1].first_lsn
                segments[-1].used_bytes = HEADER_BYTES + SLOT_BYTES * slots
        end = self.end()
        behind = max(0, end.lsn - (self.checkpoint_lsn or 0))
        return LogStat(
            directory=str(self._directory.wal),
            segments=segments,
            frames=len(sizes),
            records=sum(sizes),
            records_by_kind={_kind_name(int(k)): int(kinds[k]) for k in np.flatnonzero(kinds)},
            records_per_frame_mean=sum(sizes) / len(sizes) if sizes else 0.0,
            records_per_frame_max=max(sizes, default=0),
            unreached_records=unreached,
            checkpoint_lsn=self.checkpoint_lsn,
            behind_checkpoint_bytes=SLOT_BYTES * behind,
            end=end,
        )

    def verify(self) -> LogVerdict:
        """Read everything behind the checkpoint, as a daemon would, and judge it.

        Without a sound index there is no checkpoint: then all that is there is read. Raises
        ConfigError for records of a newer version.
        """
        reader = self._site.open_log(self.checkpoint_lsn)
        frames = records = 0
        for frame in reader.frames():
            frames += 1
            records += len(frame.records)
            require_known(frame.records[:, 0])
        end = _end_of(reader)
        _, unreached = self._segments_and_records_behind(end.lsn)
        verdict = LogVerdict(frames, records, unreached, end)
        if self.index_fault:
            verdict.findings.append(self.index_fault)
        if verdict.end.kind == CORRUPT:
            verdict.findings.append(f"{end.path} at byte {end.offset}: {end.reason}")
        return verdict

    def _segments_and_records_behind(self, lsn: int) -> tuple[list[str], int]:
        """Paths of all segments, and how many records of whole frames lie behind an LSN."""
        segments, records = [], 0
        for seen in self.look(lsn):
            if isinstance(seen, SegmentFile):
                segments.append(seen.path)
            elif isinstance(seen, SeenFrame) and seen.header.last_lsn > lsn:
                records += len(seen.records)
        return segments, records

    def plan_repair(self) -> RepairPlan:
        """What ``repair`` would do. Raises CorruptionError if the index is damaged."""
        if self.index_fault:
            raise CorruptionError(
                f"{self.index_fault}; repairing the log is of no use without the index; "
                "`tierkv verify --repair` makes that anew",
                path=str(self._directory.index),
                offset=0,
            )
        reader = self._site.open_log(self.checkpoint_lsn)
        kept = sum(len(frame.records) for frame in reader.frames())
        end = _end_of(reader)
        is_corrupt = end.kind == CORRUPT
        segments, lost = self._segments_and_records_behind(end.lsn) if is_corrupt else ([], 0)
        return RepairPlan(
            end=end,
            kept_records=kept,
            lost_records=lost,
            segments=segments,
            quarantine=str(self._directory.quarantine),
        )

    def repair(self, progress: Tell = tell_nobody) -> Repaired:
        """Recover the store as the next start of a daemon would, and stop there.

        What was read before the damage becomes the checkpoint, old segments move to quarantine, a
        new one begins. Raises ConfigError for a user who is not the store's.

        Crash: as any crash in recovery. The next repair, or start, begins again.
        """
        self._directory.require_owner()
        recovered = recover(self._site.config, self._directory, progress)
        recovered.close()
        report = recovered.report
        return Repaired(
            blocks=report.blocks,
            dropped_blocks=report.dropped_blocks,
            leases_closed=report.leases_closed,
            records=report.records,
            log_was=report.wal_end,
            quarantined=report.quarantined,
        )

    def _read_checkpoint_lsn(self) -> int:
        site = self._site
        if not site.has_index:
            require_new(site)
            return 0
        with closing(site.open_index()) as index:
            return int(read_checkpoint(site, index).meta.get("checkpoint_lsn", 0))


def _end_of(reader: WalReader) -> LogEnd:
    end = reader.end
    return LogEnd(end.kind.value, end.lsn, end.path, end.offset, end.reason)


def _segment_stat(segment: SegmentFile) -> SegmentStat:
    header = segment.header
    if header is None:
        return SegmentStat(segment.path, segment.seq, segment.fault)
    return SegmentStat(
        file=segment.path,
        seq=segment.seq,
        fault=segment.fault,
        epoch=header.epoch,
        first_lsn=header.first_lsn,
        last_lsn=header.first_lsn - 1,
        used_bytes=HEADER_BYTES,
        allocated_bytes=segment.file_bytes,
        created_unix_s=header.created_ns / 1e9,
    )


def _kind_name(kind: int) -> str:
    return Kind(kind).name if kind in set(Kind) else f"type {kind}"
