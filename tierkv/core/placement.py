"""Where copies go: makes room, spills down, brings up. Policy and order, no bytes.

All waiting goes downward (device, then host, then disk): a flow that waits for room in a tier holds
copies of faster tiers only, so flows cannot wait for each other in a circle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tierkv.core.arrays import distinct, every, first_of_each, indices
from tierkv.core.counters import (
    CORRUPT,
    DELETED,
    GONE,
    OTHER_MODEL,
    PROMOTION,
    SPILL,
    STALE,
    TIERS,
    WRITE_BEHIND,
    Counters,
)
from tierkv.core.doubt import Doubt
from tierkv.core.effects import Check, Flow, Move, Moved, Signal, Wait
from tierkv.core.holds import Holds
from tierkv.core.ids import I64, RAM_TIERS, U64, Bool, Tier
from tierkv.core.policy import EvictionPolicy
from tierkv.core.records import Kind, Records, blank, of_copies
from tierkv.core.residency import Residency
from tierkv.core.restart_order import PART_ROWS, restart_order
from tierkv.core.slot_tables import SlotTables
from tierkv.core.slots import NONE
from tierkv.core.space import Memory
from tierkv.core.state import State
from tierkv.errors import PoolExhausted, TierFailed, TierFull

MOVE_BLOCKS = 1024
MOVE_BYTES = 64 << 20
"""A move is long enough to amortise a thread's wake-up and a sync, and short enough to pipeline."""

PREFETCH_MOVES = 4
"""So much of a chain comes up before somebody asks for it."""


def _ignore() -> None:
    """Nobody asked to be told."""


@dataclass(eq=False)
class _Copying:
    """A move under way. ``current`` [n]: the source still holds what the move began to read."""

    source: Tier
    rows: I64
    current: Bool


class Commit(Protocol):
    """Logs records, and applies them unless that was done."""

    def __call__(self, records: Records, *, applied: bool = False) -> None: ...


class Placement:
    """Copies of blocks in tiers. Owns the order of eviction and what is in flight."""

    def __init__(
        self,
        state: State,
        tables: SlotTables,
        policies: dict[Tier, EvictionPolicy],
        commit: Commit,
        counters: Counters,
    ) -> None:
        self.state = state
        self.tables = tables
        self.policies = policies
        self.commit = commit
        self.counters = counters
        self.disk_failed: Callable[[TierFull | TierFailed], None] = lambda _error: None
        self.disk_paused = False
        """Set by the daemon while the disk's circuit breaker is open; reads go on."""
        self.holds = {tier: Holds() for tier in Tier}
        self.doubt = Doubt(state.blocks)
        self.residency = Residency(state.blocks)
        self._making_room: dict[Tier, Signal | None] = dict.fromkeys(Tier)
        self._arriving: dict[int, Signal] = {}
        self._copying: list[_Copying] = []

    # --- room -------------------------------------------------------------------------------------

    def room(self, tier: Tier, pool: int, count: int, reason: str) -> Flow[I64]:
        """Hold ``count`` free slots, evicting exactly what is needed; shape [count].

        ``reason``: of those in ``counters.REASONS``, for what is evicted.

        The caller uses them in a record or gives them back by ``unhold_slots``. Raises
        PoolExhausted, with nothing held, if that much cannot be freed.
        """
        slots = self.state.slots[tier, pool]
        size = self.state.slot_bytes(tier, pool)
        if count > slots.capacity:
            raise self._exhausted(tier, pool, count)
        while (busy := self._making_room[tier]) is not None:
            yield Wait(busy)
        if count * size <= self.state.free_bytes(tier):
            return slots.hold(count)
        signal = self._making_room[tier] = Signal()
        stuck_bytes = sys.maxsize
        try:
            while (need := count * size - self.state.free_bytes(tier)) > 0:
                if self._evict_at_once(tier, -(-need // size), reason):
                    continue
                victims = yield from self._victims(tier, need, stuck_bytes)
                if not len(victims):
                    raise self._exhausted(tier, pool, count)
                # Where a block of this size found no room below, a larger one need not try.
                stuck_bytes = min(
                    stuck_bytes, (yield from self._demote(tier, pool, victims, reason))
                )
            return slots.hold(count)
        finally:
            self._making_room[tier] = None
            signal.set()

    def _evict_at_once(self, tier: Tier, count: int, reason: str) -> bool:
        """Make room for so many blocks if that is simple; returns whether it was. Mutates."""
        if self.holds[tier] or tier not in RAM_TIERS:
            return False
        below = [lower for lower in Tier if lower > tier and self.enabled(lower)]
        evicted = self.state.structures.shortcuts.evict(
            self.state, self.policies[tier], tier, count, below
        )
        if evicted is None:
            return False
        for to, blocks in enumerate(evicted.gone_to):
            self._count_evicted(tier, to, reason, blocks)
        self.commit(evicted.records, applied=True)
        self.residency.left(tier, evicted.records)
        return True

    def unhold_slots(self, tier: Tier, pool: int, slots: I64) -> None:
        """Give back slots that ``room`` held and no record used."""
        self.state.slots[tier, pool].unhold(slots)

    def enabled(self, tier: Tier) -> bool:
        """Whether the tier takes copies now: it has a budget and is not out of service."""
        return self.state.budgets[tier] > 0 and not (tier is Tier.DISK and self.disk_paused)

    def evictable(self, tier: Tier) -> int:
        """Blocks that could leave the tier now: all but some that sequences or moves hold.

        Looks at every block that is held: not for the hot path.
        """
        tables = [sequence.rows for sequence in self.state.sequences.values()]
        rows = distinct(np.concatenate([self.holds[tier].rows(), *tables]))
        rows = rows[self.state.blocks.has_copy(rows, tier)]
        leaving = self._eligible(tier, rows)
        if not any(self.enabled(lower) for lower in Tier if lower > tier):
            leaving &= self._loose(tier, rows)
        return self.state.copies(tier) - int(np.count_nonzero(~leaving))

    def _exhausted(self, tier: Tier, pool: int, count: int) -> PoolExhausted:
        size = self.state.slot_bytes(tier, pool)
        free = max(0, self.state.free_bytes(tier)) // size
        # No worker hears of the lower tiers, and counting takes its time.
        evictable = self.evictable(tier) if tier is Tier.DEVICE else 0
        return PoolExhausted(
            f"the {tier.label} tier cannot take {count} more blocks of {size} bytes: {free} free, "
            f"{evictable} evictable; end or suspend sequences, or raise {tier.label}.bytes",
            tier=tier.label,
            asked=count,
            free=free,
            evictable=evictable,
        )

    def _eligible(self, tier: Tier, rows: I64) -> Bool:
        """Which rows may lose their copy in the tier, once another copy is safe."""
        may = self.state.blocks.may_leave(rows, tier)
        if self.holds[tier]:
            may &= ~self.holds[tier].has(rows)
        return may & self._loose(tier, rows) if tier is Tier.DISK else may

    def _victims(self, tier: Tier, need: int, stuck_bytes: int) -> Flow[I64]:
        """Rows that may leave the tier, worth ``need`` bytes at least; none if there are too few.

        Blocks of ``stuck_bytes`` and more cannot be copied down now, so they may leave only if
        nothing is lost with them.
        """
        blocks = self.state.blocks

        def may_leave(rows: I64) -> Bool:
            leaving = self._eligible(tier, rows)
            if stuck_bytes == sys.maxsize:
                return leaving
            stuck = (self.state.slot_bytes_of(tier, rows) >= stuck_bytes) & ~self._loose(tier, rows)
            return np.asarray(leaving & ~stuck)

        def stays(rows: I64) -> Bool:
            # A block that is mapped is touched when it is let go; any other keeps its place.
            mapped = (tier is Tier.DEVICE) & (blocks.active[rows] > 0)
            return np.asarray(blocks.has_copy(rows, tier) & ~mapped)

        while True:
            victims = self.policies[tier].victims(
                need, may_leave, stays, lambda rows: self.state.slot_bytes_of(tier, rows)
            )
            if len(victims) and self.state.slot_bytes_of(tier, victims).sum() >= need:
                return victims
            if not self._may_become_idle(tier):
                return np.zeros(0, np.int64)
            # Copies in flight keep blocks from leaving; they come to an end by themselves.
            yield Wait(self.holds[tier].released())

    def _may_become_idle(self, tier: Tier) -> bool:
        """Whether a move in flight is all that keeps some block in the tier."""
        rows = self.holds[tier].rows()
        rows = rows[self.state.blocks.has_copy(rows, tier)]
        return bool(len(rows)) and (
            tier is not Tier.DEVICE or bool((self.state.blocks.active[rows] == 0).any())
        )

    def _demote(self, tier: Tier, pool: int, rows: I64, reason: str) -> Flow[int]:
        """Rows leave the tier, each after another copy is safe (or if nobody holds it).

        Returns the size of the smallest one that had to stay for want of room below.
        """
        blocks = self.state.blocks
        ids = blocks.id[rows]
        for target in Tier:
            if target <= tier or not self.enabled(target):
                continue
            if target is Tier.HOST:
                moving = ~blocks.has_copy(rows, Tier.HOST)
            else:
                moving = ~self._backed(tier, rows)
            yield from self.copy(tier, target, rows[moving], ids[moving])
        rows = rows[(blocks.id[rows] == ids) & self._eligible(tier, rows)]
        loose = self._loose(tier, rows)
        if every(loose):
            self._drop(tier, rows, reason, pool)
            return sys.maxsize
        self._drop(tier, rows[loose], reason, pool)
        return int(self.state.slot_bytes_of(tier, rows[~loose]).min())

    def _loose(self, tier: Tier, rows: I64) -> Bool:
        """Which rows lose nothing that anybody holds when they leave the tier."""
        return np.asarray(self._backed(tier, rows) | (self.state.blocks.refs[rows] == 0))

    def _backed(self, tier: Tier, rows: I64) -> Bool:
        """Which rows have another copy further down, or one that a worker maps.

        Any other copy further up is no reason to leave: it is what lets that copy leave.
        """
        blocks = self.state.blocks
        found = blocks.has_copy_below(rows, tier)
        if tier is not Tier.DEVICE:
            found |= blocks.has_copy(rows, Tier.DEVICE) & (blocks.active[rows] > 0)
        return found

    def _drop(self, tier: Tier, rows: I64, reason: str, for_pool: int | None = None) -> None:
        """Log that copies are gone and free their slots. Mutates.

        ``for_pool``: of the blocks that need the room, if that is why.
        """
        if not len(rows):
            return
        blocks = self.state.blocks
        slots = blocks.slot[tier][rows].astype(np.int64)
        others = len(self.state.pools) > 1 and for_pool is not None
        pools = self.state.pool_of(rows) if others else NONE
        best_left = blocks.best_tier_but(rows, tier)
        foreign = pools != for_pool if others else np.zeros(len(rows), np.bool_)
        for left, why in ((best_left[~foreign], reason), (best_left[foreign], OTHER_MODEL)):
            for to, count in enumerate(np.bincount(left).tolist()):
                self._count_evicted(tier, to, why, count)
        records = of_copies(Kind.DROP, tier, rows, blocks.id[rows], slots)
        self.forget(tier, rows)
        self.commit(records)
        if for_pool is not None:
            self.residency.left(tier, records)
        if tier in RAM_TIERS:
            for pool in distinct(pools[pools != for_pool]).tolist():
                self.tables.punch(tier, pool, slots[pools == pool])

    def _count_evicted(self, tier: Tier, best_left: int, reason: str, blocks: int) -> None:
        """``best_left``: the fastest tier that they are left in, len(Tier) if there is none."""
        if blocks:
            name = TIERS[best_left] if best_left < len(Tier) else GONE
            self.counters.evicted(TIERS[tier], name, reason, blocks)

    def delete(self, rows: I64) -> None:
        """Nobody finds these sealed blocks from now on; those that no sequence holds go. Mutates.

        None may be held (see ``holds``): whoever uses such a copy counts on it.
        """
        if not len(rows):
            return
        blocks = self.state.blocks
        for pool, members in self.state.by_pool(rows[blocks.has_copy(rows, Tier.DEVICE)]):
            slots = blocks.slot[Tier.DEVICE][members].astype(np.int64)
            self.tables.leave(Tier.DEVICE, pool, slots)
        going = rows[blocks.refs[rows] == 0]
        for tier in Tier:
            copies = going[blocks.has_copy(going, tier)]
            self._count_evicted(tier, len(Tier), DELETED, len(copies))
            self.forget(tier, copies)
        records = blank(len(rows), Kind.DELETE)
        records["key"], records["id"] = rows, blocks.id[rows]
        self.commit(records)

    def leave_left(self, pool: int) -> None:
        """Workers find nothing any more in the pool's device slots that blocks have left. Mutates.

        They may till others come, who asks nobody: for blocks that were evicted that is as good.
        """
        self.tables.leave(Tier.DEVICE, pool, self.state.slots[Tier.DEVICE, pool].left())

    def forget(self, tier: Tier, rows: I64) -> None:
        """Copies of these rows are about to be logged as gone. Mutates."""
        self.policies[tier].forget(rows)
        self._outdate(tier, rows)

    def _outdate(self, tier: Tier, rows: I64) -> None:
        """What moves under way read of these rows in the tier is not their payload any more."""
        if not self._copying or not self.holds[tier].has(rows).any():
            return
        for copying in self._copying:
            if copying.source is tier:
                copying.current &= ~np.isin(copying.rows, rows)

    # --- copies -----------------------------------------------------------------------------------

    def move_blocks(self, pool: int, move_bytes: int = MOVE_BYTES) -> int:
        """Most blocks of the pool in one move."""
        return max(1, min(MOVE_BLOCKS, move_bytes // self.state.pools[pool].block_bytes))

    def copy(
        self, source: Tier, target: Tier, rows: I64, ids: U64, reason: str = SPILL
    ) -> Flow[int]:
        """Give blocks another copy further down, as far as there is room; returns how many.

        ``reason``: for what others have to make that room; see ``counters.REASONS``.
        ``ids`` name the blocks that ``rows`` held when the caller decided; no row is there twice.
        Rows that hold another block by now are passed over.
        """
        done = 0
        for pool, members in self.state.by_pool(rows):
            names = ids[np.isin(rows, members)] if len(members) != len(rows) else ids
            at, batch_max = 0, self.move_blocks(pool)
            while at < len(members):
                part = slice(at, at + batch_max)
                try:
                    done += yield from self._copy_batch(
                        source, target, pool, members[part], names[part], reason
                    )
                    at += batch_max
                except PoolExhausted:
                    batch_max = len(members[part]) // 2
                    if not batch_max:
                        break
        return done

    def _copy_batch(
        self, source: Tier, target: Tier, pool: int, rows: I64, ids: U64, reason: str
    ) -> Flow[int]:
        held = rows
        self.holds[source].take(held)
        slots = np.zeros(0, np.int64)
        try:
            slots = yield from self.room(target, pool, len(rows), reason)
            alive = self._still(rows, ids, source) & ~self.state.blocks.has_copy(rows, target)
            alive &= ~self._being_written(source, rows)
            rows, ids = rows[alive], ids[alive]
            return (yield from self._move(pool, ids, source, rows, target, slots[: len(rows)]))
        except (TierFull, TierFailed) as error:
            self.disk_failed(error)
            return 0
        finally:
            self.unhold_slots(target, pool, slots)
            self.holds[source].release(held)

    def _being_written(self, tier: Tier, rows: I64) -> Bool:
        """Which rows are open blocks of an active sequence: their worker may write any time."""
        blocks = self.state.blocks
        open_ = ~blocks.is_sealed(rows)
        return np.asarray(open_ & (blocks.active[rows] > 0) & (tier is Tier.DEVICE))

    def _move(
        self, pool: int, ids: U64, source: Tier, rows: I64, target: Tier, slots: I64
    ) -> Flow[int]:
        """Carry payloads over and log the copies that arrived; returns how many."""
        if not len(rows):
            return 0
        source_slots = self.state.blocks.slot[source][rows].astype(np.int64)
        copying = _Copying(source, rows, np.ones(len(rows), np.bool_))
        self._copying.append(copying)
        try:
            with self.holds[source].taken(rows):
                result: Moved = yield Move(pool, ids, source, source_slots, target, slots)
        finally:
            self._copying.remove(copying)
        return self._arrived(copying, target, ids, slots, result)

    def _still(self, rows: I64, ids: U64, tier: Tier) -> Bool:
        """Which rows still hold these blocks with a copy in the tier."""
        blocks = self.state.blocks
        return np.asarray((blocks.id[rows] == ids) & blocks.has_copy(rows, tier))

    def _arrived(self, copying: _Copying, target: Tier, ids: U64, slots: I64, result: Moved) -> int:
        """Log the copies that arrived; forget source copies that turned out damaged."""
        source, rows = copying.source, copying.rows
        alive = copying.current & self._still(rows, ids, source)
        sound = result.ok & self._sums_agree(source, rows, result)
        good = alive & sound & ~self.state.blocks.has_copy(rows, target)
        if good.any():
            records = of_copies(Kind.PLACE, target, rows[good], ids[good], slots[good])
            records["extra_hi"] = result.sum_hi[good]
            records["extra_lo"] = result.sum_lo[good]
            self.commit(records)
            self.policies[target].touch(rows[good])
            if target is Tier.DEVICE:
                self.doubt.clear(rows[good])
                self._enter(rows[good])
                self.counters.promotions[source.label] += int(np.count_nonzero(good))
            shape = self.state.pools[int(self.state.pool_of(rows[:1])[0])]
            moved_bytes = int(np.count_nonzero(good)) * shape.block_bytes
            self.counters.transferred(source.label, target.label, moved_bytes)
        bad = rows[alive & ~sound]
        if len(bad):
            self.counters.checksum_failures[source.label] += len(bad)
            # A worker may have the bytes mapped: its copy cannot be taken away under it.
            unmapped = bad[self.state.blocks.active[bad] == 0] if source is Tier.DEVICE else bad
            self._drop(source, unmapped, CORRUPT)
        return int(np.count_nonzero(good))

    def _sums_agree(self, source: Tier, rows: I64, result: Moved) -> Bool:
        """Whether the bytes are those the log knows: a slot may hold an older copy of a block."""
        blocks = self.state.blocks
        same = (result.sum_hi == blocks.sum_hi[rows]) & (result.sum_lo == blocks.sum_lo[rows])
        if source is Tier.DEVICE:
            # A block that was still open in the device tier has been written on since.
            same |= ~blocks.is_sealed(rows)
        return np.asarray(same)

    def usable_as_is(self, rows: I64) -> bool:
        """Whether every row has a device copy that nobody doubts."""
        up = every(self.state.blocks.has_copy(rows, Tier.DEVICE))
        return up and self.doubt.leading_sound(rows) == len(rows)

    def bring_up(
        self, rows: I64, move_bytes: int = MOVE_BYTES, on_arrival: Callable[[], None] = _ignore
    ) -> Flow[int]:
        """Give every row a device copy; returns how many leading rows have a usable one.

        They come in moves of at most ``move_bytes``; ``on_arrival`` is called after each. The rows
        must be active, so that what is up stays up; where one is not any more, whoever
        asked has gone, and it ends. Raises PoolExhausted if the device tier has no room for the
        next block, TierFailed if the disk refused to read it.
        """
        if not len(rows):
            return 0
        blocks = self.state.blocks
        ids = blocks.id[rows].copy()
        batch_max = self.move_blocks(int(self.state.pool_of(rows[:1])[0]), move_bytes)
        while True:
            kept = (blocks.id[rows] == ids) & blocks.has_any_copy(rows) & (blocks.active[rows] > 0)
            lost = indices(~kept)
            if len(lost):
                rows, ids = rows[: lost[0]], ids[: lost[0]]
            missing = indices(~blocks.has_copy(rows, Tier.DEVICE))
            if not len(missing):
                return self.doubt.leading_sound(rows)
            first = int(rows[missing[0]])
            if first in self._arriving:
                yield Wait(self._arriving[first])
                continue
            batch = self._batch(rows[missing[:batch_max]])
            try:
                yield from self._promote(batch)
                on_arrival()
            except (PoolExhausted, TierFailed):
                # It may concern one block of the batch: those before it still come up.
                if len(batch) == 1:
                    raise
                batch_max = len(batch) // 2

    def prefetch(self, rows: I64) -> Flow[int]:
        """Give rows a device copy before a sequence holds them; returns how many came up.

        One attempt, in order: ends where there is no room, or the disk refuses. What came up may
        leave again any time, as the most recently used.
        """
        blocks = self.state.blocks
        rows = rows[~blocks.has_copy(rows, Tier.DEVICE)]
        came = 0
        if not len(rows):
            return came
        size = self.move_blocks(int(self.state.pool_of(rows[:1])[0]))
        rows = rows[: PREFETCH_MOVES * size]
        ids = blocks.id[rows].copy()
        while len(rows):
            wanted = (blocks.id[rows] == ids) & blocks.has_any_copy(rows)
            wanted &= ~blocks.has_copy(rows, Tier.DEVICE)
            rows, ids = rows[wanted], ids[wanted]
            if not len(rows):
                break
            if int(rows[0]) in self._arriving:  # somebody else brings these up
                rows, ids = rows[size:], ids[size:]
                continue
            batch = self._batch(rows[:size])
            try:
                yield from self._promote(batch)
            except (PoolExhausted, TierFailed):
                break
            came += int(np.count_nonzero(self._still(batch, ids[: len(batch)], Tier.DEVICE)))
            rows, ids = rows[len(batch) :], ids[len(batch) :]
        return came

    def lift(self, source: Tier, target: Tier, rows: I64, ids: U64) -> Flow[int]:
        """Give blocks another copy further up, as far as there is room without evicting any.

        ``ids`` name the blocks that ``rows`` held when the caller decided. Returns how many came.
        Raises TierFailed.
        """
        done = 0
        for pool, members in list(self.state.by_pool(rows)):
            names = ids[np.isin(rows, members)] if len(members) != len(rows) else ids
            size, step = self.state.slot_bytes(target, pool), self.move_blocks(pool)
            for at in range(0, len(members), step):
                part = slice(at, at + step)
                wanted = self._still(members[part], names[part], source)
                wanted &= ~self.state.blocks.has_copy(members[part], target)
                free = max(self.state.free_bytes(target), 0) // size
                moving, their = members[part][wanted][:free], names[part][wanted][:free]
                if self._making_room[target] is not None or not free:
                    break
                slots = self.state.slots[target, pool].hold(len(moving))
                try:
                    done += yield from self._move(pool, their, source, moving, target, slots)
                finally:
                    self.unhold_slots(target, pool, slots)
        return done

    def _batch(self, rows: I64) -> I64:
        """The leading rows that come from the same tier and are not on their way already."""
        source = self.state.blocks.best_tier(rows)
        take = np.array([int(row) not in self._arriving for row in rows]) & (source == source[0])
        stop = np.flatnonzero(~take)
        return rows[: stop[0]] if len(stop) else rows

    def _promote(self, rows: I64) -> Flow[None]:
        blocks = self.state.blocks
        ids = blocks.id[rows].copy()
        source = Tier(int(blocks.best_tier(rows[:1])[0]))
        pool = int(self.state.pool_of(rows[:1])[0])
        signal = Signal()
        slots = np.zeros(0, np.int64)
        for row in rows.tolist():
            self._arriving[row] = signal
        try:
            slots = yield from self.room(Tier.DEVICE, pool, len(rows), PROMOTION)
            alive = self._still(rows, ids, source) & ~blocks.has_copy(rows, Tier.DEVICE)
            moving, names = rows[alive], ids[alive]
            used = slots[: len(moving)]
            yield from self._move(pool, names, source, moving, Tier.DEVICE, used)
        finally:
            self.unhold_slots(Tier.DEVICE, pool, slots)
            for row in rows.tolist():
                del self._arriving[row]
            signal.set()

    # --- verification after a restart -------------------------------------------------------------

    def verify(self, rows: I64) -> Flow[bool]:
        """Check device copies from before the last restart; returns whether there were any.

        Ask before a sequence takes the rows up: a damaged copy that no worker can have mapped
        goes at once, one that is mapped stays and stays doubtful.
        """
        blocks = self.state.blocks
        waited = False
        for pool, members in self.state.by_pool(self.doubt.among(rows)):
            batch_max = self.move_blocks(pool)
            for at in range(0, len(members), batch_max):
                part = members[at : at + batch_max]
                ids = blocks.id[part].copy()
                slots = blocks.slot[Tier.DEVICE][part].astype(np.int64)
                ok: Bool = yield Check(pool, ids, Tier.DEVICE, slots)
                waited = True
                # Doubt ends for a row that another flow has checked, or that came up anew.
                alive = self._still(part, ids, Tier.DEVICE) & np.isin(part, self.doubt.among(part))
                self.doubt.clear(part[alive & ok])
                bad = part[alive & ~ok]
                if len(bad):
                    self.counters.checksum_failures[Tier.DEVICE.label] += len(bad)
                    self._drop(Tier.DEVICE, bad[blocks.active[bad] == 0], CORRUPT)
        return waited

    # --- recency ----------------------------------------------------------------------------------

    def touch(self, rows: I64, *, found: bool = False) -> None:
        """Rows were used, least valuable first; in every tier that holds them. Mutates.

        ``found``: by a request that came upon them.
        """
        if len(rows):
            self.residency.touched(self._move_to_front(rows), found=found)

    def _move_to_front(self, rows: I64) -> I64:
        """The least valuable first. Returns those that are in the device tier."""
        in_device = NONE
        for tier in Tier:
            if self.state.budgets[tier]:
                here = rows[self.state.blocks.has_copy(rows, tier)]
                self.policies[tier].touch(here)
                in_device = here if tier is Tier.DEVICE else in_device
        return in_device

    def ahead(self) -> list[Memory]:
        """The memory that the next blocks take: it should be there before they come. Mutates."""
        orders = [one for policy in self.policies.values() for one in policy.ahead()]
        return [*self.state.ahead(), *orders]

    def list_all(self) -> None:
        """Enter every copy into its tier's order and the directory, after recovery. Mutates."""
        rows = self.state.live_rows()
        order = restart_order(self.state.blocks, rows)
        for at in range(0, len(order), PART_ROWS):
            part = rows[order[at : at + PART_ROWS]]
            self._move_to_front(part)
            self._enter(part[self.state.blocks.has_copy(part, Tier.DEVICE)])

    def _enter(self, rows: I64) -> None:
        """Let workers find those of these blocks that have names in the device tier. Mutates."""
        blocks = self.state.blocks
        for pool, members in self.state.by_pool(rows[blocks.is_sealed(rows)]):
            named = blocks.is_indexed(members)
            slots = blocks.slot[Tier.DEVICE][members].astype(np.int64)
            self.tables.enter(Tier.DEVICE, pool, slots[named], blocks.hash_lo[members[named]])
            if not every(named):
                self.tables.leave(Tier.DEVICE, pool, slots[~named])

    def clean_down(self, rows: I64, ids: U64) -> Flow[int]:
        """Write sealed blocks to disk that are not there yet (write-behind).

        A row may be named more than once: a block that is sealed, spills and comes up as the twin
        of another one is a candidate each time.
        """
        blocks = self.state.blocks
        if not self.enabled(Tier.DISK):
            return 0
        once = first_of_each(rows)
        rows, ids = rows[once], ids[once]
        wanted = (
            (blocks.id[rows] == ids) & blocks.is_sealed(rows) & ~blocks.has_copy(rows, Tier.DISK)
        )
        done = 0
        for source in (Tier.DEVICE, Tier.HOST):
            here = wanted & blocks.has_copy(rows, source)
            done += yield from self.copy(source, Tier.DISK, rows[here], ids[here], WRITE_BEHIND)
            wanted &= ~here
        return done

    @contextmanager
    def kept(self, rows: I64) -> Iterator[None]:
        """The rows' copies in RAM stay where they are meanwhile. No row is there twice. Mutates."""
        with self.holds[Tier.DEVICE].taken(rows), self.holds[Tier.HOST].taken(rows):
            yield

    def reopen(self, rows: I64) -> None:
        """A worker may write into these open blocks again: copies are stale. Mutates."""
        self._outdate(Tier.DEVICE, rows)
        for tier in (Tier.HOST, Tier.DISK):
            self._drop(tier, rows[self.state.blocks.has_copy(rows, tier)], STALE)

    def arriving(self, row: int) -> Signal | None:
        """Set when the row's way up into the device tier, if it is on it, has ended."""
        return self._arriving.get(row)
