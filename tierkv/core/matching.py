"""Which cached blocks are the ones a worker asks for: found by hash, then proven.

xxh3 is fast, not collision-resistant, so a chain hash only names candidates. A block counts as
found when its parent is the block before it (by id, which is never reused), and its tokens and
extra keys are those of the request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import every, indices, leading, some
from tierkv.core.effects import Flow, Headers, ReadHeaders
from tierkv.core.ids import I64, NO_BLOCK, RAM_TIERS, U32, U64, Bool, Tier
from tierkv.core.placement import Placement

TierCounts = tuple[int, int, int]
"""Blocks by tier: device, host, disk."""


@dataclass(frozen=True)
class Chain:
    """Blocks of a request as they came: names, tokens, digests of extra keys.

    ``hi``, ``lo`` u64 [n], ``tokens`` u32 [n, block_tokens], ``extras`` u64 [n].
    """

    hi: U64
    lo: U64
    tokens: U32
    extras: U64

    def __len__(self) -> int:
        return len(self.hi)

    def part(self, start: int, stop: int) -> Chain:
        """Blocks start .. stop - 1."""
        return self.pick(slice(start, stop))

    def pick(self, which: slice | I64) -> Chain:
        """Some of the blocks."""
        return Chain(self.hi[which], self.lo[which], self.tokens[which], self.extras[which])


class Matcher:
    """Finds and proves blocks; changes nothing but counters."""

    def __init__(self, placement: Placement) -> None:
        self._state = placement.state
        self._placement = placement

    def match(self, namespace: int, hi: U64, lo: U64, parent: int = NO_BLOCK) -> I64:
        """Rows of the longest chain under these hashes whose links are proven, shape [<= n].

        ``parent``: id of the block before the first one.
        """
        state = self._state
        rows, broken = state.index.get_chain(hi, lo, state.blocks, namespace, parent)
        if broken:
            self._placement.counters.mismatched_blocks += 1
        return rows

    def proven(self, rows: I64, chain: Chain) -> int:
        """How many leading rows do not contradict the chain's tokens and extra keys.

        Blocks that are only on disk cannot be judged yet and pass; they are judged again when
        they have come up.
        """
        if not len(rows):
            return 0
        blocks = self._state.blocks
        good = np.ones(len(rows), np.bool_)
        left = np.arange(len(rows))
        for tier in RAM_TIERS:
            here = blocks.has_copy(rows[left], tier)
            if some(here):
                good[left[here]] = self._same(tier, rows, chain, left[here])
            if every(here):
                break
            left = left[~here]
        count = leading(good)
        if count < len(rows):
            self._placement.counters.mismatched_blocks += 1
        return count

    def _same(self, tier: Tier, rows: I64, chain: Chain, at: I64) -> Bool:
        """Which rows of one chain (at these places) have its tokens and extra keys, shape [n].

        By their entries in a RAM tier.
        """
        pool = int(self._state.pool_of(rows[:1])[0])
        slots = self._state.blocks.slot[tier][rows[at]]
        tables = self._placement.tables
        if len(at) == len(rows):  # most often, and then nothing need be copied
            whole = slice(len(rows))
            return tables.same(tier, pool, slots, chain.tokens[whole], chain.extras[whole])
        return tables.same(tier, pool, slots, chain.tokens[at], chain.extras[at])

    def prove_on_disk(self, rows: I64, chain: Chain) -> Flow[I64]:
        """Cut ``rows`` where a block that is only on disk has other tokens than ``chain``."""
        blocks = self._state.blocks
        cold = indices(blocks.best_tier(rows) == Tier.DISK)
        if not len(cold):
            return rows
        ids = blocks.id[rows].copy()
        pool = int(self._state.pool_of(rows[:1])[0])
        slots = blocks.slot[Tier.DISK][rows[cold]].astype(np.int64)
        with self._placement.holds[Tier.DISK].taken(rows[cold]):
            headers: Headers = yield ReadHeaders(pool, ids[cold], slots)
        same = headers.ok & (headers.tokens == chain.tokens[cold]).all(1)
        same &= headers.extras == chain.extras[cold]
        good = np.ones(len(rows), np.bool_)
        good[cold] = same
        good &= (blocks.id[rows] == ids) & blocks.has_any_copy(rows)
        return rows[: leading(good)]

    def count_tiers(self, rows: I64) -> TierCounts:
        """How many of the rows have their best copy in which tier."""
        device, host, disk = self._state.blocks.count_tiers(rows)
        return device, host, disk
