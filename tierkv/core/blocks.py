"""The block table: one numpy column per field, a row per block, no Python object per block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierkv.core.arrays import distinct, every
from tierkv.core.ids import I32, I64, NO_SLOT, U8, U16, U32, U64, Bool, Tier
from tierkv.core.records import Records
from tierkv.core.space import STEP, Memory, ahead, column, stretched, widest
from tierkv.errors import require

SEALED = 1
"""Flag: the block is full and immutable; its hash, parent and checksum are set."""

INDEXED = 2
"""Flag: the hash table points to this row. A sealed block may lose this to a newer twin."""

VALUE = np.dtype(
    [
        ("id", "<u8"),
        ("parent", "<u8"),
        ("hash_hi", "<u8"),
        ("hash_lo", "<u8"),
        ("sum_hi", "<u8"),
        ("sum_lo", "<u8"),
        ("namespace", "<u2"),
        ("flags", "<u2"),
        ("slot_device", "<u4"),
        ("slot_host", "<u4"),
        ("slot_disk", "<u4"),
    ]
)
"""The persistent part of one row, 64 bytes: what a checkpoint stores."""

PLACED_TWICE = "a block was placed twice"

_FLAGS = np.arange(4)
_SEALED = (_FLAGS & SEALED) != 0
_INDEXED = (_FLAGS & INDEXED) != 0
_PRESENT = [np.uint8(1 << tier) for tier in Tier]
"""Per tier: the bit of ``Blocks.where`` that says the block has a copy there."""
_WHERE = np.arange(1 << len(Tier), dtype=np.uint8)
_HAS = [(_WHERE & bit) != 0 for bit in _PRESENT]
_HAS_BELOW = [_WHERE >> (tier + 1) != 0 for tier in Tier]
_BEST = np.array([min((t for t in Tier if w >> t & 1), default=len(Tier)) for w in _WHERE.tolist()])
_BEST_BUT = [_BEST[_WHERE & ~bit] for bit in _PRESENT]
# Looked up, not computed: on few rows an arithmetic call of numpy costs twice as much.

_PART_ROWS = 4096

SLOT_FIELDS = ("slot_device", "slot_host", "slot_disk")


_ZEROED = {
    "id": np.uint64,
    "parent": np.uint64,
    "hash_hi": np.uint64,
    "hash_lo": np.uint64,
    "sum_hi": np.uint64,
    "sum_lo": np.uint64,
    "namespace": np.uint16,
    "flags": np.uint16,
    "refs": np.int32,
    "active": np.int32,
    "_where": np.uint8,
}
"""The columns that are 0 in a free row."""


class Blocks:
    """Columns of the block table; index = row. ``id`` 0 marks a free row.

    ``slot[tier]`` is NO_SLOT where the block has no copy in that tier. ``refs`` counts sequences
    that hold the block, ``active`` those of them that are not suspended, i.e. may map it now.

    Columns get longer where they are, up to ``room`` rows: nobody may keep one over ``ensure``.
    """

    id: U64
    parent: U64
    hash_hi: U64
    hash_lo: U64
    sum_hi: U64
    sum_lo: U64
    namespace: U16
    flags: U16
    refs: I32
    active: I32
    slot: list[U32]
    _where: U8
    """A bit per tier: whether ``slot`` names one there."""

    def __init__(self, room: int = STEP) -> None:
        for name, dtype in _ZEROED.items():
            setattr(self, name, column(room, dtype))
        self.slot = [column(room, np.uint32) for _ in Tier]
        self.ensure(STEP)

    def __len__(self) -> int:
        return len(self.id)

    @property
    def nbytes(self) -> int:
        """Bytes of memory the rows take."""
        return sum(one.nbytes for one in (*(getattr(self, name) for name in _ZEROED), *self.slot))

    def ensure(self, rows: int) -> None:
        """Have at least ``rows`` rows. Mutates."""
        old = len(self)
        if rows <= old:
            return
        for name in _ZEROED:
            setattr(self, name, stretched(getattr(self, name), rows))
        self.slot = [stretched(one, rows) for one in self.slot]
        for one in self.slot:
            one[old:] = NO_SLOT

    def ahead(self) -> list[Memory]:
        """What it will write to next."""
        return [*(ahead(getattr(self, name)) for name in _ZEROED), *map(ahead, self.slot)]

    def clear(self, rows: I64) -> None:
        """Make rows free. Mutates."""
        self.id[rows] = 0
        self.flags[rows] = 0
        self.parent[rows] = 0
        self.refs[rows] = 0
        self.active[rows] = 0
        self.hash_hi[rows] = 0
        self.hash_lo[rows] = 0
        self.sum_hi[rows] = 0
        self.sum_lo[rows] = 0
        for one in self.slot:
            one[rows] = NO_SLOT
        self._where[rows] = 0

    # --- what records say -------------------------------------------------------------------------

    def alloc(self, records: Records) -> None:
        """Enter new blocks with their first copies. Mutates.

        ``records`` are ALLOC, of rows that are there. Raises InvariantViolation.
        """
        rows = records["key"].astype(np.int64)
        for tier, here in by_tier(records):
            self.place(rows[here], tier, records["loc"][here].astype(np.uint32))
        self.id[rows] = records["id"]
        self.namespace[rows] = records["aux"]

    def may_seal(self, records: Records) -> tuple[I64, U64, U64]:
        """Rows of SEAL records, and the halves of their hashes, shape [n] each.

        Raises InvariantViolation if one is not of an open block.
        """
        rows = records["key"].astype(np.int64)
        self.check(rows, records)
        require(not self.is_sealed(rows).any(), "a block was sealed twice")
        return rows, records["hash_hi"].copy(), records["hash_lo"].copy()

    def seal(self, records: Records) -> None:
        """Give blocks their names, after ``may_seal``. Mutates."""
        rows = records["key"].astype(np.int64)
        self.hash_hi[rows], self.hash_lo[rows] = records["hash_hi"], records["hash_lo"]
        self.parent[rows] = records["loc"]
        self.sum_hi[rows], self.sum_lo[rows] = records["extra_hi"], records["extra_lo"]
        self.flags[rows] = np.where(records["tier"] == 1, SEALED | INDEXED, SEALED)

    def drop(self, records: Records) -> I64:
        """Copies are gone; returns the rows that have none left. Mutates.

        ``records`` are DROP. Raises InvariantViolation if a copy is not where one says.
        """
        rows = records["key"].astype(np.int64)
        self.check(rows, records)
        for tier, here in by_tier(records):
            there = self.slot[tier][rows[here]] == records["loc"][here]
            require(every(there), "a copy was dropped that is not there")
            self.unplace(rows[here], tier)
        return distinct(rows[~self.has_any_copy(rows)])

    def check(self, rows: I64, records: Records) -> None:
        """Raise InvariantViolation unless the rows hold the blocks of the records."""
        require(every(self.id[rows] == records["id"]), "a record names a block that is gone")

    def ref(self, rows: U32, *, active: bool) -> None:
        """One more sequence has the rows, each of them once; ``active``: and maps them. Mutates."""
        self.refs[rows] += 1
        if active:
            self.active[rows] += 1

    def unref(self, rows: I64, *, active: bool) -> I64:
        """One sequence less; returns the rows that nobody has any more and nobody can find.

        Mutates.
        """
        self.refs[rows] -= 1
        if active:
            self.active[rows] -= 1
        idle = rows[self.refs[rows] == 0]
        return np.asarray(idle[~self.is_indexed(idle)])

    def free(self, rows: I64) -> list[I64]:
        """Make rows free; returns the slots that they had, by tier. Mutates."""
        slots = [one[rows].astype(np.int64) for one in self.slot]
        self.clear(rows)
        return [one[one != NO_SLOT] for one in slots]

    # --- copies -----------------------------------------------------------------------------------

    def place(self, rows: I64, tier: Tier, slots: U32) -> None:
        """The rows have copies in these slots of the tier. Mutates.

        Raises InvariantViolation if one has a copy there already, or gets two.
        """
        require(every(self.slot[tier][rows] == NO_SLOT), PLACED_TWICE)
        self.slot[tier][rows] = slots
        require(every(self.slot[tier][rows] == slots), PLACED_TWICE)
        self._where[rows] |= _PRESENT[tier]

    def unplace(self, rows: I64, tier: Tier) -> None:
        """The rows have no copies in the tier any more. Mutates."""
        self.slot[tier][rows] = NO_SLOT
        self._where[rows] &= ~_PRESENT[tier]

    def slots_changed(self, rows: I64) -> None:
        """The slot columns of these rows were written directly. Mutates."""
        self._where[rows] = 0
        for tier, one in zip(Tier, self.slot, strict=True):
            self._where[rows[one[rows] != NO_SLOT]] |= _PRESENT[tier]

    def is_sealed(self, rows: I64) -> Bool:
        """Which of the rows hold a full, immutable block, shape [n]."""
        return np.asarray(_SEALED[self.flags[rows]])

    def is_indexed(self, rows: I64) -> Bool:
        """To which of the rows the hash table points, shape [n]."""
        return np.asarray(_INDEXED[self.flags[rows]])

    def has_copy(self, rows: I64, tier: Tier) -> Bool:
        """Which of the rows have a copy in the tier, shape [n]."""
        return np.asarray(_HAS[tier][self._where[rows]])

    def has_any_copy(self, rows: I64) -> Bool:
        """Which of the rows have a copy anywhere, shape [n]."""
        return self._where[rows].astype(np.bool_)

    def has_copy_below(self, rows: I64, tier: Tier) -> Bool:
        """Which of the rows have a copy in a slower tier than this one, shape [n]."""
        return np.asarray(_HAS_BELOW[tier][self._where[rows]])

    def count_tiers(self, rows: I64) -> list[int]:
        """For how many of the rows each tier is the fastest that has a copy."""
        counts: list[int] = np.bincount(self.best_tier(rows), minlength=len(Tier)).tolist()
        return counts[: len(Tier)]

    def census(self, first: int, stop: int) -> I64:
        """How many blocks of each namespace these rows hold, and how many copies of them by tier.

        Shape [namespaces, 1 + tiers]; namespaces above the highest one found are left out.
        """
        where = self.namespace[first:stop].astype(np.int64) * len(_WHERE) + self._where[first:stop]
        found = np.bincount(where)
        namespaces = -(-len(found) // len(_WHERE))
        found = np.pad(found, (0, namespaces * len(_WHERE) - len(found)))
        counted = np.stack([_WHERE > 0, *_HAS], 1).astype(np.int64)
        return np.asarray(found.reshape(namespaces, len(_WHERE)) @ counted)

    def may_leave(self, rows: I64, tier: Tier) -> Bool:
        """Which of the rows have a copy in the tier that no worker maps, shape [n]."""
        may = self.has_copy(rows, tier)
        return may & (self.active[rows] == 0) if tier is Tier.DEVICE else may

    def best_tier_but(self, rows: I64, tier: Tier) -> I64:
        """Fastest tier but this one that holds each row, shape [n]; len(Tier) if there is none."""
        return np.asarray(_BEST_BUT[tier][self._where[rows]])

    def names(self, rows: I64) -> U8:
        """Chain hashes of sealed blocks as they travel, high halves first, shape [n, 16]."""
        halves = np.stack([self.hash_hi[rows], self.hash_lo[rows]], 1)
        return np.ascontiguousarray(halves.astype(">u8")).view(np.uint8)

    def rows_in(self, tier: Tier) -> I64:
        """All rows that have a copy in the tier, ascending."""
        return np.flatnonzero(self._where & _PRESENT[tier])

    def best_tier(self, rows: I64) -> I64:
        """Fastest tier that holds each row, shape [n]; len(Tier) where there is none."""
        return _BEST[self._where[rows]]

    def export(self, rows: I64) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The persistent values of rows, shape [n], dtype VALUE."""
        values = np.zeros(len(rows), VALUE)
        for name in ("id", "parent", "hash_hi", "hash_lo", "sum_hi", "sum_lo"):
            values[name] = getattr(self, name)[rows]
        values["namespace"] = self.namespace[rows]
        values["flags"] = self.flags[rows]
        for name, one in zip(SLOT_FIELDS, self.slot, strict=True):
            values[name] = one[rows]
        return values

    def restore(self, rows: I64, values: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        """Set rows from persistent values. Mutates; refs and active stay 0."""
        if not len(rows):
            return
        self.ensure(widest(rows))
        # A part fits the cache: every field reads all of it.
        for at in range(0, len(rows), _PART_ROWS):
            self._restore(rows[at : at + _PART_ROWS], values[at : at + _PART_ROWS])

    def _restore(self, rows: I64, values: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        for name in ("id", "parent", "hash_hi", "hash_lo", "sum_hi", "sum_lo"):
            getattr(self, name)[rows] = values[name]
        self.namespace[rows] = values["namespace"]
        self.flags[rows] = values["flags"]
        for name, one in zip(SLOT_FIELDS, self.slot, strict=True):
            one[rows] = values[name]
        self.slots_changed(rows)


_ALL = slice(None)


def by_tier(records: Records) -> Iterator[tuple[Tier, Bool | slice]]:
    """The tiers that records name, each with where in ``records`` it is named."""
    tiers = records["tier"]
    first = int(tiers[0])
    if len(tiers) == 1 or every(tiers == first):
        yield Tier(first), _ALL
        return
    for tier in distinct(tiers).tolist():
        yield Tier(tier), tiers == tier
