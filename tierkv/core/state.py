"""The daemon's state, and ``apply``, which changes it as records say.

Live operation applies records as it logs them; ``replay`` gets the same state from many records at
once. Everything here follows from the records alone: no clock, no chance, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.core.arrays import distinct, every, runs
from tierkv.core.blocks import INDEXED, by_tier
from tierkv.core.ids import I64, NO_SLOT, U32, Bool, Tier, lease_of
from tierkv.core.records import Kind, Records, pushed_rows, require_known
from tierkv.core.slots import SlotSet
from tierkv.core.space import Memory, column, stretched, widest
from tierkv.core.structures import Structures
from tierkv.errors import InvariantViolation, require

ROWS_MAX = 2**32 - 2

NAMESPACES_MAX = 2**16
"""Records and blocks name them by 16 bits."""

DIRTY_ARRAYS_MAX = 512
"""Changes of a row or two are gathered: a checkpoint that finds thousands of arrays takes long."""


@dataclass(frozen=True)
class PoolShape:
    """Geometry that all namespaces of one pool share."""

    block_bytes: int
    block_tokens: int


@dataclass(frozen=True)
class NamespaceEntry:
    """A namespace the daemon knows: its digest and the pool its blocks live in."""

    digest: bytes
    pool: int


@dataclass(frozen=True)
class Lease:
    """What one worker holds its sequences by."""

    id: int
    token: bytes
    pid: int
    start_time: int
    uid: int


@dataclass
class Sequence:
    """A worker's block table.

    ``fenced``: it has ended, but its worker was not told yet and may still write into its unsealed
    blocks. It holds those, and nothing else, so that nobody is given their slots.
    """

    id: int
    namespace: int
    suspended: bool = False
    fenced: bool = False
    _rows: U32 = field(default_factory=lambda: np.zeros(16, np.uint32))
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> I64:
        """Rows of the sequence's blocks in order, shape [n]; a copy."""
        return self._rows[: self._count].astype(np.int64)

    def push(self, rows: U32) -> None:
        """Append rows."""
        needed = self._count + len(rows)
        if needed > len(self._rows):
            grown = np.zeros(max(needed, 2 * len(self._rows)), np.uint32)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : needed] = rows
        self._count = needed

    def swap(self, index: int, row: int) -> int:
        """Put ``row`` at ``index``; returns the row that was there."""
        old = int(self._rows[index])
        self._rows[index] = row
        return old

    def keep(self, kept: Bool) -> I64:
        """Keep the rows that ``kept`` (shape [n]) names; returns the others."""
        rows = self.rows
        self._count = int(np.count_nonzero(kept))
        self._rows[: self._count] = rows[kept]
        return rows[~kept]

    def cut(self, count: int) -> I64:
        """Keep ``count`` rows; returns those cut off."""
        gone = self._rows[count : self._count].astype(np.int64)
        self._count = min(self._count, count)
        return gone


@dataclass
class Changes:
    """What changed since the last checkpoint: live rows, freed rows, and small things by name."""

    rows: I64
    freed_rows: I64
    sequences: set[int]
    leases: set[int]
    namespaces: set[int]


SlotBytes = Callable[[Tier, PoolShape], int]
"""Bytes that one slot of a pool takes in a tier."""


class State:
    """Blocks, block tables, leases, namespaces, and which slot of which tier holds what.

    ``structures`` makes what they are kept in; numpy's if it is left out.
    """

    def __init__(
        self,
        budgets: dict[Tier, int],
        slot_bytes: SlotBytes,
        structures: Structures | None = None,
    ) -> None:
        self.budgets = budgets
        self._slot_bytes = slot_bytes
        smallest = PoolShape(1, 1)
        copies_max = sum(budgets[tier] // slot_bytes(tier, smallest) for tier in Tier)
        self.rows_room = min(copies_max, ROWS_MAX)
        """Room for so many rows is set aside: what the budgets can hold, most often far more."""
        self.structures = structures = structures or Structures()
        self.blocks = structures.blocks(self.rows_room)
        self.index = structures.table()
        self.row_set = structures.slots(ROWS_MAX, self.rows_room)
        self.pools: list[PoolShape] = []
        self.slots: dict[tuple[Tier, int], SlotSet] = {}
        self._sets_of: dict[Tier, list[tuple[SlotSet, int]]] = {tier: [] for tier in Tier}
        """A tier's slot sets, each with the bytes of a slot."""
        self.namespaces: dict[int, NamespaceEntry] = {}
        self._pool_of_namespace: I64 = column(NAMESPACES_MAX, np.int64)
        self.sequences: dict[int, Sequence] = {}
        self.leases: dict[int, Lease] = {}
        self.lease_sequences: dict[int, dict[int, None]] = {}
        self.next_block = 1
        self.next_lease = 1
        self.epoch = 0
        self.version = 0
        """Grows with every change: who finds it unmoved need not look at anything again."""
        self.slots_freed = 0
        """Only grows. A slot stays as it is until the record that freed it is written."""
        self._dirty_rows: list[I64] = []
        self._dirty_sequences: set[int] = set()
        self._dirty_leases: set[int] = set()
        self._dirty_namespaces: set[int] = set()
        self._handlers: dict[int, Callable[[Records], None]] = {
            Kind.LEASE_OPEN: self._lease_open,
            Kind.LEASE_CLOSE: self._lease_close,
            Kind.NAMESPACE: self._namespace,
            Kind.SEQ_OPEN: self._seq_open,
            Kind.SEQ_PUSH: self._seq_push,
            Kind.SEQ_SWAP: self._seq_swap,
            Kind.SEQ_TRUNCATE: self._seq_truncate,
            Kind.SEQ_CLOSE: self._seq_close,
            Kind.SEQ_SUSPEND: self._seq_suspend,
            Kind.SEQ_RESUME: self._seq_resume,
            Kind.ALLOC: self._alloc,
            Kind.SEAL: self._seal,
            Kind.PLACE: self._place,
            Kind.DROP: self._drop,
            Kind.EPOCH: self._epoch,
            Kind.SEQ_FENCE: self._seq_fence,
            Kind.DELETE: self._delete,
        }

    # --- reading ----------------------------------------------------------------------------------

    def slot_bytes(self, tier: Tier, pool: int) -> int:
        """Bytes one slot of the pool takes in the tier."""
        return self._slot_bytes(tier, self.pools[pool])

    def slot_bytes_of(self, tier: Tier, rows: I64) -> I64:
        """Bytes that a slot of each row's pool takes in the tier, shape [n]."""
        if len(self.pools) == 1:
            return np.full(len(rows), self.slot_bytes(tier, 0))
        by_pool = [self.slot_bytes(tier, pool) for pool in range(len(self.pools))]
        return np.asarray(np.array(by_pool, np.int64)[self.pool_of(rows)])

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of all used and held slots of a tier."""
        return sum(
            (slots.used_count + slots.held_count) * size for slots, size in self._sets_of[tier]
        )

    def copies(self, tier: Tier) -> int:
        """How many blocks have a copy in the tier."""
        return sum(slots.used_count for (of, _), slots in self.slots.items() if of is tier)

    def free_bytes(self, tier: Tier) -> int:
        """What is left of a tier's budget."""
        return self.budgets[tier] - self.used_bytes(tier)

    def pool_of(self, rows: I64) -> I64:
        """The pool of each row, shape [n]."""
        return self.pools_of(self.blocks.namespace[rows])

    def pools_of(self, namespaces: npt.NDArray[np.uint16]) -> I64:
        """The pool of each namespace, shape [n]."""
        return self._pool_of_namespace[namespaces]

    def by_pool(self, rows: I64) -> Iterator[tuple[int, I64]]:
        """Rows grouped by pool, order kept inside a group."""
        if not len(rows):
            return
        if len(self.pools) == 1:
            yield 0, rows
            return
        pools = self.pool_of(rows)
        if every(pools == pools[0]):
            yield int(pools[0]), rows
            return
        for pool in distinct(pools).tolist():
            yield pool, rows[pools == pool]

    def writable(self, sequence: Sequence) -> Bool:
        """Which of the sequence's blocks its worker may write into, shape [n]."""
        rows = sequence.rows
        open_ = ~self.blocks.is_sealed(rows) & self.blocks.has_copy(rows, Tier.DEVICE)
        return np.asarray(open_ & (not sequence.suspended))

    def live_rows(self) -> I64:
        """All rows that hold a block, shape [n]."""
        return self.row_set.used()

    def rows_in(self, tier: Tier) -> I64:
        """All rows with a copy in the tier, shape [n]."""
        return self.blocks.rows_in(tier)

    def resize(self, budgets: dict[Tier, int]) -> None:
        """Take new budgets, after recovery; no copy may lie beyond them. Mutates."""
        self.budgets = budgets
        for (tier, pool), slots in self.slots.items():
            slots.capacity = min(budgets[tier] // self.slot_bytes(tier, pool), NO_SLOT - 1)

    def ahead(self) -> list[Memory]:
        """The memory that the next blocks take: it should be there before they come. Mutates."""
        sets = (self.row_set, *self.slots.values())
        return [
            *self.blocks.ahead(),
            *self.index.ahead(self._blocks_max()),
            *(one for numbers in sets for one in numbers.ahead()),
        ]

    def _blocks_max(self) -> int:
        """How many blocks the tiers can hold, if they fit their smallest slots."""
        most = dict.fromkeys(Tier, 0)
        for (tier, _), slots in self.slots.items():
            most[tier] = max(most[tier], slots.capacity)
        return sum(most.values())

    def reindex(self) -> None:
        """Get the free lists ready for live work, after recovery. Mutates."""
        self.row_set.reindex()
        for slots in self.slots.values():
            slots.reindex()

    # --- changing ---------------------------------------------------------------------------------

    def apply(self, records: Records) -> None:
        """Change the state as the records say, in order.

        Raises InvariantViolation if a record contradicts the state, ConfigError for one of a type
        that must be known and is not: a newer version wrote it, so it is no damage.
        """
        if not len(records):
            return
        self.version += 1
        kinds = records["type"]
        for start, stop in runs(kinds):
            kind = int(kinds[start])
            handler = self._handlers.get(kind)
            if handler is not None:
                try:
                    handler(records[start:stop])
                except (IndexError, KeyError) as error:
                    raise InvariantViolation(
                        f"a record of type {kind} names what does not exist: {error}"
                    ) from error
            else:
                require_known(kinds[start:stop])

    def commit(self, records: Records, *, applied: bool = False) -> None:
        """What commits come to where nobody keeps a log. Mutates. Raises as ``apply``."""
        if not applied:
            self.apply(records)

    def changed(self, rows: I64) -> None:
        """These rows were changed otherwise than by ``apply``, just as records say. Mutates."""
        self.version += 1
        self.touch_rows(rows)

    def take_changes(self) -> Changes:
        """What changed since the last call; for a checkpoint. Mutates (forgets it)."""
        rows = (
            distinct(np.concatenate(self._dirty_rows))
            if self._dirty_rows
            else np.zeros(0, np.int64)
        )
        live = self.blocks.id[rows] != 0
        changes = Changes(
            rows[live],
            rows[~live],
            self._dirty_sequences,
            self._dirty_leases,
            self._dirty_namespaces,
        )
        self._dirty_rows = []
        self._dirty_sequences, self._dirty_leases, self._dirty_namespaces = set(), set(), set()
        return changes

    def touch_rows(self, rows: I64) -> None:
        """What the checkpoint stores of these rows has changed. Mutates."""
        self._dirty_rows.append(rows)
        if len(self._dirty_rows) > DIRTY_ARRAYS_MAX:
            self._dirty_rows = [np.concatenate(self._dirty_rows)]

    def touch_sequence(self, identity: int) -> None:
        """What the checkpoint stores of a sequence has changed. Mutates."""
        self._dirty_sequences.add(identity)

    def touch_namespace(self, namespace: int) -> None:
        """Something the checkpoint stores beside a namespace has changed. Mutates."""
        self._dirty_namespaces.add(namespace)

    def put_back(self, changes: Changes) -> None:
        """Count changes as not yet stored again, because their checkpoint failed. Mutates."""
        self._dirty_rows += [changes.rows, changes.freed_rows]
        self._dirty_sequences |= changes.sequences
        self._dirty_leases |= changes.leases
        self._dirty_namespaces |= changes.namespaces

    @property
    def changed_rows(self) -> int:
        """Upper bound of the rows changed since the last checkpoint."""
        return sum(len(rows) for rows in self._dirty_rows)

    def dirty_rows(self) -> I64:
        """The rows changed since the last checkpoint, some more than once."""
        return np.concatenate([np.zeros(0, np.int64), *self._dirty_rows])

    def add_namespace(self, namespace: int, digest: bytes, shape: PoolShape) -> None:
        """Enter a namespace and, if its geometry is new, a pool. Mutates."""
        if shape not in self.pools:
            pool = len(self.pools)
            self.pools.append(shape)
            for tier in Tier:
                size = self._slot_bytes(tier, shape)
                capacity = min(self.budgets[tier] // size, NO_SLOT - 1)
                slots = self.slots[tier, pool] = self.structures.slots(capacity, None)
                self._sets_of[tier].append((slots, size))
        self.namespaces[namespace] = NamespaceEntry(digest, self.pools.index(shape))
        known = max(namespace + 1, len(self._pool_of_namespace))
        # No longer than that: a number that nobody has entered must stay an error.
        self._pool_of_namespace = stretched(self._pool_of_namespace, known)[:known]
        self._pool_of_namespace[namespace] = self.namespaces[namespace].pool

    def add_lease(self, lease: Lease) -> None:
        """Enter a lease. Mutates."""
        self.leases[lease.id] = lease
        self.lease_sequences.setdefault(lease.id, {})
        self.next_lease = max(self.next_lease, lease.id + 1)

    def add_sequence(self, sequence: Sequence) -> None:
        """Enter a sequence whose blocks are already counted. Mutates."""
        require(sequence.id not in self.sequences, "a sequence was opened twice")
        self.sequences[sequence.id] = sequence
        self.lease_sequences[lease_of(sequence.id)][sequence.id] = None

    def _lease_open(self, records: Records) -> None:
        for record in records:
            token = record["extra_hi"].tobytes() + record["extra_lo"].tobytes()
            self.add_lease(
                Lease(
                    int(record["key"]),
                    token,
                    int(record["id"]),
                    int(record["gen"]),
                    int(record["loc"]),
                )
            )
            self._dirty_leases.add(int(record["key"]))

    def _lease_close(self, records: Records) -> None:
        for lease in records["key"].tolist():
            require(lease in self.leases, "a lease was closed that is not open")
            for sequence in list(self.lease_sequences[lease]):
                self._close(sequence)
            del self.leases[lease], self.lease_sequences[lease]
            self._dirty_leases.add(lease)

    def _namespace(self, records: Records) -> None:
        for record in records:
            digest = record["hash_hi"].tobytes() + record["hash_lo"].tobytes()
            shape = PoolShape(int(record["id"]), int(record["loc"]))
            self.add_namespace(int(record["key"]), digest, shape)
            self._dirty_namespaces.add(int(record["key"]))

    def _seq_open(self, records: Records) -> None:
        for record in records:
            self.add_sequence(Sequence(int(record["id"]), int(record["key"])))
            self._dirty_sequences.add(int(record["id"]))

    def _seq_push(self, records: Records) -> None:
        ids = records["id"]
        for start, stop in runs(ids):
            sequence = self._sequence(int(ids[start]))
            rows = pushed_rows(records[start:stop])
            sequence.push(rows)
            self.blocks.ref(rows, active=not sequence.suspended)

    def _seq_swap(self, records: Records) -> None:
        for record in records:
            sequence = self._sequence(int(record["id"]))
            row = int(record["key"])
            old = sequence.swap(int(record["loc"]), row)
            self.blocks.ref(np.array([row], np.uint32), active=not sequence.suspended)
            self._unref(np.array([old]), not sequence.suspended)

    def _seq_truncate(self, records: Records) -> None:
        for record in records:
            sequence = self._sequence(int(record["id"]))
            self._unref(sequence.cut(int(record["loc"])), not sequence.suspended)

    def _seq_close(self, records: Records) -> None:
        for sequence in records["id"].tolist():
            self._close(sequence)

    def _seq_suspend(self, records: Records) -> None:
        for identity in records["id"].tolist():
            sequence = self._sequence(identity)
            require(not sequence.suspended, "a sequence was suspended twice")
            sequence.suspended = True
            self.blocks.active[sequence.rows] -= 1

    def _seq_resume(self, records: Records) -> None:
        for identity in records["id"].tolist():
            sequence = self._sequence(identity)
            require(sequence.suspended, "a sequence was resumed that was not suspended")
            sequence.suspended = False
            self.blocks.active[sequence.rows] += 1

    def _seq_fence(self, records: Records) -> None:
        for identity in records["id"].tolist():
            sequence = self._sequence(identity)
            require(not sequence.suspended, "a suspended sequence was fenced")
            sequence.fenced = True
            self._unref(sequence.keep(self.writable(sequence)), was_active=True)

    def _alloc(self, records: Records) -> None:
        rows = records["key"].astype(np.int64)
        self.blocks.ensure(widest(rows))
        self.row_set.take(rows)
        self.blocks.alloc(records)
        self._take_slots(records, rows)
        self.touch_rows(rows)
        self.next_block = max(self.next_block, int(records["id"].max()) + 1)

    def _seal(self, records: Records) -> None:
        if len(records) > 1 and self.index.repeats(records["hash_lo"]):
            # Two requests of one frame sealed the same chain: their order matters.
            for at in range(len(records)):
                self._seal(records[at : at + 1])
            return
        blocks = self.blocks
        rows, hash_hi, hash_lo = blocks.may_seal(records)
        indexed = records["tier"] == 1
        named = slice(None) if every(indexed) else indexed
        old = self.index.get(hash_hi[named], hash_lo[named], blocks.hash_hi, blocks.hash_lo)
        replaced = old[old >= 0]
        self._unindex(replaced)
        blocks.seal(records)
        self.index.put(rows[named], blocks.hash_hi, blocks.hash_lo)
        self.touch_rows(rows)
        if len(replaced):
            self._free(replaced[blocks.refs[replaced] == 0])

    def _place(self, records: Records) -> None:
        rows = records["key"].astype(np.int64)
        self.blocks.check(rows, records)
        for tier, here in by_tier(records):
            self.blocks.place(rows[here], tier, records["loc"][here].astype(np.uint32))
        self._take_slots(records, rows)
        self.blocks.sum_hi[rows] = records["extra_hi"]
        self.blocks.sum_lo[rows] = records["extra_lo"]
        self.touch_rows(rows)

    def _drop(self, records: Records) -> None:
        rows = records["key"].astype(np.int64)
        gone = self.blocks.drop(records)
        self.slots_freed += len(rows)
        for slots, part in self._slots_of(records, rows):
            slots.give(part)
        self.touch_rows(rows)
        if len(gone):
            self._unindex(gone[self.blocks.is_indexed(gone)])
            self._free(gone[self.blocks.refs[gone] == 0])

    def _delete(self, records: Records) -> None:
        rows = records["key"].astype(np.int64)
        self.blocks.check(rows, records)
        require(every(self.blocks.is_sealed(rows)), "an open block was deleted")
        self._unindex(rows[self.blocks.is_indexed(rows)])
        self._free(rows[self.blocks.refs[rows] == 0])

    def _epoch(self, records: Records) -> None:
        self.epoch = int(records["id"][-1])

    # --- parts ------------------------------------------------------------------------------------

    def _sequence(self, identity: int) -> Sequence:
        """The sequence a record names; it is about to change."""
        sequence = self.sequences.get(identity)
        if sequence is None:
            raise InvariantViolation(f"a record names sequence {identity:#x}, which is not open")
        self.touch_sequence(identity)
        return sequence

    def _close(self, identity: int) -> None:
        sequence = self._sequence(identity)
        del self.sequences[identity]
        del self.lease_sequences[lease_of(identity)][identity]
        self._unref(sequence.cut(0), not sequence.suspended)

    def _unref(self, rows: I64, was_active: bool) -> None:
        self._free(self.blocks.unref(rows, active=was_active))

    def _unindex(self, rows: I64) -> None:
        if not len(rows):
            return
        self.index.remove(rows, self.blocks.hash_hi, self.blocks.hash_lo)
        self.blocks.flags[rows] &= np.uint16(~INDEXED & 0xFFFF)
        self.touch_rows(rows)

    def _free(self, rows: I64) -> None:
        """Give up rows that nobody holds and nobody finds."""
        if not len(rows):
            return
        for pool, members in self.by_pool(rows):
            for tier, slots in zip(Tier, self.blocks.free(members), strict=True):
                if len(slots):
                    self.slots_freed += len(slots)
                    self.slots[tier, pool].give(slots)
        self.row_set.give(rows)
        self.touch_rows(rows)

    def _take_slots(self, records: Records, rows: I64) -> None:
        for slots, part in self._slots_of(records, rows):
            slots.take(part)

    def _slots_of(self, records: Records, rows: I64) -> Iterator[tuple[SlotSet, I64]]:
        """The slots that records of copies name, set by set."""
        numbers = records["loc"].astype(np.int64)
        for tier, here in by_tier(records):
            part, members = numbers[here], rows[here]
            if len(self.pools) == 1:
                yield self.slots[tier, 0], part
                continue
            pools = self.pool_of(members)
            for pool in distinct(pools).tolist():
                yield self.slots[tier, pool], part[pools == pool]
