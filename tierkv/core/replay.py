"""Replaying a log at once: where its changes lead, without making them one by one.

``State.apply`` takes its time per change. But little of a log shows at its end:

- Of a row, only the block that was put there last; of each of its copies, only the last record.
- Of a sequence that was closed, nothing. How often a block is held follows from the tables left.
- The hash index finds the block that was sealed last under a hash, unless that one lost all its
  copies since, or was deleted.
- A block is there as long as a sequence holds it or the index finds it (invariant I6).

So the records are sorted by what they are about, and each column of the block table is written
once. Rows that they concern are taken out of all that follows from the columns, changed, and put
back; no others are looked at. ``State.apply`` says what a record means: the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import distinct, first_of_runs, numbered, runs, take
from tierkv.core.blocks import INDEXED, SEALED, Blocks
from tierkv.core.ids import I64, NO_SLOT, U8, U32, Bool, Tier, lease_of
from tierkv.core.records import Kind, Records, pushed_rows, require_known
from tierkv.core.slots import SlotSet
from tierkv.core.space import widest
from tierkv.core.state import Sequence, State
from tierkv.errors import InvariantViolation, require

_OF_TABLES = (
    Kind.SEQ_OPEN,
    Kind.SEQ_PUSH,
    Kind.SEQ_SWAP,
    Kind.SEQ_TRUNCATE,
    Kind.SEQ_CLOSE,
    Kind.SEQ_SUSPEND,
    Kind.SEQ_RESUME,
)
_OF_BLOCKS = (Kind.ALLOC, Kind.SEAL, Kind.PLACE, Kind.DROP, Kind.DELETE)
_OF_COPIES = (Kind.ALLOC, Kind.PLACE, Kind.DROP)


def replay(state: State, records: Records) -> None:
    """Change the state as ``apply`` would by one record after the other. Mutates.

    ``records`` are whole commits, as many as there are. No slot may be held. Raises
    InvariantViolation if they contradict the state or each other and the end shows it; what it does
    not show is not looked for, so check the invariants of the result. Raises ConfigError, with
    nothing changed, if a newer version wrote some of them.
    """
    if not len(records):
        return
    # First of all: beside records of a newer version those that we know may look like damage.
    require_known(records["type"])
    start = 0
    # What a fence keeps follows from the state at that very moment. There are few of them.
    for fence in np.flatnonzero(records["type"] == Kind.SEQ_FENCE).tolist():
        _replay_at_once(state, records[start:fence])
        state.apply(records[fence : fence + 1])
        start = fence + 1
    _replay_at_once(state, records[start:])


def _replay_at_once(state: State, records: Records) -> None:
    if not len(records):
        return
    blocks = state.blocks
    of_blocks = _select(records, _OF_BLOCKS)
    if len(of_blocks):
        blocks.ensure(int(records["key"][of_blocks].max()) + 1)
    try:
        events = _Events.of(records, of_blocks)
        latest, twins = _latest_blocks(blocks, events), _twins(state, events)
        held = _held(state.sequences.values())
        _replay_tables(state, records)
        held = np.concatenate([held, _held(state.sequences.values())])
        rows = distinct(np.concatenate([events.row, twins, held]))
        require(widest(rows) <= len(blocks), "a sequence holds a row that does not exist")
        ids, flags = blocks.id[rows], blocks.flags[rows]
        _take_out(state, rows)
        if len(events.row):
            _replay_blocks(state, events, latest, twins)
        _count_holders(state, held)
        idle = (blocks.refs[rows] == 0) & ~blocks.is_indexed(rows)
        blocks.clear(rows[idle & (blocks.id[rows] != 0)])
        _put_back(state, rows)
    except (IndexError, KeyError) as error:
        raise InvariantViolation(f"a record names what does not exist: {error}") from error
    changed = (ids != blocks.id[rows]) | (flags != blocks.flags[rows])
    state.touch_rows(distinct(np.concatenate([rows[changed], events.row])))


# --- leases, namespaces, and sequences' tables ----------------------------------------------------


def _replay_tables(state: State, records: Records) -> None:
    """Leases, namespaces, epochs as ``apply`` has them; tables of sequences that are left."""
    kinds = records["type"]
    at = _select(records, _OF_TABLES)
    names, which = numbered(records["id"][at])
    ended_at = _ends(records, at, names, which)
    opened = np.zeros(len(names), np.bool_)
    opened[which[kinds[at] == Kind.SEQ_OPEN]] = True
    unknown = [one for one in names[~opened].tolist() if one not in state.sequences]
    require(not unknown, f"records name sequences that are not open: {unknown[:5]}")
    ended = names[ended_at >= 0].tolist()
    for lease in records["key"][kinds == Kind.LEASE_CLOSE].tolist():
        ended += state.lease_sequences.get(lease, {})
    for identity in ended:
        if identity in state.sequences:
            state.touch_sequence(identity)
            del state.sequences[identity], state.lease_sequences[lease_of(identity)][identity]
    rest = np.ones(len(records), np.bool_)
    rest[at] = rest[_select(records, _OF_BLOCKS)] = False
    state.apply(take(records, np.flatnonzero(rest)))
    lasts = at > ended_at[which]
    at, which = at[lasts], which[lasts]
    opens = kinds[at] == Kind.SEQ_OPEN
    state.apply(take(records, at[opens]))
    at, which = at[~opens], which[~opens]
    order = np.argsort(which, kind="stable")
    changes = take(records, at[order])
    for start, stop in runs(which[order] * 256 + changes["type"]):
        _change_table(state, changes[start:stop])


def _ends(records: Records, at: I64, names: I64, which: I64) -> I64:
    """Where in ``records`` each sequence was closed last, by itself or with its lease; else -1."""
    ended_at = np.full(len(names), -1)
    closed = records["type"][at] == Kind.SEQ_CLOSE
    ended_at[which[closed]] = at[closed]
    closes = np.flatnonzero(records["type"] == Kind.LEASE_CLOSE)
    if len(closes):
        by_lease = dict(zip(records["key"][closes].tolist(), closes.tolist(), strict=True))
        with_lease = [by_lease.get(lease_of(identity), -1) for identity in names.tolist()]
        ended_at = np.maximum(ended_at, np.array(with_lease, np.int64))
    return ended_at


def _change_table(state: State, records: Records) -> None:
    """Records of one type about one sequence."""
    identity, kind = int(records["id"][0]), int(records["type"][0])
    sequence = state.sequences.get(identity)
    if sequence is None:
        raise InvariantViolation(f"a record names sequence {identity:#x}, which is not open")
    state.touch_sequence(identity)
    if kind == Kind.SEQ_PUSH:
        sequence.push(pushed_rows(records))
    elif kind == Kind.SEQ_SWAP:
        for index, row in zip(records["loc"].tolist(), records["key"].tolist(), strict=True):
            sequence.swap(index, row)
    elif kind == Kind.SEQ_TRUNCATE:
        sequence.cut(int(records["loc"].min()))
    else:
        require(len(records) == 1, "a sequence was suspended or resumed twice")
        require(
            sequence.suspended != (kind == Kind.SEQ_SUSPEND),
            "a sequence was suspended or resumed twice",
        )
        sequence.suspended = not sequence.suspended


def _held(sequences: Iterable[Sequence]) -> I64:
    """The rows that the sequences hold, each as often as they do."""
    return np.concatenate([np.zeros(0, np.int64), *(sequence.rows for sequence in sequences)])


def _count_holders(state: State, held: I64) -> None:
    """``held``: rows that are held now, and all that were."""
    sequences = state.sequences.values()
    active = [one for one in sequences if not one.suspended]
    for column, holders in ((state.blocks.refs, sequences), (state.blocks.active, active)):
        column[held] = 0
        rows, which = numbered(_held(holders))
        column[rows] = np.bincount(which, minlength=len(rows))


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Events:
    """Records about blocks, by row and in the order of the log (all of shape [n]).

    ``at``: where each record is in the log.
    """

    at: I64
    row: I64
    kind: U8
    records: Records

    @classmethod
    def of(cls, records: Records, at: I64) -> _Events:
        """The records at these places of the log."""
        at = at[np.argsort(records["key"][at], kind="stable")]
        chosen = take(records, at)
        return cls(at, chosen["key"].astype(np.int64), chosen["type"].copy(), chosen)

    def where(self, chosen: Bool) -> _Events:
        """Some of them."""
        at = np.flatnonzero(chosen)
        return _Events(self.at[at], self.row[at], self.kind[at], take(self.records, at))

    def are(self, *kinds: Kind) -> Bool:
        """Which of them are of these types."""
        return np.isin(self.kind, kinds)

    @property
    def first(self) -> Bool:
        """Which of them are the first of their row."""
        return first_of_runs(self.row)


def _twins(state: State, events: _Events) -> I64:
    """Rows of blocks of before that give way to those sealed under their hashes."""
    hashes = take(events.records, np.flatnonzero(_enter_index(events)))
    blocks = state.blocks
    rows = state.index.get(
        hashes["hash_hi"].copy(), hashes["hash_lo"].copy(), blocks.hash_hi, blocks.hash_lo
    )
    return rows[rows >= 0]


def _enter_index(events: _Events) -> Bool:
    """Which events name a block in the hash index."""
    return np.asarray(events.are(Kind.SEAL) & (events.records["tier"] == 1))


def _replay_blocks(state: State, events: _Events, latest: Bool, twins: I64) -> None:
    blocks = state.blocks
    newest = _newest(events, _enter_index(events))
    blocks.flags[twins] &= np.uint16(~INDEXED & 0xFFFF)

    fresh = events.where(events.are(Kind.ALLOC))
    state.next_block = max(state.next_block, int(fresh.records["id"].max(initial=0)) + 1)
    fresh = events.where(latest & events.are(Kind.ALLOC))
    blocks.clear(fresh.row)
    blocks.id[fresh.row] = fresh.records["id"]
    blocks.namespace[fresh.row] = fresh.records["aux"]

    rows = events.row[events.first]
    bare_at = _replay_copies(blocks, events.where(latest & events.are(*_OF_COPIES)), rows)
    chosen = latest & events.are(Kind.SEAL)
    sealed, found = events.where(chosen), newest[chosen]
    require(
        bool(sealed.first.all()) and not blocks.is_sealed(sealed.row).any(),
        "a block was sealed twice",
    )
    blocks.hash_hi[sealed.row] = sealed.records["hash_hi"]
    blocks.hash_lo[sealed.row] = sealed.records["hash_lo"]
    blocks.parent[sealed.row] = sealed.records["loc"]
    blocks.flags[sealed.row] = np.where(found, SEALED | INDEXED, SEALED)
    sealed_at = np.full(len(rows), -1)
    sealed_at[np.searchsorted(rows, sealed.row)] = sealed.at
    blocks.flags[rows[bare_at > sealed_at]] &= np.uint16(~INDEXED & 0xFFFF)
    deleted = events.where(latest & events.are(Kind.DELETE))
    require(bool(blocks.is_sealed(deleted.row).all()), "an open block was deleted")
    blocks.flags[deleted.row] &= np.uint16(~INDEXED & 0xFFFF)
    summed = events.where(latest & events.are(Kind.SEAL, Kind.PLACE))
    blocks.sum_hi[summed.row] = summed.records["extra_hi"]
    blocks.sum_lo[summed.row] = summed.records["extra_lo"]


def _latest_blocks(before: Blocks, events: _Events) -> Bool:
    """Which events are about the block that was in their row last."""
    if not len(events.row):
        return np.zeros(0, np.bool_)
    first = events.first
    begins = first | events.are(Kind.ALLOC)
    block = np.cumsum(begins) - 1
    opening = events.where(begins)
    ids = np.where(opening.are(Kind.ALLOC), opening.records["id"], before.id[opening.row])
    require((ids[block] == events.records["id"]).all(), "a record names a block that is gone")
    last = np.append(np.flatnonzero(first)[1:], len(block)) - 1
    return np.asarray(block == block[last][np.cumsum(first) - 1])


def _newest(events: _Events, found: Bool) -> Bool:
    """Which of the ``found`` events, which enter the hash index, are the last under their hash."""
    at = np.flatnonzero(found)
    hi, lo = events.records["hash_hi"][at], events.records["hash_lo"][at]
    order = np.lexsort((events.at[at], lo, hi))
    hi, lo = hi[order], lo[order]
    last = np.ones(len(at), np.bool_)
    last[:-1] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
    newest = np.zeros(len(found), np.bool_)
    newest[at[order[last]]] = True
    return newest


def _replay_copies(blocks: Blocks, events: _Events, rows: I64) -> I64:
    """Where in the log each of ``rows`` (ascending) had no copy left, last; else -1; shape [n]."""
    first = events.first
    had = np.sum([blocks.has_copy(events.row, tier) for tier in Tier], axis=0)
    steps = np.where(events.are(Kind.DROP), -1, 1)
    steps[first] += had[first]
    totals = np.cumsum(steps)
    earlier = (totals - steps)[first]
    bare = totals == earlier[np.cumsum(first) - 1]
    bare_at = np.full(len(rows), -1)
    bare_at[np.searchsorted(rows, events.row[bare])] = events.at[bare]
    tiers = events.records["tier"]
    require(bool((tiers < len(Tier)).all()), "a record names a tier that does not exist")
    for tier in Tier:
        _replay_slots(blocks.slot[tier], events.where(tiers == tier))
    blocks.slots_changed(events.row)
    return bare_at


def _replay_slots(column: U32, events: _Events) -> None:
    """Copies in one tier come and go: at most one at a time."""
    slots = events.records["loc"].astype(np.uint32)
    dropped = events.are(Kind.DROP)
    after = np.where(dropped, np.uint32(NO_SLOT), slots)
    was = np.concatenate([after[:1], after[:-1]])
    was[events.first] = column[events.row[events.first]]
    require((was[dropped] == slots[dropped]).all(), "a copy was dropped that is not there")
    require((was[~dropped] == NO_SLOT).all(), "a block was placed twice")
    column[events.row] = after


# --- what follows from the columns ----------------------------------------------------------------


def _take_out(state: State, rows: I64) -> None:
    """Free the rows and their slots, and take them out of the hash index."""
    rows = rows[state.blocks.id[rows] != 0]
    state.row_set.give(rows)
    for slots, numbers in _slots(state, rows):
        slots.give(numbers)
    indexed = rows[state.blocks.is_indexed(rows)]
    state.index.remove(indexed, state.blocks.hash_hi, state.blocks.hash_lo)


def _put_back(state: State, rows: I64) -> None:
    """The opposite: free rows, free slots and the hash index as the columns have them now."""
    rows = rows[state.blocks.id[rows] != 0]
    state.row_set.take(rows)
    for slots, numbers in _slots(state, rows):
        slots.take(numbers)
    indexed = rows[state.blocks.is_indexed(rows)]
    state.index.put(indexed, state.blocks.hash_hi, state.blocks.hash_lo)


def _slots(state: State, rows: I64) -> Iterator[tuple[SlotSet, I64]]:
    """The slots of the rows' copies, by the set that they are in."""
    blocks = state.blocks
    for tier in Tier:
        for pool, members in state.by_pool(rows[blocks.has_copy(rows, tier)]):
            yield state.slots[tier, pool], blocks.slot[tier][members].astype(np.int64)


# --- arrays ---------------------------------------------------------------------------------------


def _select(records: Records, kinds: Iterable[Kind]) -> I64:
    """Where the records of these types are, shape [n]."""
    wanted = np.zeros(256, np.bool_)
    wanted[list(kinds)] = True
    return np.flatnonzero(wanted[records["type"]])
