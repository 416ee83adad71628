"""Checks a stopped store: format, index, log, invariants, and every slot on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tierkv_wal import EndKind, WalError

from tierkv.config.schema import Config
from tierkv.core.ids import I64, Tier
from tierkv.core.spec import slot_stride
from tierkv.core.state import State
from tierkv.errors import CorruptionError, InvariantViolation
from tierkv.service.machine import Machine, RealMachine
from tierkv.service.recovery import load, open_disk
from tierkv.service.store import StateDirectory
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk import DiskTier

BATCH = 64


@dataclass
class VerifyReport:
    """What was looked at and what is wrong. ``findings`` is empty for a sound store."""

    blocks: int = 0
    sequences: int = 0
    records: int = 0
    wal_end: str = "clean"
    slots_checked: int = 0
    slots_damaged: int = 0
    findings: list[str] = field(default_factory=list)


def verify(
    config: Config, *, deep: bool, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> VerifyReport:
    """Check the store of a configuration; changes nothing in it.

    ``deep`` reads payloads too and compares their checksums; else only slot headers are read.
    ``progress(done, all)`` counts slots. Raises NotReady while a daemon holds the store, OSError.
    """
    report = VerifyReport()
    path = Path(config.server.state_dir)
    if not path.exists():
        return report
    directory = StateDirectory.open(path)
    try:
        _verify(config, directory, report, deep, progress, RealMachine())
    except (CorruptionError, InvariantViolation, WalError) as error:
        report.findings.append(str(error))
    finally:
        directory.close()
    return report


def _verify(
    config: Config,
    directory: StateDirectory,
    report: VerifyReport,
    deep: bool,
    progress: Callable[[int, int], None],
    machine: Machine,
) -> None:
    stored = directory.read_format()
    if stored is None:
        return
    index = machine.open_index(directory.index, config.index.map_bytes)
    try:
        loaded = load(config, directory, stored, index, lambda _what: None, machine.storage)
    finally:
        index.close()
    state = loaded.state
    report.blocks, report.sequences = len(state.live_rows()), len(state.sequences)
    report.records = loaded.records
    report.wal_end = loaded.reader.end.kind.value
    if loaded.reader.end.kind is EndKind.CORRUPT:
        end = loaded.reader.end
        report.findings.append(f"log {end.path} at byte {end.offset}: {end.reason}")
    disk = open_disk(config, stored, state, machine.storage)
    if disk is None:
        return
    try:
        _verify_slots(state, disk, report, deep, progress)
    finally:
        disk.close()


def _verify_slots(
    state: State,
    disk: DiskTier,
    report: VerifyReport,
    deep: bool,
    progress: Callable[[int, int], None],
) -> None:
    rows = state.rows_in(Tier.DISK)
    for pool, members in state.by_pool(rows):
        members = members[np.argsort(state.blocks.slot[Tier.DISK][members])]
        with tempfile.TemporaryDirectory(prefix="tierkv-verify-") as scratch:
            shape = state.pools[pool]
            budget = BATCH * slot_stride(shape.block_bytes)
            arena = Arena.open(ArenaFiles(Path(scratch)), "verify", budget, bytes(16), "")
            arena.add_pool(pool, shape.block_bytes, shape.block_tokens)
            for at in range(0, len(members), BATCH):
                part = members[at : at + BATCH]
                bad = _damaged(state, disk, arena, pool, part, deep)
                report.slots_checked += len(part)
                report.slots_damaged += len(bad)
                report.findings += [f"disk slot {slot} of pool {pool} is damaged" for slot in bad]
                progress(report.slots_checked, len(rows))
            arena.close()


def _damaged(
    state: State, disk: DiskTier, arena: Arena, pool: int, rows: I64, deep: bool
) -> list[int]:
    """Slots that do not hold what the state says."""
    slots, ids = state.blocks.slot[Tier.DISK][rows], state.blocks.id[rows]
    if deep:
        targets = np.arange(len(rows), dtype=np.uint32)
        good = disk.read(pool, slots, ids, arena, targets).ok
        entries = arena.table(pool)[targets]
    else:
        entries, good = disk.headers(pool, slots)
        good &= entries["id"] == ids
    good &= entries["sum_hi"] == state.blocks.sum_hi[rows]
    good &= entries["sum_lo"] == state.blocks.sum_lo[rows]
    return [int(slot) for slot in slots[~good]]
