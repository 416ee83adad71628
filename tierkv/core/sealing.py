"""Sealing: full blocks get their names, or give way to cached twins of themselves."""

from __future__ import annotations

import numpy as np

from tierkv.core.arrays import some
from tierkv.core.effects import Flow, Wait
from tierkv.core.ids import I64, U64, Tier
from tierkv.core.matching import Chain, Matcher
from tierkv.core.placement import Placement
from tierkv.core.records import Kind, Records, blank, join
from tierkv.core.sequences import Sequences, TableView
from tierkv.core.slot_tables import BlockEntries
from tierkv.core.state import Sequence
from tierkv.errors import InvalidArgument


class Sealer:
    """The ``seal`` verb.

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
            rest = chain.part(skip, len(chain))
            if not len(rest):
                return self._sequences.view(sequence)
            ids, version = self._state.blocks.id[rows], self._state.version
            twins = yield from self._twins(sequence, ids, sealed, rest)
            if self._state.version == version or (
                self._sequences.steady(sequence, ids)
                and self._sequences.sealed_count(rows) == sealed
            ):
                break
        twins = self._takable(sequence, sealed, twins)
        self._take_twins(sequence, sealed, twins, rest, sum_hi[skip:], sum_lo[skip:])
        done = len(twins)
        self._seal_own(
            sequence,
            sealed + done,
            rest.part(done, len(rest)),
            sum_hi[skip + done :],
            sum_lo[skip + done :],
        )
        return self._sequences.view(sequence)

    def _check_resealed(self, sequence: Sequence, first: int, chain: Chain) -> None:
        rows = sequence.rows[first : first + len(chain)]
        blocks = self._state.blocks
        if not (
            np.array_equal(blocks.hash_hi[rows], chain.hi)
            and np.array_equal(blocks.hash_lo[rows], chain.lo)
        ):
            raise InvalidArgument("seal: a block of the sequence is sealed under another hash")

    def _twins(self, sequence: Sequence, ids: U64, at: int, chain: Chain) -> Flow[I64]:
        """Rows of cached blocks that are the same as the leading blocks of ``chain``, proven.

        No rows if the sequence does not hold the blocks ``ids`` any more.
        """
        verified = False
        while self._sequences.unchanged(sequence, ids):
            parent = self._sequences.parent_id(sequence, at)
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
            if signal is None:
                return (yield from self._matcher.prove_on_disk(rows, chain))
            yield Wait(signal)
        return np.zeros(0, np.int64)

    def _takable(self, sequence: Sequence, at: int, twins: I64) -> I64:
        """The twins, or none if other sequences hold open blocks of this one.

        Who shares a block shares all blocks before it, so no one may swap one of those alone.
        """
        if not len(twins):
            return twins
        shared = self._state.blocks.refs[sequence.rows[at:]] > 1
        return twins[:0] if some(shared) else twins

    def _take_twins(
        self, sequence: Sequence, at: int, twins: I64, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> None:
        """Put cached twins in place of the sequence's own blocks, whose slots become free.

        A twin that is in the device tier is used as it is. One that is only further down gets
        the worker's fresh payload as its device copy instead of being read back.
        """
        if not len(twins):
            return
        blocks = self._state.blocks
        own = sequence.rows[at : at + len(twins)]
        slots = blocks.slot[Tier.DEVICE][own].astype(np.int64)
        swaps = blank(len(twins), Kind.SEQ_SWAP)
        swaps["id"] = sequence.id
        swaps["loc"] = np.arange(at, at + len(twins))
        swaps["key"] = twins
        records = [swaps]
        cold = np.flatnonzero(~blocks.has_copy(twins, Tier.DEVICE))
        chosen = twins[cold]
        if len(cold):
            placed = blank(len(cold), Kind.PLACE)
            placed["key"] = chosen
            placed["id"] = blocks.id[chosen]
            placed["tier"] = Tier.DEVICE
            placed["loc"] = slots[cold]
            placed["extra_hi"], placed["extra_lo"] = sum_hi[cold], sum_lo[cold]
            # Lower copies hold the payload of old: most often the same, for the same tokens.
            differs = (sum_hi[cold] != blocks.sum_hi[chosen]) | (
                sum_lo[cold] != blocks.sum_lo[chosen]
            )
            stale = chosen[differs]
            part = Chain(chain.hi[cold], chain.lo[cold], chain.tokens[cold], chain.extras[cold])
            parents = blocks.parent[chosen]
            # Dying here leaves the twins' entries in slots that the log knows as the sequence's
            # own open blocks; recovery expects that.
            ids = blocks.id[chosen]
            self._fill(sequence, slots[cold], ids, parents, part, sum_hi[cold], sum_lo[cold])
            records += [placed, *self._forget_lower(stale)]
        self._placement.commit(join(records))
        self._placement.touch(twins[::-1])
        self._placement.counters.deduplicated_blocks += len(twins)
        if len(cold):
            self._placement.doubt.clear(chosen)
            self.newly_sealed.append((chosen, blocks.id[chosen].copy()))

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

    def _seal_own(
        self, sequence: Sequence, at: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> None:
        if not len(chain):
            return
        state, blocks = self._state, self._state.blocks
        rows = sequence.rows[at : at + len(chain)]
        parent = self._sequences.parent_id(sequence, at)
        slots = blocks.slot[Tier.DEVICE][rows].astype(np.int64)
        sealed = None
        if not some(state.index.get(chain.hi, chain.lo, blocks.hash_hi, blocks.hash_lo) >= 0):
            shortcuts = state.structures.shortcuts
            sealed = shortcuts.seal(state, rows, parent, chain, sum_hi, sum_lo)
        if sealed is not None:
            ids = sealed.ids
            self._fill(sequence, slots, ids, sealed.parents, chain, sum_hi, sum_lo)
            self._placement.commit(sealed.records, applied=True)
        else:
            ids = blocks.id[rows].copy()
            parents = np.empty(len(ids), np.uint64)
            parents[0], parents[1:] = parent, ids[:-1]
            records = blank(len(rows), Kind.SEAL)
            records["key"] = rows
            records["id"] = ids
            records["hash_hi"], records["hash_lo"] = chain.hi, chain.lo
            records["loc"] = parents
            records["gen"] = chain.extras
            records["extra_hi"], records["extra_lo"] = sum_hi, sum_lo
            records["tier"] = 1
            self._fill(sequence, slots, ids, parents, chain, sum_hi, sum_lo)
            self._placement.commit(records)
        self.newly_sealed.append((rows, ids))

    def _fill(
        self,
        sequence: Sequence,
        slots: I64,
        ids: U64,
        parents: U64,
        chain: Chain,
        sum_hi: U64,
        sum_lo: U64,
    ) -> None:
        """Write slot entries. They must be there before the log says the slot holds the block."""
        entries = BlockEntries(
            self._state.namespaces[sequence.namespace].digest,
            ids,
            parents,
            chain.hi,
            chain.lo,
            sum_hi,
            sum_lo,
            chain.extras,
            chain.tokens,
        )
        self._placement.tables.fill(
            Tier.DEVICE, self._sequences.pool(sequence.namespace), slots, entries
        )
