"""What must not survive a daemon: leases of dead workers, and copies that nobody may trust.

By records that are applied and not logged: the checkpoint that ends the recovery holds the result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierkv.core.ids import I64, Bool, Tier
from tierkv.core.pins import is_pins
from tierkv.core.records import Kind, blank, of_copies
from tierkv.core.restart_order import restart_order
from tierkv.core.state import Sequence, State
from tierkv.service.machine import Machine
from tierkv.service.recovered import RecoveryReport
from tierkv.tiers.arena import Arena
from tierkv.tiers.copy import check_entries
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.tables import ArenaTables

CheckCopies = Callable[[State, DiskTier, int, I64], Bool]
"""``check(state, disk, pool, rows)``: which of the rows' copies on disk are sound, shape [n]."""


def drop_damaged(
    state: State, disk: DiskTier, budgets: dict[Tier, int], check_disk: CheckCopies
) -> None:
    """Drop copies on disk that are not sound. Their slots are free again: a rewrite heals them."""
    for pool, members in list(state.by_pool(state.rows_in(Tier.DISK))):
        slots = state.blocks.slot[Tier.DISK][members].astype(np.int64)
        there = members[slots < budgets[Tier.DISK] // state.slot_bytes(Tier.DISK, pool)]
        _drop_copies(state, Tier.DISK, there[~check_disk(state, disk, pool, there)])


def undo(
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
        if is_pins(lease):
            continue
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


def reopen(state: State, arenas: dict[Tier, Arena]) -> None:
    """Name unsealed blocks in their entries, without checksum: their workers write on in them."""
    rows = np.flatnonzero(state.blocks.active)
    rows = rows[~state.blocks.is_sealed(rows) & state.blocks.has_copy(rows, Tier.DEVICE)]
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
    before = state.copies(tier)
    for pool, members in list(state.by_pool(state.rows_in(tier))):
        sound = state.blocks.slot[tier][members] < budgets[tier] // state.slot_bytes(tier, pool)
        if tier is not Tier.DISK:
            sound &= _entries_agree(state, tier, arenas.get(tier), pool, members, sound)
        _drop_copies(state, tier, members[~sound])
    _drop_copies(state, tier, _over_budget(state, tier, budgets[tier]))
    report.tiers[tier].kept = state.copies(tier)
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
