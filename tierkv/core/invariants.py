"""What must hold of the state at any moment, numbered. Checked after every step in property tests,
after every recovery, by ``tierkv verify``, and by a paranoid daemon.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tierkv.core.arrays import distinct
from tierkv.core.blocks import INDEXED
from tierkv.core.ids import I64, NO_SLOT, Tier, lease_of
from tierkv.core.state import State
from tierkv.errors import InvariantViolation

PART_ROWS = 1 << 16

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


def check_invariants(state: State, changed: I64 | None = None) -> None:
    """Raise InvariantViolation naming every invariant that does not hold.

    ``changed``: rows of the blocks that changed since they all were checked, if they were.
    """
    broken = [*_check_slots(state), *_check_blocks(state, changed), *_check_sequences(state)]
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


def _check_blocks(state: State, changed: I64 | None) -> list[tuple[int, str]]:
    broken = []
    blocks = state.blocks
    rows = np.arange(len(blocks)) if changed is None else distinct(changed)
    # Some at a time, so that all that is looked at stays in the processor's caches.
    for at in range(0, len(rows), PART_ROWS):
        broken += _check_rows(state, rows[at : at + PART_ROWS])
    if changed is None:
        # They come in ascending stretches, of which a stable sort makes use.
        ids = blocks.id[blocks.id != 0]
        ids.sort(kind="stable")
        if (ids[1:] == ids[:-1]).any():
            broken.append((7, "ids repeat"))
        indexed = int(np.count_nonzero(blocks.flags & INDEXED))
        if indexed != len(state.index):
            broken.append((4, f"{indexed} indexed blocks, {len(state.index)} in the index"))
    return broken


def _check_rows(state: State, rows: I64) -> list[tuple[int, str]]:
    """What is wrong with these rows of the block table alone."""
    broken = []
    blocks = state.blocks
    among = f"among rows {rows[0]} to {rows[-1]}"
    ids = blocks.id[rows]
    if not np.array_equal(ids != 0, state.row_set.is_used(rows)):
        broken.append((7, f"a used row without an id, or a free row with one, {among}"))
    if int(ids.max()) >= state.next_block:
        broken.append((7, f"an id runs ahead, {among}"))
    rows = rows[ids != 0]
    is_indexed = blocks.is_indexed(rows)
    indexed = rows[is_indexed]
    found = state.index.get(
        blocks.hash_hi[indexed], blocks.hash_lo[indexed], blocks.hash_hi, blocks.hash_lo
    )
    if not np.array_equal(found, indexed):
        broken.append((4, f"a block that the index does not find, {among}"))
    if not blocks.is_sealed(indexed).all():
        broken.append((12, f"an unsealed block is indexed, {among}"))
    if not blocks.has_any_copy(indexed).all():
        broken.append((5, f"an indexed block without a copy, {among}"))
    if (blocks.refs[rows[~is_indexed]] == 0).any():
        broken.append((6, f"an unreferenced block that nobody can find, {among}"))
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
