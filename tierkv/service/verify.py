"""Checks a stopped store, and repairs it: format, index, log, invariants, every slot on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tierkv_wal import EndKind, WalError

from tierkv.config.schema import Config
from tierkv.core.ids import I64, Bool, Tier
from tierkv.core.spec import slot_stride
from tierkv.core.state import State
from tierkv.errors import CorruptionError, InvariantViolation
from tierkv.service.deleted import DeletedFile
from tierkv.service.machine import Machine, RealMachine
from tierkv.service.progress import Tell, tell_nobody
from tierkv.service.recovery import load, recover, require_new
from tierkv.service.site import Site, refusing_newer_logs
from tierkv.service.store import StateDirectory
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk import DiskTier
from tierkv.units import MiB

BATCH = 64


@dataclass
class VerifyReport:
    """What was looked at and what was wrong. ``findings`` is empty for a sound store.

    ``repaired``: what was found is no more; ``blocks`` and ``sequences`` are those that are left.
    """

    blocks: int = 0
    sequences: int = 0
    records: int = 0
    wal_end: str = "clean"
    slots_checked: int = 0
    slots_damaged: int = 0
    repaired: bool = False
    findings: list[str] = field(default_factory=list)


def verify(
    config: Config,
    *,
    deep: bool,
    repair: bool = False,
    progress: Tell = tell_nobody,
) -> VerifyReport:
    """Check the store of a configuration; changes nothing in it unless told to ``repair``.

    ``deep`` reads payloads too and compares their checksums; else only slot headers are read.
    ``repair``: if anything is found, do what the next start of the daemon would do (see
    ``recovery``), and drop the copies on disk that are damaged. Arenas that systemd keeps are not
    within reach: what lies only in them is forgotten then.

    Raises NotReady while a daemon holds the store, ConfigError if a newer version wrote it or if
    another user than the store's asks for a repair, TierFull, TierFailed, OSError.
    """
    path = Path(config.server.state_dir)
    if not path.exists():
        return VerifyReport()
    if config.device.kind == "cuda":
        # What lay on the GPU is gone: no arena of that size is to be looked for in RAM.
        config = replace(config, device=replace(config.device, bytes=MiB))
    directory = StateDirectory.open(path)
    try:
        report = _report_of(_look, config, directory, progress, deep)
        if repair and report.findings:
            directory.require_owner()
            report = _report_of(_repair, config, directory, progress, deep)
    finally:
        directory.close()
    return report


def _report_of(
    work: Callable[[Config, StateDirectory, VerifyReport, SlotChecker, Machine], None],
    config: Config,
    directory: StateDirectory,
    progress: Tell,
    deep: bool,
) -> VerifyReport:
    report = VerifyReport()
    checker = SlotChecker(report, progress, deep=deep)
    try:
        with refusing_newer_logs():
            work(config, directory, report, checker, RealMachine())
    except (CorruptionError, InvariantViolation, WalError) as error:
        report.findings.append(str(error))
    return report


def _look(
    config: Config,
    directory: StateDirectory,
    report: VerifyReport,
    checker: SlotChecker,
    machine: Machine,
) -> None:
    stored = directory.read_format()
    if stored is None:
        return
    try:
        DeletedFile(directory.path, machine.storage).read()
    except CorruptionError as error:
        report.findings.append(str(error))
    site = Site(config, directory, stored, False, machine, checker.tell)
    if not site.has_index:
        require_new(site)
        return
    with closing(site.open_index()) as index:
        loaded = load(site, index)
    state = loaded.state
    report.blocks, report.sequences = len(state.live_rows()), len(state.sequences)
    report.records = loaded.records
    end = loaded.reader.end
    report.wal_end = end.kind.value
    if end.kind is EndKind.CORRUPT:
        report.findings.append(f"log {end.path} at byte {end.offset}: {end.reason}")
    disk = site.open_disk(state.pools)
    if disk is None:
        return
    with closing(disk):
        for pool, rows in state.by_pool(state.rows_in(Tier.DISK)):
            checker.check(state, disk, pool, rows)


def _repair(
    config: Config,
    directory: StateDirectory,
    report: VerifyReport,
    checker: SlotChecker,
    machine: Machine,
) -> None:
    """Let recovery do its work, with a look at every slot.

    Crash: as in any recovery, the store as it was, or repaired.
    """
    recovered = recover(config, directory, checker.tell, machine, checker.check)
    recovered.close()
    found = recovered.report
    if found.rebuilt:
        report.findings.append(f"{found.rebuilt}; the index was made anew from the slots")
    elif found.wal_end == EndKind.CORRUPT.value:
        report.findings.append(f"the log was corrupt and lies in {directory.quarantine}")
    report.blocks, report.sequences = found.blocks, len(recovered.state.sequences)
    report.records, report.wal_end = found.records, found.wal_end
    report.repaired = True


class SlotChecker:
    """Looks at copies on disk, and counts them in a report. ``deep``: at their payload as well."""

    def __init__(self, report: VerifyReport, progress: Tell, *, deep: bool) -> None:
        self._report = report
        self.tell = progress
        self._deep = deep
        self._all = 0

    def check(self, state: State, disk: DiskTier, pool: int, rows: I64) -> Bool:
        """Which of the rows' copies on disk are what the state says, shape [n]."""
        self._all = max(self._all, len(state.rows_in(Tier.DISK)))
        shape = state.pools[pool]
        sound = np.zeros(len(rows), np.bool_)
        with tempfile.TemporaryDirectory(prefix="tierkv-verify-") as scratch:
            budget = BATCH * slot_stride(shape.block_bytes)
            arena = Arena.open(ArenaFiles(Path(scratch)), "verify", budget, bytes(16), "")
            try:
                arena.add_pool(pool, shape.block_bytes, shape.block_tokens)
                order = np.argsort(state.blocks.slot[Tier.DISK][rows])
                for at in range(0, len(rows), BATCH):
                    part = order[at : at + BATCH]
                    sound[part] = self._check_some(state, disk, arena, pool, rows[part])
            finally:
                arena.close()
        return sound

    def _check_some(self, state: State, disk: DiskTier, arena: Arena, pool: int, rows: I64) -> Bool:
        slots, ids = state.blocks.slot[Tier.DISK][rows], state.blocks.id[rows]
        if self._deep:
            targets = np.arange(len(rows), dtype=np.uint32)
            good = disk.read(pool, slots, ids, arena, targets).ok
            entries = arena.table(pool)[targets]
        else:
            entries, good = disk.headers(pool, slots)
            good &= entries["id"] == ids
        good &= entries["sum_hi"] == state.blocks.sum_hi[rows]
        good &= entries["sum_lo"] == state.blocks.sum_lo[rows]
        report = self._report
        report.slots_checked += len(rows)
        report.slots_damaged += int(np.count_nonzero(~good))
        for slot, block in zip(slots[~good].tolist(), ids[~good].tolist(), strict=True):
            segment, offset = disk.place(pool, slot)
            report.findings.append(
                f"block {block} on disk is damaged: slot {slot}, byte {offset} of {segment}"
            )
        self.tell("checking slots on disk", report.slots_checked, self._all)
        return good
