"""Sealing: full blocks get their names, or give way to cached twins of themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import every, indices, some
from tierkv.core.effects import Flow, Wait
from tierkv.core.ids import I64, U64, Tier
from tierkv.core.matching import Chain, Matcher
from tierkv.core.placement import Placement
from tierkv.core.records import Kind, Records, blank, join, of_copies
from tierkv.core.sequences import Sequences, TableView
from tierkv.core.slot_tables import BlockEntries
from tierkv.core.state import Sequence
from tierkv.errors import InvalidArgument


@dataclass(frozen=True)
class Filled:
    """Full blocks as their worker describes them: ``chain``, and halves of checksums (u64 [n])."""

    chain: Chain
    sum_hi: U64
    sum_lo: U64

    def __len__(self) -> int:
        return len(self.chain)

    def part(self, start: int, stop: int) -> Filled:
        """Blocks start .. stop - 1."""
        return self.pick(slice(start, stop))

    def pick(self, which: slice | I64) -> Filled:
        """Some of the blocks."""
        return Filled(self.chain.pick(which), self.sum_hi[which], self.sum_lo[which])


class Sealer:
    """The ``seal`` verb, and what it has in common with ``store``.

    ``newly_sealed``: rows and ids sealed since the owner last looked, candidates for write-behind.
    """

    def __init__(self, placement: Placement, sequences: Sequences, matcher: Matcher) -> None:
        self._state = placement.state
        self._placement = placement
        self._sequences = sequences
        self._matcher = matcher
        self.newly_sealed: list[tuple[I64, U64]] = []

    def seal(
        self, lease: int, local: int, first: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> Flow[TableView]:
        """Blocks ``first`` .. are full: name them, or take the cached twin of each instead.

        Raises InvalidArgument, UnknownSequence.
        """
        while True:
            sequence = self._sequences.active(lease, local)
            rows = sequence.rows
            sealed = self._sequences.sealed_count(rows)
            if first > sealed or first + len(chain) > len(rows):
                raise InvalidArgument(
                    f"seal: blocks {first} to {first + len(chain) - 1} of a sequence with "
                    f"{len(rows)} blocks, {sealed} of them sealed; blocks are sealed in order"
                )
            skip = min(sealed - first, len(chain))
            if skip:
                self._check_resealed(sequence, first, chain.part(0, skip))
            rest = Filled(chain, sum_hi, sum_lo).part(skip, len(chain))
            if not len(rest):
                return self._sequences.view(sequence)
            ids, version = self._state.blocks.id[rows], self._state.version
            parent = self._sequences.parent_id(sequence, sealed)
            twins = yield from self.twins(sequence, ids, rest.chain, parent)
            if self._state.version == version or (
                self._sequences.steady(sequence, ids)
                and self._sequences.sealed_count(rows) == sealed
            ):
                break
        named = self._may_be_named(sequence, sealed)
        if len(twins) and self._is_shared(sequence, sealed):
            twins, named = twins[:0], False
        done = len(twins)
        self._take_twins(sequence, sealed, twins, rest.part(0, done))
        self._seal_own(sequence, sealed + done, rest.part(done, len(rest)), named=named)
        return self._sequences.view(sequence)

    def _check_resealed(self, sequence: Sequence, first: int, chain: Chain) -> None:
        rows = sequence.rows[first : first + len(chain)]
        blocks = self._state.blocks
        if not (
            np.array_equal(blocks.hash_hi[rows], chain.hi)
            and np.array_equal(blocks.hash_lo[rows], chain.lo)
        ):
            raise InvalidArgument("seal: a block of the sequence is sealed under another hash")

    def twins(self, sequence: Sequence, ids: U64, chain: Chain, parent: int) -> Flow[I64]:
        """Rows of cached blocks that are the same as the leading blocks of ``chain``, proven.

        ``parent``: id of the block before the first one. No rows if the sequence does not hold the
        blocks ``ids`` any more. They are all that there are now: what others sealed while some were
        proven on disk is among them. A block that took the name of one of those would hide all that
        is cached behind it.
        """
        verified = False
        judged, good = None, 0
        while self._sequences.unchanged(sequence, ids):
            rows = self._matcher.match(sequence.namespace, chain.hi, chain.lo, parent)
            if not len(rows):
                return rows
            rows = rows[: self._matcher.proven(rows, chain)]
            if not verified and (yield from self._placement.verify(rows)):
                verified = True
                continue
            rows = rows[: self._placement.doubt.leading_sound(rows)]
            coming = [self._placement.arriving(row) for row in rows.tolist()]
            signal = next((one for one in coming if one is not None), None)
            if signal is not None:
                yield Wait(signal)
                continue
            found, version = self._state.blocks.id[rows], self._state.version
            if judged is not None and np.array_equal(judged, found):
                return rows[:good]
            proven = yield from self._matcher.prove_on_disk(rows, chain)
            if self._state.version == version:
                return proven
            judged, good = found, len(proven)
        return np.zeros(0, np.int64)

    def _may_be_named(self, sequence: Sequence, at: int) -> bool:
        """Whether the block before has a name: behind another one nothing would be found."""
        return every(self._state.blocks.is_indexed(sequence.rows[max(at - 1, 0) : at]))

    def _is_shared(self, sequence: Sequence, at: int) -> bool:
        """Whether other sequences hold open blocks of this one: then it can take no twins.

        Who shares a block shares all blocks before it, so no one may swap one of those alone. Its
        own get no names then, for those are the twins'.
        """
        return some(self._state.blocks.refs[sequence.rows[at:]] > 1)

    def _take_twins(self, sequence: Sequence, at: int, twins: I64, filled: Filled) -> None:
        """Put cached twins in place of the sequence's own blocks, whose slots become free."""
        if not len(twins):
            return
        own = sequence.rows[at : at + len(twins)]
        swaps = blank(len(twins), Kind.SEQ_SWAP)
        swaps["id"] = sequence.id
        swaps["loc"] = np.arange(at, at + len(twins))
        swaps["key"] = twins
        cold = self.cold(twins)
        placed = self.place(sequence.namespace, twins[cold], own[cold], filled.pick(cold))
        self._placement.commit(join([swaps, *placed]))
        self._placement.touch(twins[::-1])
        self.took(twins, cold)

    def cold(self, twins: I64) -> I64:
        """Which of the twins (places, ascending) are not in the device tier."""
        return indices(~self._state.blocks.has_copy(twins, Tier.DEVICE))

    def place(self, namespace: int, twins: I64, own: I64, filled: Filled) -> list[Records]:
        """Records by which cold twins get the worker's own payload as their device copies.

        It need not be read back then. They take the slots of the worker's ``own`` blocks, which an
        earlier record of the same commit must free.
        """
        if not len(twins):
            return []
        blocks = self._state.blocks
        slots = blocks.slot[Tier.DEVICE][own].astype(np.int64)
        placed = of_copies(Kind.PLACE, Tier.DEVICE, twins, blocks.id[twins], slots)
        placed["extra_hi"], placed["extra_lo"] = filled.sum_hi, filled.sum_lo
        # Lower copies hold the payload of old: most often the same, for the same tokens.
        differs = (filled.sum_hi != blocks.sum_hi[twins]) | (filled.sum_lo != blocks.sum_lo[twins])
        # Dying here leaves the twins' entries in slots that the log knows as the sequence's
        # own open blocks; recovery expects that.
        self._fill(namespace, slots, blocks.id[twins], blocks.parent[twins], filled)
        return [placed, *self._forget_lower(twins[differs])]

    def took(self, twins: I64, cold: I64) -> None:
        """The twins are in use; the ``cold`` ones (places) came up by the same commit. Mutates."""
        self._placement.counters.deduplicated_blocks += len(twins)
        if len(cold):
            self._placement.doubt.clear(twins[cold])
            self.sealed(twins[cold])

    def _forget_lower(self, rows: I64) -> list[Records]:
        """DROP records of all copies below the device tier."""
        blocks = self._state.blocks
        dropped = []
        for tier in (Tier.HOST, Tier.DISK):
            here = rows[blocks.has_copy(rows, tier)]
            records = blank(len(here), Kind.DROP)
            records["key"] = here
            records["id"] = blocks.id[here]
            records["tier"] = tier
            records["loc"] = blocks.slot[tier][here]
            self._placement.forget(tier, here)
            dropped.append(records)
        return dropped

    def _seal_own(self, sequence: Sequence, at: int, filled: Filled, *, named: bool) -> None:
        if not len(filled):
            return
        rows = sequence.rows[at : at + len(filled)]
        parent = self._sequences.parent_id(sequence, at)
        records, applied = self.name(sequence.namespace, rows, parent, filled, named=named)
        self._placement.commit(records, applied=applied)
        self.sealed(rows)

    def name(
        self, namespace: int, rows: I64, parent: int, filled: Filled, *, named: bool = True
    ) -> tuple[Records, bool]:
        """Records that seal these open blocks as a chain behind the block ``parent`` (an id).

        And whether the state is as they say already. Then they must be logged at once. ``named``:
        they are found under their hashes from now on, whatever was.
        """
        state, blocks, chain = self._state, self._state.blocks, filled.chain
        slots = blocks.slot[Tier.DEVICE][rows].astype(np.int64)
        columns = blocks.hash_hi, blocks.hash_lo
        if named and not some(state.index.get(chain.hi, chain.lo, *columns) >= 0):
            sealed = state.structures.shortcuts.seal(
                state, rows, parent, chain, filled.sum_hi, filled.sum_lo
            )
            if sealed is not None:
                self._fill(namespace, slots, sealed.ids, sealed.parents, filled)
                return sealed.records, True
        ids = blocks.id[rows]
        parents = np.empty(len(ids), np.uint64)
        parents[0], parents[1:] = parent, ids[:-1]
        records = blank(len(rows), Kind.SEAL)
        records["key"] = rows
        records["id"] = ids
        records["hash_hi"], records["hash_lo"] = chain.hi, chain.lo
        records["loc"] = parents
        records["gen"] = chain.extras
        records["extra_hi"], records["extra_lo"] = filled.sum_hi, filled.sum_lo
        records["tier"] = named
        self._fill(namespace, slots, ids, parents, filled)
        return records, False

    def sealed(self, rows: I64) -> None:
        """These rows are sealed, or came up, and want a copy on disk. Mutates."""
        self.newly_sealed.append((rows, self._state.blocks.id[rows]))

    def _fill(self, namespace: int, slots: I64, ids: U64, parents: U64, filled: Filled) -> None:
        """Write slot entries. They must be there before the log says the slot holds the block."""
        known, chain = self._state.namespaces[namespace], filled.chain
        entries = BlockEntries(
            known.digest,
            ids,
            parents,
            chain.hi,
            chain.lo,
            filled.sum_hi,
            filled.sum_lo,
            chain.extras,
            chain.tokens,
        )
        self._placement.tables.fill(Tier.DEVICE, known.pool, slots, entries)
