"""The planner's shortcuts, in the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.core.ids import I64, U64, Tier
from tierkv.core.policy import EvictionPolicy
from tierkv.core.records import RECORD, ROWS_PER_PUSH, Records, join
from tierkv.core.shortcuts import Evicted, Sealed
from tierkv.errors import require
from tierkv.native.library import Library
from tierkv.native.memory import address
from tierkv.native.structures import NOT_SO, NativeBlocks, NativeLru, NativeSlotSet
from tierkv.native.table import NativeTable

if TYPE_CHECKING:
    from tierkv.core.matching import Chain
    from tierkv.core.state import State


class NativeShortcuts:
    """See Shortcuts. For states of the native structures, with blocks of one geometry."""

    def __init__(self, library: Library) -> None:
        self._library = library.quick

    def evict(
        self, state: State, order: EvictionPolicy, tier: Tier, count: int, below: list[Tier]
    ) -> Evicted | None:
        """See Shortcuts."""
        blocks, rows, index = state.blocks, state.row_set, state.index
        slots = state.slots.get((tier, 0))
        if (
            len(state.pools) != 1
            or not isinstance(blocks, NativeBlocks)
            or not isinstance(rows, NativeSlotSet)
            or not isinstance(slots, NativeSlotSet)
            or not isinstance(order, NativeLru)
            or not isinstance(index, NativeTable)
            or index.grows
        ):
            return None
        # A copy goes to the next tier that takes one, unless it is there.
        wanted = 1 << below[0] if below else 0
        safe = sum(1 << lower for lower in Tier if lower > tier)
        records = np.empty(count, RECORD)
        gone_to = np.zeros(len(Tier) + 1, np.int64)
        failed = self._library.tierkv_evict(
            *(blocks.lent(), rows.lent(count), slots.lent(count), order.lent(), index.lent()),
            *(tier, wanted, safe, count, address(records), address(gone_to)),
        )
        if failed == NOT_SO:
            return None
        # Else part of it may be done: nobody can go on from there.
        require(not failed, "an indexed block is in the hash table")
        for one in (rows, slots, order, index):
            one.returned()
        state.slots_freed += count
        state.changed(records["key"].astype(np.int64))
        return Evicted(records, gone_to.tolist())

    def extend(
        self,
        state: State,
        sequence: int,
        namespace: int,
        rows: I64,
        slots: I64,
        before: list[Records],
    ) -> Records | None:
        """See Shortcuts."""
        blocks, row_set = state.blocks, state.row_set
        pool = state.namespaces[namespace].pool
        slot_set = state.slots[Tier.DEVICE, pool]
        if (
            not isinstance(blocks, NativeBlocks)
            or not isinstance(row_set, NativeSlotSet)
            or not isinstance(slot_set, NativeSlotSet)
        ):
            return None
        count = len(rows)
        for earlier in before:
            state.apply(earlier)
        blocks.ensure(int(rows.max(initial=-1)) + 1)
        records = np.empty(count + -(-count // ROWS_PER_PUSH), RECORD)
        failed = self._library.tierkv_extend(
            *(blocks.lent(), row_set.lent(), slot_set.lent(), address(rows), address(slots), count),
            *(Tier.DEVICE, state.next_block, namespace, sequence, address(records)),
        )
        require(not failed, "a sequence gets rows and slots that are held for it")
        row_set.returned()
        slot_set.returned()
        state.next_block += count
        state.sequences[sequence].push(rows.astype(np.uint32))
        state.touch_sequence(sequence)
        state.changed(rows)
        return join([*before, records]) if before else records

    def seal(
        self, state: State, rows: I64, parent: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> Sealed | None:
        """See Shortcuts."""
        blocks, index, count = state.blocks, state.index, len(rows)
        if not isinstance(blocks, NativeBlocks) or (count > 1 and index.repeats(chain.lo)):
            return None
        records = np.empty(count, RECORD)
        ids, parents = np.empty(count, np.uint64), np.empty(count, np.uint64)
        columns = [
            np.ascontiguousarray(one, np.uint64)
            for one in (chain.hi, chain.lo, chain.extras, sum_hi, sum_lo)
        ]
        failed = self._library.tierkv_seal(
            *(blocks.lent(), address(rows), count, parent, *map(address, columns)),
            *(address(records), address(ids), address(parents)),
        )
        if failed:
            return None
        index.put(rows, blocks.hash_hi, blocks.hash_lo)
        state.changed(rows)
        return Sealed(records, ids, parents)
