"""The RAM tiers' slot tables as the core sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tierkv.core.ids import I64, U32, U64, Bool, Tier
from tierkv.core.slot_tables import BlockEntries
from tierkv.tiers.arena import Arena
from tierkv.tiers.entry import OPEN, same_content, write_entries


class ArenaTables:
    """``core.slot_tables.SlotTables`` over the arenas of the RAM tiers.

    ``before_change`` makes the log say that slots were freed before their entries change.

    Crash: no slot's entry names another block than the log says, unless the log says that the
    slot is free.
    """

    def __init__(
        self, arenas: Mapping[Tier, Arena], before_change: Callable[[], None] = lambda: None
    ) -> None:
        self._arenas = arenas
        self._before_change = before_change

    def same(self, tier: Tier, pool: int, slots: U32, tokens: U32, extras: U64) -> Bool:
        """See SlotTables."""
        return same_content(self._arenas[tier].table(pool), slots, tokens, extras)

    def fill(self, tier: Tier, pool: int, slots: I64, entries: BlockEntries) -> None:
        """See SlotTables."""
        self._before_change()
        arena, numbers = self._arenas[tier], slots.astype(np.uint32)
        write_entries(
            arena.table(pool),
            numbers,
            ids=entries.ids,
            parents=entries.parents,
            hash_hi=entries.hash_hi,
            hash_lo=entries.hash_lo,
            tokens=entries.tokens,
            length=arena.block_bytes(pool),
            digest=entries.digest,
            extra=entries.extras,
            sum_hi=entries.sum_hi,
            sum_lo=entries.sum_lo,
        )
        arena.enter(pool, numbers, entries.hash_lo)

    def enter(self, tier: Tier, pool: int, slots: I64, hash_lo: U64) -> None:
        """See SlotTables."""
        self._arenas[tier].enter(pool, slots, hash_lo)

    def open(self, tier: Tier, pool: int, slots: I64, ids: U64) -> None:
        """See SlotTables."""
        self._before_change()
        arena, numbers = self._arenas[tier], slots.astype(np.uint32)
        arena.leave(pool, numbers)
        length = arena.block_bytes(pool)
        write_entries(arena.table(pool), numbers, ids=ids, length=length, digest=OPEN)

    def leave(self, tier: Tier, pool: int, slots: I64) -> None:
        """See SlotTables."""
        self._arenas[tier].leave(pool, slots.astype(np.uint32))

    def punch(self, tier: Tier, pool: int, slots: I64) -> None:
        """See SlotTables."""
        self._before_change()
        self._arenas[tier].punch(pool, slots.astype(np.uint32))
