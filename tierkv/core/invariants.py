"""What must hold of the state at any moment, numbered. Checked after every step in property tests,
after every recovery, by ``tierkv verify``, and by a paranoid daemon.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tierkv.core.arrays import distinct
from tierkv.core.blocks import INDEXED, SEALED
from tierkv.core.ids import NO_SLOT, Tier, lease_of
from tierkv.core.state import State
from tierkv.errors import InvariantViolation

INVARIANTS = {
    1: "every used slot of a tier belongs to exactly one block, and every copy's slot is used",
    2: "a tier's used bytes never exceed its budget",
    3: "a block's reference count is the number of sequences that hold it, and its active count "
    "the number of those that are not suspended",
    4: "the hash index finds exactly the indexed blocks, each under its own hash",
    5: "an indexed block is sealed and has a copy",
    6: "a block without references is indexed",
    7: "block ids are unique, and below the next id to be given",
    8: "in a sequence the sealed blocks come first, each the child of the one before",
    9: "a sequence's blocks live in the pool of its namespace",
    10: "every sequence belongs to an open lease",
    11: "a sequence holds a block at most once",
    12: "an unsealed block belongs to no index and has no hash twin",
    13: "a sequence holds blocks, never a free row",
    14: "a fenced sequence is not suspended, and holds unsealed blocks only",
}


def check_invariants(state: State) -> None:
    """Raise InvariantViolation naming every invariant that does not hold."""
    broken = [*_check_slots(state), *_check_blocks(state), *_check_sequences(state)]
    if broken:
        lines = [f"I{number}: {INVARIANTS[number]} ({what})" for number, what in broken]
        raise InvariantViolation("; ".join(lines))


def _check_slots(state: State) -> list[tuple[int, str]]:
    broken = []
    blocks = state.blocks
    for tier in Tier:
        held = set()
        for pool, members in state.by_pool(state.rows_in(tier)):
            held.add(pool)
            slots, used = blocks.slot[tier][members], state.slots[tier, pool]
            if not used.are_used(slots):
                what = f"{len(slots)} copies, {used.used_count} used"
                broken.append((1, f"{tier.label} pool {pool}: {what}"))
        broken += [
            (1, f"{tier.label} pool {pool}: slots used by nobody")
            for (of, pool), slots in state.slots.items()
            if of is tier and pool not in held and slots.used_count
        ]
        used_bytes = sum(
            slots.used_count * state.slot_bytes(tier, pool)
            for (of, pool), slots in state.slots.items()
            if of is tier
        )
        if used_bytes > state.budgets[tier]:
            broken.append((2, f"{tier.label}: {used_bytes} of {state.budgets[tier]} bytes"))
    return broken


def _check_blocks(state: State) -> list[tuple[int, str]]:
    # Whole columns: to pick the rows in use takes longer than to look at all.
    broken = []
    blocks = state.blocks
    live = blocks.id != 0
    if not np.array_equal(np.flatnonzero(live), state.live_rows()):
        broken.append((7, "a used row without an id, or a free row with one"))
    # They come in ascending stretches, of which a stable sort makes use.
    ids = np.sort(blocks.id[live], kind="stable")
    if (ids[1:] == ids[:-1]).any() or int(ids[-1:].max(initial=0)) >= state.next_block:
        broken.append((7, "ids repeat or run ahead"))
    is_indexed = live & ((blocks.flags & INDEXED) != 0)
    indexed = np.flatnonzero(is_indexed)
    found = state.index.get(
        blocks.hash_hi[indexed], blocks.hash_lo[indexed], blocks.hash_hi, blocks.hash_lo
    )
    if not np.array_equal(found, indexed) or len(state.index) != len(indexed):
        broken.append((4, f"{len(indexed)} indexed blocks, {len(state.index)} in the index"))
    if (is_indexed & ((blocks.flags & SEALED) == 0)).any():
        broken.append((12, "an unsealed block is indexed"))
    if not blocks.has_any_copy(indexed).all():
        broken.append((5, "an indexed block without a copy"))
    if (live & (blocks.refs == 0) & ~is_indexed).any():
        broken.append((6, "an unreferenced block that nobody can find"))
    return broken


def _check_sequences(state: State) -> list[tuple[int, str]]:
    broken = []
    blocks = state.blocks
    refs: Counter[int] = Counter()
    active: Counter[int] = Counter()
    for identity, sequence in state.sequences.items():
        rows = sequence.rows
        if lease_of(identity) not in state.leases:
            broken.append((10, f"sequence {identity:#x}"))
        if len(distinct(rows)) != len(rows):
            broken.append((11, f"sequence {identity:#x}"))
        if (blocks.id[rows] == 0).any():
            broken.append((13, f"sequence {identity:#x}"))
        refs.update(rows.tolist())
        if not sequence.suspended:
            active.update(rows.tolist())
        sealed = blocks.is_sealed(rows)
        count = int(np.argmin(sealed)) if not sealed.all() else len(rows)
        parents = np.concatenate([[np.uint64(0)], blocks.id[rows[:-1]]])[: len(rows)]
        if sealed[count:].any() or (blocks.parent[rows[:count]] != parents[:count]).any():
            broken.append((8, f"sequence {identity:#x}"))
        if sequence.fenced and (sequence.suspended or count):
            broken.append((14, f"sequence {identity:#x}"))
        pool = state.namespaces[sequence.namespace].pool
        if len(rows) and (state.pool_of(rows) != pool).any():
            broken.append((9, f"sequence {identity:#x}"))
    for name, counts, column in (("refs", refs, blocks.refs), ("active", active, blocks.active)):
        expected = np.zeros(len(blocks), np.int64)
        if counts:
            expected[list(counts)] = list(counts.values())
        if not np.array_equal(expected, column):
            broken.append((3, f"{name} of rows {np.flatnonzero(expected != column)[:5].tolist()}"))
    return broken


def active_without_device_copy(state: State) -> int:
    """Blocks a worker may map that have no device copy: allowed only while they come up."""
    rows = state.live_rows()
    rows = rows[state.blocks.active[rows] > 0]
    return int(np.count_nonzero(state.blocks.slot[Tier.DEVICE][rows] == NO_SLOT))
