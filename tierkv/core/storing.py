"""Storing: blocks out of a worker's stock get their names, and stay cached without being held.

A stock is a sequence of open blocks and nothing else: room that a worker has before it needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import some
from tierkv.core.effects import Flow
from tierkv.core.ids import I64, NO_BLOCK, U64
from tierkv.core.matching import Chain, Matcher
from tierkv.core.placement import Placement
from tierkv.core.records import Kind, Records, blank, join, push
from tierkv.core.sealing import Filled, Sealer
from tierkv.core.sequences import Sequences
from tierkv.core.state import Sequence
from tierkv.errors import InvalidArgument, UnknownSequence


@dataclass(frozen=True)
class ToStore:
    """The first blocks of the sequence ``stock`` are those of ``chain`` from ``first`` on.

    ``sum_hi``, ``sum_lo``: halves of the checksums of these, u64 [n]. What is left of the stock
    becomes the sequence ``new_stock`` of ``room`` blocks, or fewer.
    """

    stock: int
    new_stock: int
    chain: Chain
    first: int
    sum_hi: U64
    sum_lo: U64
    room: int

    @property
    def filled(self) -> Filled:
        """The blocks from ``first`` on."""
        return Filled(self.chain.part(self.first, len(self.chain)), self.sum_hi, self.sum_lo)


@dataclass(frozen=True)
class Stored:
    """``rows`` and ``ids`` [n]: the chain from its first block on, as far as it is cached now."""

    rows: I64
    ids: U64


class Storer:
    """The ``store`` verb."""

    def __init__(
        self, placement: Placement, sequences: Sequences, matcher: Matcher, sealer: Sealer
    ) -> None:
        self._state = placement.state
        self._placement = placement
        self._sequences = sequences
        self._matcher = matcher
        self._sealer = sealer

    def store(self, lease: int, namespace: int, wanted: ToStore) -> Flow[Stored]:
        """Blocks of the stock get their names, and nobody holds them.

        Where a block is cached already that one is used. If those before ``first`` are not cached
        (any more) nothing is changed. Raises InvalidArgument, UnknownSequence.
        """
        chain = wanted.chain
        new = self._sequences.identity(lease, wanted.new_stock)
        while True:
            if new in self._state.sequences:
                return self._stored_already(lease, namespace, wanted)
            stock = self._sequences.active(lease, wanted.stock)
            if stock.namespace != namespace:
                raise InvalidArgument(f"store: stock {wanted.stock} is of another namespace")
            ids, version = self._state.blocks.id[stock.rows], self._state.version
            found = yield from self._sealer.twins(stock, ids, chain, NO_BLOCK)
            if self._state.version == version or (
                self._sequences.steady(stock, ids) and new not in self._state.sequences
            ):
                break
        if len(found) < wanted.first:
            return self._as_stored(found)
        self._check_own(stock, len(wanted.sum_hi))
        return self._as_stored(self._take_over(stock, new, found, wanted))

    def _stored_already(self, lease: int, namespace: int, wanted: ToStore) -> Stored:
        """The daemon or the connection died on the way to the answer, or this is a mistake."""
        try:
            self._sequences.find_any(lease, wanted.stock)
        except UnknownSequence:
            self._sequences.find(lease, wanted.new_stock)
            chain = wanted.chain
            return self._as_stored(self._matcher.match(namespace, chain.hi, chain.lo))
        raise InvalidArgument(f"store: there is a sequence {wanted.new_stock} already")

    def _check_own(self, stock: Sequence, count: int) -> None:
        """Raise InvalidArgument unless the first ``count`` blocks are open and nobody else's."""
        own, blocks = stock.rows[:count], self._state.blocks
        if len(own) < count:
            raise InvalidArgument(f"store: {count} blocks out of a stock of {len(own)}")
        if some(blocks.is_sealed(own) | (blocks.refs[own] > 1)):
            raise InvalidArgument("store: blocks of the stock are sealed, or shared by a fork")

    def _take_over(self, stock: Sequence, new: int, found: I64, wanted: ToStore) -> I64:
        """Commit it all at once; returns the rows of the whole chain. Mutates.

        ``found``: rows of its leading blocks that are cached, at least those before ``first``.
        """
        sealer, filled = self._sealer, wanted.filled
        own, twins = stock.rows, found[wanted.first :]
        same, fresh, left = own[: len(twins)], own[len(twins) : len(filled)], own[len(filled) :]
        placed: list[Records] = []
        cold = sealer.cold(twins)
        if len(same):
            placed = sealer.place(stock.namespace, twins[cold], same[cold], filled.pick(cold))
            left = np.concatenate([np.delete(same, cold), left])
        opened, closed = blank(1, Kind.SEQ_OPEN), blank(1, Kind.SEQ_CLOSE)
        opened["id"], opened["key"] = new, stock.namespace
        closed["id"] = stock.id
        kept = push(new, left[: wanted.room].astype(np.uint32))
        records, applied = join([opened, kept, closed, *placed]), False
        if len(fresh):
            parent = int(self._state.blocks.id[found[-1]]) if len(found) else NO_BLOCK
            rest = filled.part(len(same), len(filled))
            named, applied = sealer.name(stock.namespace, fresh, parent, rest)
            if applied:
                self._state.apply(records)
            records = join([named, records])
        self._placement.commit(records, applied=applied)
        chain = np.concatenate([found, fresh])
        self._placement.touch(chain[::-1])
        sealer.took(twins, cold)
        if len(fresh):
            sealer.sealed(fresh)
        return chain

    def _as_stored(self, rows: I64) -> Stored:
        return Stored(rows, self._state.blocks.id[rows])
