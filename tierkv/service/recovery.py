"""From what a dead daemon left to a state that can serve.

1. The index gives the state of the last checkpoint, the log what came after it.
2. RAM copies count only if their arena is the one of this boot and each slot's entry agrees.
3. Leases of dead workers end; those of live ones wait for their worker (the caller times that).
4. The result becomes the new checkpoint before anything is served; then the log goes on in a new
   segment. Until that checkpoint nothing old is changed, so dying here is just another crash.

Damage is moved to quarantine, counted and said; what remains sound is kept. An index that is lost,
damaged or contradicted by the log is made anew from what the slots say of themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tierkv_wal import EndKind, Frame, WalError, WalReader, WalVersion, WalWriter

from tierkv.config.schema import Config
from tierkv.core.ids import I64, RAM_TIERS, U8, Bool, Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.records import RECORD, Kind, blank, of_copies
from tierkv.core.replay import replay
from tierkv.core.restart_order import restart_order
from tierkv.core.state import Sequence, State
from tierkv.errors import ConfigError, CorruptionError, InvariantViolation
from tierkv.service.machine import CheckpointIndex, Machine, RealMachine
from tierkv.service.rebuild import FoundCopies, LastWords, read_arena, read_disk, rebuild
from tierkv.service.snapshot import index_changes, restore
from tierkv.service.store import StateDirectory, StoreFormat, new_store
from tierkv.tiers.arena import Arena
from tierkv.tiers.copy import check_entries
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.sizes import slot_bytes
from tierkv.tiers.tables import ArenaTables

log = logging.getLogger(__name__)

BLOCK_IDS_PER_EPOCH = 2**40
"""Room for the ids of one daemon's life, so that those of the next are above them, known or not."""

LOG_SUFFIX = ".wal"

RECORDS_AT_ONCE = 1 << 20
"""Records of the log that are replayed together: what gathers between two checkpoints, unless one
failed. Bounds the memory that takes, a few hundred MiB."""


@dataclass
class TierReport:
    """Copies of one tier that outlived the daemon, and those that did not."""

    kept: int = 0
    dropped: int = 0


@dataclass
class RecoveryReport:
    """What a start found. ``blocks``: in the state now; ``dropped_blocks``: no copy was left.

    ``rebuilt`` says why the index had to be made anew from slot entries, if it had to.
    """

    duration_s: float = 0.0
    records: int = 0
    blocks: int = 0
    dropped_blocks: int = 0
    leases_kept: int = 0
    leases_closed: int = 0
    wal_end: str = "clean"
    rebuilt: str = ""
    quarantined: list[str] = field(default_factory=list)
    tiers: dict[Tier, TierReport] = field(
        default_factory=lambda: {tier: TierReport() for tier in Tier}
    )


@dataclass
class Recovered:
    """Everything the daemon is built on."""

    state: State
    specs: dict[int, bytes]
    index: CheckpointIndex
    writer: WalWriter
    arenas: dict[Tier, Arena]
    disk: DiskTier | None
    checkpoint_lsn: int
    report: RecoveryReport

    def close(self) -> None:
        """Close all files; the last call."""
        self.writer.close()
        if self.disk is not None:
            self.disk.close()
        self.index.close()
        for arena in self.arenas.values():
            arena.close()


def budgets_of(config: Config) -> dict[Tier, int]:
    """The tiers' budgets, bytes."""
    return {
        Tier.DEVICE: config.device.bytes,
        Tier.HOST: config.host.bytes,
        Tier.DISK: config.disk.bytes,
    }


CheckCopies = Callable[[State, DiskTier, int, I64], Bool]
"""``check(state, disk, pool, rows)``: which of the rows' copies on disk are sound, shape [n]."""


@dataclass(frozen=True)
class Site:
    """Where a store is recovered.

    ``is_new``: its FORMAT was made just now. ``progress`` is told what goes on.
    """

    config: Config
    directory: StateDirectory
    stored: StoreFormat
    is_new: bool
    machine: Machine
    progress: Callable[[str], None]

    def open_index(self) -> CheckpointIndex:
        """Open or make the index. Raises CorruptionError, TierFailed."""
        return self.machine.open_index(self.directory.index, self.config.index.map_bytes)

    def open_log(self, after_lsn: int | None) -> WalReader:
        """A reader of the log behind ``after_lsn``; None: of all there is."""
        path, uuid = str(self.directory.wal), self.stored.store_uuid
        return WalReader(self.machine.storage, path, uuid, after_lsn)

    def open_disk(self) -> DiskTier | None:
        """The disk tier, without pools, or None if there is none. Raises TierFull, TierFailed."""
        disk, stored = self.config.disk, self.stored
        if not disk.bytes:
            return None
        storage = self.machine.storage
        return DiskTier(disk.dir, disk.bytes, stored.disk_segment_bytes, stored.store_uuid, storage)

    def open_arena(self, tier: Tier) -> Arena:
        """A RAM tier's arena, without pools. Raises TierFull, TierFailed."""
        folder, uuid = Path(self.config.arena.dir), self.stored.store_uuid
        return self.machine.open_arena(folder, tier.label, budgets_of(self.config)[tier], uuid)


def recover(
    config: Config,
    directory: StateDirectory,
    progress: Callable[[str], None],
    machine: Machine | None = None,
    check_disk: CheckCopies | None = None,
) -> Recovered:
    """Recover the store in ``directory``, or make a new one.

    ``machine``: where everything lies; None for the real one. ``check_disk``: looks at all copies
    on disk, and those that are not sound are dropped; None to find out when they are read.

    Raises OSError if something cannot be read (which is no reason to forget it), ConfigError,
    TierFull, TierFailed.
    """
    started = time.monotonic()
    site = open_site(config, directory, progress, machine or RealMachine())
    report = RecoveryReport()
    try:
        try:
            recovered = _recover_by(load, site, report, check_disk)
        except WalVersion:
            raise
        except (CorruptionError, InvariantViolation, WalError) as error:
            log.error("the index is of no use, making it anew from what the slots say: %s", error)
            report = RecoveryReport(wal_end="set aside", rebuilt=str(error))
            moved = directory.set_aside(directory.index)
            report.quarantined += [str(moved)] if moved else []
            recovered = _recover_by(rescue, site, report, check_disk)
    except WalVersion as error:
        # Not damage: forgetting it would throw away what the newer version can read.
        raise ConfigError(f"the log was written by a newer tierkv: {error}") from error
    report.duration_s = time.monotonic() - started
    return recovered


@dataclass
class Loaded:
    """What outlived the daemon, before anything is changed. ``reader`` was read to its end."""

    state: State
    specs: dict[int, bytes]
    reader: WalReader
    records: int
    complete: bool
    """Whether the log held all that workers were told: it is not corrupt, nor was it behind."""
    is_rebuilt: bool = False
    """Whether the state comes from the slots. Then no later recovery can need the log."""


def load(site: Site, index: CheckpointIndex) -> Loaded:
    """Read the last checkpoint and replay the log behind it. Changes nothing on disk.

    Raises CorruptionError, InvariantViolation, WalError if they are lost, or contradict themselves
    or each other, OSError if something cannot be read.
    """
    site.progress("reading the index")
    contents = index.load()
    if contents.bad_rows:
        raise CorruptionError(
            f"{contents.bad_rows} entries of the index fail their checksum",
            path=str(site.directory.index),
            offset=0,
        )
    if "checkpoint_lsn" not in contents.meta:
        _require_new(site)
    budgets = budgets_of(site.config)
    old = {tier: int(contents.meta.get(f"{tier.label}_bytes", budgets[tier])) for tier in Tier}
    state = State({tier: max(old[tier], budgets[tier]) for tier in Tier}, slot_bytes)
    specs = restore(state, contents)
    reader = site.open_log(int(contents.meta.get("checkpoint_lsn", 0)))
    records = _replay(state, reader.frames(), site.progress)
    if reader.begins_late:
        raise CorruptionError(
            f"the index {site.directory.index} is older than the log behind it",
            path=str(site.directory.index),
            offset=0,
        )
    check_invariants(state)
    behind = bool(contents.meta.get("replies_ahead", 0))
    complete = reader.end.kind is not EndKind.CORRUPT and not behind
    return Loaded(state, specs, reader, records, complete)


def _replay(state: State, frames: Iterable[Frame], progress: Callable[[str], None]) -> int:
    """Replay the frames, many at a time; returns the number of records. Mutates the state."""
    done = waiting = 0
    parts: list[U8] = []
    for frame in frames:
        parts.append(frame.records)
        waiting += len(frame.records)
        if waiting >= RECORDS_AT_ONCE:
            replay(state, np.concatenate(parts).view(RECORD).reshape(-1))
            done, waiting = done + waiting, 0
            parts.clear()
            progress(f"replaying the log, {done} records")
    if parts:
        replay(state, np.concatenate(parts).view(RECORD).reshape(-1))
    return done + waiting


def _require_new(site: Site) -> None:
    """Raise CorruptionError if a store without a checkpoint has been in use."""
    storage, directory = site.machine.storage, site.directory
    if site.is_new:
        return
    used = any(name.endswith(LOG_SUFFIX) for name in storage.listdir(str(directory.wal)))
    disk = site.open_disk()
    if disk is not None:
        used |= bool(disk.shapes())
        disk.close()
    if used:
        raise CorruptionError(
            f"the index {directory.index} is empty, though there are log segments or blocks on "
            "disk: it was lost",
            path=str(directory.index),
            offset=0,
        )


def rescue(site: Site, index: CheckpointIndex) -> Loaded:
    """The state as the slots tell it, for an index that is lost. Changes none of them.

    Of the log, which cannot be replayed without its checkpoint, counts what it calls dropped and
    which names it has given out. The device tier is left out, as workers may still write there.
    """
    words = LastWords()
    reader = site.open_log(None)
    for frame in reader.frames():
        words.hear(frame.records.view(RECORD).reshape(-1))
    found = FoundCopies()
    budgets = budgets_of(site.config)
    if budgets[Tier.HOST]:
        arena = site.open_arena(Tier.HOST)
        read_arena(found, arena, Tier.HOST)
        arena.close()
    disk = site.open_disk()
    if disk is not None:
        read_disk(found, disk, lambda at, of: site.progress(f"reading slot headers, {at} of {of}"))
        disk.close()
    rebuilt = rebuild(found.all(), found.shapes, words)
    state = State(budgets, slot_bytes)
    for records in rebuilt.records:
        state.apply(records)
    log.warning(
        "made the index anew: %d blocks; left out %d copies that the log calls dropped, %d of "
        "blocks that have a younger twin or lack their beginning, %d damaged slots",
        rebuilt.blocks,
        rebuilt.dropped,
        rebuilt.stale,
        found.damaged,
    )
    state.next_lease = words.next_lease
    state.next_block = max(state.next_block, words.next_block)
    state.epoch = max(words.epoch, (state.next_block - 1) // BLOCK_IDS_PER_EPOCH)
    return Loaded(state, {}, reader, 0, complete=False, is_rebuilt=True)


def _recover_by(
    find: Callable[[Site, CheckpointIndex], Loaded],
    site: Site,
    report: RecoveryReport,
    check_disk: CheckCopies | None,
) -> Recovered:
    index = site.open_index()
    try:
        return _go_on(find(site, index), site, index, report, check_disk)
    except BaseException:
        index.close()
        raise


def _go_on(
    loaded: Loaded,
    site: Site,
    index: CheckpointIndex,
    report: RecoveryReport,
    check_disk: CheckCopies | None,
) -> Recovered:
    """From what was found to what can serve, with a new checkpoint and a new log segment."""
    state, reader, config = loaded.state, loaded.reader, site.config
    report.records = loaded.records
    if reader.end.kind is not EndKind.CLEAN:
        log.warning("the log ends %s: %s", reader.end.kind.value, reader.end.reason)
        if not loaded.is_rebuilt:
            report.wal_end = reader.end.kind.value
    budgets = budgets_of(config)
    before = len(state.live_rows())
    if not loaded.complete and state.leases:
        log.warning("the log lacks some of what workers were told: their leases end")
    arenas = _open_arenas(site, state, keep_device=loaded.complete)
    disk = open_disk(site, state)
    if disk is not None and check_disk is not None:
        _drop_damaged(state, disk, budgets, check_disk)
    _undo(state, budgets, arenas, report, site.machine)
    _reopen(state, arenas)
    state.resize(budgets)
    state.reindex()
    check_invariants(state)
    report.blocks = len(state.live_rows())
    report.dropped_blocks = before - report.blocks
    site.progress("writing the checkpoint")
    state.epoch = max(state.epoch, reader.epoch) + 1
    # Ids of lost records may lie in slots: no later block may be taken for such a one.
    state.next_block = max(state.next_block, state.epoch * BLOCK_IDS_PER_EPOCH)
    lsn = reader.resume_lsn
    meta = {"checkpoint_lsn": lsn, "replies_ahead": int(config.wal.durability == "none")}
    index.commit(index_changes(state, state.take_changes(), loaded.specs, meta))
    segment_bytes = config.wal.segment_bytes
    if reader.end.kind is EndKind.CORRUPT or loaded.is_rebuilt:
        report.quarantined.append(reader.end.path)
        writer = reader.salvage(state.epoch, str(site.directory.quarantine), segment_bytes)
    else:
        writer = reader.writer(state.epoch, segment_bytes)
    try:
        writer.forget(lsn)
    except OSError as error:
        log.warning("cannot remove old log segments: %s", error)
    return Recovered(state, loaded.specs, index, writer, arenas, disk, lsn, report)


def open_site(
    config: Config,
    directory: StateDirectory,
    progress: Callable[[str], None],
    machine: Machine,
) -> Site:
    """Read or make the store's FORMAT. Raises CorruptionError, ConfigError, OSError."""
    is_new = directory.read_format() is None
    stored = _open_format(config, directory)
    return Site(config, directory, stored, is_new, machine, progress)


def _open_format(config: Config, directory: StateDirectory) -> StoreFormat:
    stored = directory.read_format()
    if stored is None:
        stored = _fresh_format(config)
        directory.write_format(stored)
    if config.disk.bytes and stored.disk_segment_bytes != config.disk.segment_bytes:
        log.info(
            "disk.segment_bytes is %d, but this store keeps the %d bytes it was made with",
            config.disk.segment_bytes,
            stored.disk_segment_bytes,
        )
    current = replace(
        stored,
        device_bytes=config.device.bytes,
        host_bytes=config.host.bytes,
        disk_bytes=config.disk.bytes,
    )
    if current != stored:
        directory.write_format(current)
    return current


def _fresh_format(config: Config) -> StoreFormat:
    return new_store(
        disk_segment_bytes=config.disk.segment_bytes,
        device_bytes=config.device.bytes,
        host_bytes=config.host.bytes,
        disk_bytes=config.disk.bytes,
    )


def _open_arenas(site: Site, state: State, *, keep_device: bool) -> dict[Tier, Arena]:
    """The RAM tiers' arenas, those of the last daemon where they may be trusted.

    Without ``keep_device`` the device arena is a new one: workers of the last daemon may still
    write into slots of theirs that the log knows nothing of.
    """
    arenas: dict[Tier, Arena] = {}
    budgets = budgets_of(site.config)
    for tier in RAM_TIERS:
        if not budgets[tier] or (tier is Tier.DEVICE and not keep_device):
            site.machine.forget_arena(Path(site.config.arena.dir), tier.label)
        if budgets[tier]:
            arenas[tier] = site.open_arena(tier)
            for pool, shape in enumerate(state.pools):
                arenas[tier].add_pool(pool, shape.block_bytes, shape.block_tokens)
    return arenas


def open_disk(site: Site, state: State) -> DiskTier | None:
    """The disk tier with the state's pools, or None. Raises TierFull, TierFailed."""
    disk = site.open_disk()
    if disk is not None:
        for pool, shape in enumerate(state.pools):
            disk.add_pool(pool, shape.block_bytes, shape.block_tokens)
    return disk


# --- undo: what must not survive ------------------------------------------------------------------


def _drop_damaged(
    state: State, disk: DiskTier, budgets: dict[Tier, int], check_disk: CheckCopies
) -> None:
    """Drop copies on disk that are not sound. Their slots are free again: a rewrite heals them."""
    for pool, members in list(state.by_pool(state.rows_in(Tier.DISK))):
        slots = state.blocks.slot[Tier.DISK][members].astype(np.int64)
        there = members[slots < budgets[Tier.DISK] // state.slot_bytes(Tier.DISK, pool)]
        _drop_copies(state, Tier.DISK, there[~check_disk(state, disk, pool, there)])


def _undo(
    state: State,
    budgets: dict[Tier, int],
    arenas: dict[Tier, Arena],
    report: RecoveryReport,
    machine: Machine,
) -> None:
    """Bring the state in line with what is really there. Mutates the state."""
    device = arenas.get(Tier.DEVICE)
    device_kept = device is not None and device.adopted
    for lease in list(state.leases.values()):
        if device_kept and machine.is_alive(lease.pid, lease.start_time):
            report.leases_kept += 1
            continue
        report.leases_closed += 1
        closed = blank(1, Kind.LEASE_CLOSE)
        closed["key"] = lease.id
        state.apply(closed)
    for tier in Tier:
        _drop_lost_copies(state, tier, budgets, arenas, report)
    for sequence in list(state.sequences.values()):
        lost = np.flatnonzero(~state.blocks.has_any_copy(sequence.rows))
        if len(lost) and state.writable(sequence).any():
            # It is lost to its worker, who may be writing into the rest of it right now.
            fenced = blank(1, Kind.SEQ_FENCE)
            fenced["id"] = sequence.id
            state.apply(fenced)
        elif len(lost):
            cut = blank(1, Kind.SEQ_TRUNCATE)
            cut["id"], cut["loc"] = sequence.id, lost[0]
            state.apply(cut)
        if not sequence.suspended:
            _drop_stale_copies(state, sequence)
        if not sequence.suspended and not state.blocks.has_copy(sequence.rows, Tier.DEVICE).all():
            # It died while blocks were coming up; its worker asks again.
            suspended = blank(1, Kind.SEQ_SUSPEND)
            suspended["id"] = sequence.id
            state.apply(suspended)


def _reopen(state: State, arenas: dict[Tier, Arena]) -> None:
    """Name unsealed blocks in their entries, without checksum: their workers write on in them."""
    rows = state.live_rows()
    rows = rows[~state.blocks.is_sealed(rows)]
    rows = rows[(state.blocks.active[rows] > 0) & state.blocks.has_copy(rows, Tier.DEVICE)]
    for pool, members in state.by_pool(rows):
        slots = state.blocks.slot[Tier.DEVICE][members].astype(np.int64)
        ArenaTables(arenas).open(Tier.DEVICE, pool, slots, state.blocks.id[members])


def _drop_stale_copies(state: State, sequence: Sequence) -> None:
    """A worker may have written on in unsealed blocks: only their device copies count."""
    rows = sequence.rows
    rows = rows[~state.blocks.is_sealed(rows)]
    rows = rows[state.blocks.has_copy(rows, Tier.DEVICE)]
    for tier in (Tier.HOST, Tier.DISK):
        _drop_copies(state, tier, rows[state.blocks.has_copy(rows, tier)])


def _drop_lost_copies(
    state: State,
    tier: Tier,
    budgets: dict[Tier, int],
    arenas: dict[Tier, Arena],
    report: RecoveryReport,
) -> None:
    rows = state.rows_in(tier)
    before = len(rows)
    for pool, members in list(state.by_pool(rows)):
        slots = state.blocks.slot[tier][members].astype(np.int64)
        sound = slots < budgets[tier] // state.slot_bytes(tier, pool)
        if tier is not Tier.DISK:
            sound &= _entries_agree(state, tier, arenas.get(tier), pool, members, sound)
        _drop_copies(state, tier, members[~sound])
    _drop_copies(state, tier, _over_budget(state, tier, budgets[tier]))
    report.tiers[tier].kept = len(state.rows_in(tier))
    report.tiers[tier].dropped = before - report.tiers[tier].kept


def _over_budget(state: State, tier: Tier, budget: int) -> I64:
    """Rows to drop so that the pools together keep to a budget that was lowered: oldest first."""
    if state.used_bytes(tier) <= budget:
        return np.zeros(0, np.int64)
    rows = state.rows_in(tier)
    rows = rows[restart_order(state.blocks, rows)]
    freed = np.cumsum(state.slot_bytes_of(tier, rows))
    excess = state.used_bytes(tier) - budget
    return rows[: int(np.searchsorted(freed, excess)) + 1]


def _drop_copies(state: State, tier: Tier, rows: I64) -> None:
    blocks = state.blocks
    state.apply(of_copies(Kind.DROP, tier, rows, blocks.id[rows], blocks.slot[tier][rows]))


def _entries_agree(
    state: State, tier: Tier, arena: Arena | None, pool: int, rows: I64, in_range: Bool
) -> Bool:
    """Which RAM copies the slot table confirms, shape [n]; payloads are checked on first use."""
    good = np.zeros(len(rows), np.bool_)
    if arena is None or not arena.adopted:
        return good
    chosen = np.flatnonzero(in_range)
    blocks = state.blocks
    slots = blocks.slot[tier][rows[chosen]]
    ids = blocks.id[rows[chosen]]
    entries = arena.table(pool)[slots]
    sealed = blocks.is_sealed(rows[chosen])
    if tier is Tier.DEVICE:
        # It died sealing: the entry has the name of a cached twin already, the log has not. The
        # payload is still what the worker wrote.
        ids = np.where(sealed, ids, entries["id"])
    agrees = check_entries(arena, pool, slots, ids)
    same_sum = entries["sum_hi"] == blocks.sum_hi[rows[chosen]]
    same_sum &= entries["sum_lo"] == blocks.sum_lo[rows[chosen]]
    good[chosen] = agrees & (same_sum | ~sealed)
    return good


def unverified_rows(state: State) -> I64:
    """Sealed device copies: they outlived a daemon and are checked before they are handed out."""
    rows = state.rows_in(Tier.DEVICE)
    return rows[state.blocks.is_sealed(rows)]
