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

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from tierkv_wal import EndKind, WalError, WalReader, WalVersion

from tierkv.config.schema import Config
from tierkv.core.ids import I64, RAM_TIERS, U8, Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.records import RECORD
from tierkv.core.replay import replay
from tierkv.core.state import State
from tierkv.errors import CorruptionError, InvariantViolation
from tierkv.native.loops import loops
from tierkv.service.deleted import DeletedFile, Deletion
from tierkv.service.machine import CheckpointIndex, Machine, RealMachine
from tierkv.service.progress import Tell
from tierkv.service.rebuild import FoundCopies, LastWords, read_arena, read_disk, rebuild
from tierkv.service.recovered import Recovered, RecoveryReport
from tierkv.service.site import Site, budgets_of, open_site, refusing_newer_logs
from tierkv.service.snapshot import index_changes, restore
from tierkv.service.store import StateDirectory
from tierkv.service.undo import CheckCopies, drop_damaged, reopen, undo
from tierkv.tiers.arena import Arena
from tierkv.tiers.entry import DIGEST_BYTES
from tierkv.tiers.index import BlockRows, IndexContents
from tierkv.tiers.sizes import slot_bytes

log = logging.getLogger(__name__)

BLOCK_IDS_PER_EPOCH = 2**40
"""Room for the ids of one daemon's life, so that those of the next are above them, known or not."""

LOG_SUFFIX = ".wal"

RECORDS_AT_ONCE = 1 << 20
"""Records of the log that are replayed together: what gathers between two checkpoints, unless one
failed. Bounds the memory that takes, a few hundred MiB."""


def recover(
    config: Config,
    directory: StateDirectory,
    progress: Tell,
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
    with refusing_newer_logs():
        try:
            recovered = _recover_by(load, site, report, check_disk)
        except WalVersion:
            raise
        except (CorruptionError, InvariantViolation, WalError) as error:
            log.error("the index is of no use, making it anew from what the slots say: %s", error)
            report = RecoveryReport(wal_end="set aside", rebuilt=str(error))
            if not isinstance(error, _IndexLost):
                moved = directory.set_aside(directory.index)
                report.quarantined += [str(moved)] if moved else []
            recovered = _recover_by(rescue, site, report, check_disk)
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
    site.progress("reading the index", 0, 0)
    contents = read_checkpoint(site, index)
    budgets = budgets_of(site.config)
    old = {tier: int(contents.meta.get(f"{tier.label}_bytes", budgets[tier])) for tier in Tier}
    kept = {tier: max(old[tier], budgets[tier]) for tier in Tier}
    state = State(kept, slot_bytes, loops().structures())
    specs = restore(state, contents, _sound(site, index.blocks()))
    reader = site.open_log(int(contents.meta.get("checkpoint_lsn", 0)))
    records = _replay(state, reader, site.progress)
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


def read_checkpoint(site: Site, index: CheckpointIndex) -> IndexContents:
    """The last checkpoint but for its blocks.

    Raises CorruptionError if all or some of it is lost, TierFailed.
    """
    contents = index.load()
    if contents.bad:
        raise _damaged(site, contents.bad)
    if "checkpoint_lsn" not in contents.meta:
        named = (contents.meta, contents.namespaces, contents.leases, contents.sequences)
        require_new(site, is_empty=not any(named) and next(index.blocks(), None) is None)
    return contents


def _sound(site: Site, parts: Iterable[BlockRows]) -> Iterator[BlockRows]:
    """The parts of the last checkpoint's blocks. Raises CorruptionError at one that is damaged."""
    for part in parts:
        if part.bad:
            raise _damaged(site, part.bad)
        yield part


def _damaged(site: Site, bad: int) -> CorruptionError:
    return CorruptionError(
        f"the index {site.directory.index} is damaged: the checksums of {bad} of its entries fail",
        path=str(site.directory.index),
        offset=0,
    )


def _replay(state: State, reader: WalReader, progress: Tell) -> int:
    """Replay the log, many frames at a time; returns the number of records. Mutates the state."""
    done = waiting = 0
    parts: list[U8] = []
    for frame in reader.frames():
        parts.append(frame.records)
        waiting += len(frame.records)
        if waiting >= RECORDS_AT_ONCE:
            replay(state, np.concatenate(parts).view(RECORD).reshape(-1))
            done, waiting = done + waiting, 0
            parts.clear()
            progress("replaying the log", done, reader.records_at_most)
    if parts:
        replay(state, np.concatenate(parts).view(RECORD).reshape(-1))
    return done + waiting


class _IndexLost(CorruptionError):
    """The index is empty, so it can be used as it is: there is nothing to set aside.

    (An attempt to make it anew that fails leaves one. It may be tried again any number of times.)
    """


def require_new(site: Site, *, is_empty: bool = True) -> None:
    """Raise CorruptionError if a store without a checkpoint has been in use.

    ``is_empty``: whether its index holds nothing at all.
    """
    storage, directory = site.machine.storage, site.directory
    if site.is_new:
        return
    used = any(name.endswith(LOG_SUFFIX) for name in storage.listdir(str(directory.wal)))
    disk = site.open_disk()
    if disk is not None:
        with contextlib.closing(disk):
            used |= bool(disk.shapes())
    if used:
        raise (_IndexLost if is_empty else CorruptionError)(
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
        with contextlib.closing(site.open_arena(Tier.HOST)) as arena:
            read_arena(found, arena, Tier.HOST)
    disk = site.open_disk()
    if disk is not None:
        with contextlib.closing(disk):
            read_disk(found, disk, partial(site.progress, "reading slot headers"))
    copies = found.all()
    first_free = max(words.next_block, int(copies["id"].max(initial=0)) + 1)
    deletions = _deletions(site, first_free)
    rebuilt = rebuild(copies, found.shapes, words, deletions)
    state = State(budgets, slot_bytes, loops().structures())
    for records in rebuilt.records:
        state.apply(records)
    log.warning(
        "made the index anew: %d blocks; left out %d copies that the log calls dropped, %d that "
        "were deleted, %d of blocks that have a younger twin or lack their beginning, %d damaged "
        "slots",
        rebuilt.blocks,
        rebuilt.dropped,
        rebuilt.deleted,
        rebuilt.stale,
        found.damaged,
    )
    state.next_lease = words.next_lease
    # Above all ids that anybody names, also of blocks that are left out.
    state.next_block = max([first_free, *(deletion.before for deletion in deletions)])
    state.epoch = max(words.epoch, (state.next_block - 1) // BLOCK_IDS_PER_EPOCH)
    return Loaded(state, {}, reader, 0, complete=False, is_rebuilt=True)


def _deletions(site: Site, first_free: int) -> list[Deletion]:
    """What was deleted: if that cannot be told any more, all blocks below the ``first_free`` id.

    Crash: the damaged file, or one that says so. For the slots still name all those blocks when
    an index is lost the next time.
    """
    directory = site.directory
    file = DeletedFile(directory.path, site.machine.storage)
    try:
        return file.read()
    except CorruptionError as error:
        everything = Deletion(bytes(DIGEST_BYTES), b"", first_free)
        copy = directory.copy_aside(file.path)
        directory.replace(file.path.name, everything.encode())
        log.error(
            "%s: so no block can be told from those that were deleted, and none is kept; a copy of "
            "the file is %s",
            error,
            copy,
        )
        return [everything]


def _recover_by(
    find: Callable[[Site, CheckpointIndex], Loaded],
    site: Site,
    report: RecoveryReport,
    check_disk: CheckCopies | None,
) -> Recovered:
    with contextlib.ExitStack() as opened:
        index = site.open_index()
        opened.callback(index.close)
        recovered = _go_on(find(site, index), site, index, report, check_disk, opened)
        opened.pop_all()
    return recovered


def _go_on(
    loaded: Loaded,
    site: Site,
    index: CheckpointIndex,
    report: RecoveryReport,
    check_disk: CheckCopies | None,
    opened: contextlib.ExitStack,
) -> Recovered:
    """From what was found to what can serve, with a new checkpoint and a new log segment.

    What it opens is also in ``opened``.
    """
    state, reader, config = loaded.state, loaded.reader, site.config
    report.records = loaded.records
    if reader.end.kind is not EndKind.CLEAN:
        log.warning(
            "the log ends %s: %s",
            reader.end.kind.value,
            reader.end.reason,
            extra={"lsn": reader.end.lsn, "truncated_bytes": reader.end.left_bytes},
        )
        report.truncated_bytes = reader.end.left_bytes
        if not loaded.is_rebuilt:
            report.wal_end = reader.end.kind.value
    budgets = budgets_of(config)
    before = state.row_set.used_count
    if not loaded.complete and state.leases:
        log.warning(
            "the log lacks some of what workers were told: their leases end",
            extra={"lsn": reader.end.lsn, "leases": len(state.leases)},
        )
    arenas = _open_arenas(site, state, opened, keep_device=loaded.complete)
    disk = site.open_disk(state.pools)
    if disk is not None:
        opened.callback(disk.close)
    version, kept = state.version, state.budgets
    if disk is not None and check_disk is not None:
        drop_damaged(state, disk, budgets, check_disk)
    undo(state, budgets, arenas, report, site.machine)
    reopen(state, arenas)
    state.resize(budgets)
    state.reindex()
    if loaded.is_rebuilt:
        check_invariants(state)
    elif (version, kept) != (state.version, budgets):
        check_invariants(state, state.dirty_rows())
    report.blocks = state.row_set.used_count
    report.dropped_blocks = before - report.blocks
    site.progress("writing the checkpoint", 0, 0)
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
    opened.callback(writer.close)
    try:
        writer.forget(lsn)
    except OSError as error:
        log.warning("cannot remove old log segments: %s", error, extra={"lsn": lsn})
    deleted = DeletedFile(site.directory.path, site.machine.storage)
    return Recovered(state, loaded.specs, index, writer, arenas, disk, lsn, report, deleted)


def _open_arenas(
    site: Site, state: State, opened: contextlib.ExitStack, *, keep_device: bool
) -> dict[Tier, Arena]:
    """The RAM tiers' arenas, those of the last daemon where they may be trusted.

    Without ``keep_device`` the device arena is a new one: workers of the last daemon may still
    write into slots of theirs that the log knows nothing of.
    """
    arenas: dict[Tier, Arena] = {}
    budgets = budgets_of(site.config)
    for tier in RAM_TIERS:
        if not budgets[tier] or (tier is Tier.DEVICE and not keep_device):
            site.forget_arena(tier)
        if budgets[tier]:
            arenas[tier] = site.open_arena(tier, state.pools)
            opened.callback(arenas[tier].close)
    return arenas


def unverified_rows(state: State) -> I64:
    """Sealed device copies: they outlived a daemon and are checked before they are handed out."""
    rows = state.rows_in(Tier.DEVICE)
    return rows[state.blocks.is_sealed(rows)]
