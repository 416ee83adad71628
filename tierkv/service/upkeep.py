"""What operators change about blocks: pin them, delete them, warm them up."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from tierkv.core.deleting import PART_BLOCKS, Deleter
from tierkv.core.effects import Flow
from tierkv.core.ids import I64, RAM_TIERS, U64, Tier
from tierkv.core.pins import PINNED_BLOCKS_MAX, Chained, Pins, pinned_mask, pins_of
from tierkv.core.state import Sequence
from tierkv.errors import InvalidArgument, LimitExceeded, NotFound, TierFailed
from tierkv.rpc import messages as m
from tierkv.service.assembly import Parts
from tierkv.service.deleted import Deletion
from tierkv.service.selection import Selected, Selection

log = logging.getLogger(__name__)

CHAINS_PER_TURN = 64
"""Pinned with one turn of the event loop."""

COUNTED_PER_TURN = 1 << 16
"""Blocks of a plan to delete."""

LINKS_MAX = 4 * PINNED_BLOCKS_MAX
"""Of all chains that one request pins, each with all its blocks, however many have them too."""


class Upkeep:
    """Carries these verbs out.

    Pins and deletions one after the other, whoever asks: each decides by what it has counted, or
    read from a file, before it waits.
    """

    def __init__(self, parts: Parts, selection: Selection) -> None:
        self._engine = parts.engine
        self._planner = parts.planner
        self._state = parts.planner.state
        self._checkpointer = parts.checkpointer
        self._file = parts.deleted
        self._selection = selection
        self._pins = Pins(parts.planner)
        self._deleter = Deleter(parts.planner.placement)
        self._turn = asyncio.Lock()

    # --- pin --------------------------------------------------------------------------------------

    async def pin(self, message: m.Pin) -> m.Pinned:
        """See messages.Pin. Raises NotFound, InvalidArgument, LimitExceeded."""
        _require_some(message.selector, "pin")
        async with self._turn:
            if message.undo:
                unpinned = self._pins.unpin(self._selected_pins(message.selector))
                return m.Pinned(unpinned.pins, unpinned.blocks, unpinned.fresh)
            return await self._pin(message)

    async def _pin(self, message: m.Pin) -> m.Pinned:
        selected = await self._selection.of(message.selector, "before", fresh=True)
        chains = await asyncio.to_thread(_chains, selected)
        self._pins.require_room(chains)
        pins = change = blocks = 0
        for start in range(0, max(len(chains), 1), CHAINS_PER_TURN):
            pinned = self._pins.pin(chains[start : start + CHAINS_PER_TURN])
            pins, change, blocks = pins + pinned.pins, change + pinned.fresh, pinned.blocks
            await asyncio.sleep(0)
        log.info("pinned", extra={"pins": pins, "blocks": change})
        return m.Pinned(pins, blocks, change)

    def _selected_pins(self, selector: m.Selector) -> list[Sequence]:
        """Pins of the namespaces, and of chains that end in a block of such a name."""
        namespaces = self._selection.namespaces(selector)
        pins = [pin for pin in pins_of(self._state) if pin.namespace in namespaces]
        digits = selector.hash.lower()
        return [pin for pin in pins if self._name_of(pin).startswith(digits)]

    def _name_of(self, pin: Sequence) -> str:
        """The chain hash of the last block that a pin holds."""
        return self._state.blocks.names(pin.rows[-1:]).tobytes().hex()

    # --- delete -----------------------------------------------------------------------------------

    async def delete(self, message: m.Delete) -> m.Deleted:
        """See messages.Delete.

        Looks again until nothing is left: blocks that come meanwhile behind such as are to go
        would stay behind without them, and found by nobody.

        Crash: what was deleted is written down first, for an index that is made anew (see
        ``deleted``); then the log says of each block that it is gone, children before parents; the
        answer waits for a checkpoint that has them no more. Dying before that, the rest is as it
        was, and may be deleted again.

        Raises NotFound, InvalidArgument, CorruptionError, TierFailed.
        """
        _require_some(message.selector, "delete")
        async with self._turn:
            if message.selector.tenant:
                await self._selection.require_tenants_known()
            selected = await self._selection.of(message.selector, "after", fresh=True)
            plan = await self._plan(selected)
            return await self._delete(message, selected, plan) if message.really else plan

    async def _delete(self, message: m.Delete, selected: Selected, plan: m.Deleted) -> m.Deleted:
        if plan.pinned:
            raise InvalidArgument(
                f"{plan.pinned} of {plan.blocks} blocks are pinned: unpin them first "
                "(`tierkv ls pins`)"
            )
        before = self._state.next_block
        await self._write_down(self._deletions(message.selector, selected, before))
        blocks = stay = 0
        gone = [selected.ids]
        while len(selected.rows):
            rows, ids = selected.rows[::-1], selected.ids[::-1]
            for start in range(0, len(rows), PART_BLOCKS):
                part = slice(start, start + PART_BLOCKS)
                deleted = await self._engine.run(self._deleter.delete(rows[part], ids[part]))
                blocks, stay = blocks + deleted.blocks, stay + deleted.stay
                await asyncio.sleep(0)
            selected = await self._selection.left(message.selector, np.concatenate(gone), before)
            gone.append(selected.ids)
        for pool in range(len(self._state.pools)):
            self._planner.placement.leave_left(pool)
        try:
            await self._checkpointer.run()
        except OSError as error:
            raise TierFailed(f"delete: the checkpoint failed: {error}") from error
        log.info("deleted", extra={"blocks": blocks, "in_use": stay})
        return m.Deleted(blocks, plan.bytes, stay, 0, done=True)

    async def _plan(self, selected: Selected) -> m.Deleted:
        """What there is to be deleted, counted a part with each turn of the event loop."""
        state, blocks = self._state, self._state.blocks
        plan = m.Deleted(0, {tier.label: 0 for tier in Tier}, 0, 0, done=False)
        is_pinned = pinned_mask(state)  # nobody pins or unpins meanwhile
        for start in range(0, len(selected.rows), COUNTED_PER_TURN):
            part = slice(start, start + COUNTED_PER_TURN)
            rows = selected.rows[part]
            rows = rows[blocks.id[rows] == selected.ids[part]]
            pinned = is_pinned[rows]
            plan.blocks += len(rows)
            for tier in Tier:
                here = rows[blocks.has_copy(rows, tier)]
                plan.bytes[tier.label] += int(state.slot_bytes_of(tier, here).sum())
            plan.in_use += int(np.count_nonzero(blocks.refs[rows] > pinned))
            plan.pinned += int(np.count_nonzero(pinned))
            await asyncio.sleep(0)
        return plan

    def _deletions(self, selector: m.Selector, selected: Selected, before: int) -> list[Deletion]:
        """What is to be written down: about the block that was named, or whole namespaces.

        Raises NotFound if that block has gone, as then nobody knows its name any more.
        """
        state, blocks = self._state, self._state.blocks
        if selected.place < 0:
            namespaces = self._selection.namespaces(selector)
            digests = [state.namespaces[one].digest for one in namespaces]
            return [Deletion(digest, b"", before) for digest in digests]
        row = int(selected.lineage.rows[selected.place])
        if blocks.id[row] != selected.lineage.ids[selected.place]:
            raise NotFound(f"the block {selector.hash} has just gone")
        digest = state.namespaces[int(blocks.namespace[row])].digest
        return [Deletion(digest, blocks.names(np.array([row])).tobytes(), before)]

    async def _write_down(self, deletions: list[Deletion]) -> None:
        try:
            await asyncio.to_thread(self._file.add, deletions)
        except OSError as error:
            raise TierFailed(f"delete: cannot write {self._file.path}: {error}") from error

    # --- warm -------------------------------------------------------------------------------------

    async def warm(self, message: m.Warm) -> m.Warmed:
        """See messages.Warm. Raises NotFound, InvalidArgument, TierFailed."""
        selected = await self._selection.of(message.selector, "both", fresh=True)
        rows = selected.rows[selected.alive(self._state)]
        blocks = self._state.blocks
        cold = blocks.best_tier(rows) == Tier.DISK
        came = await self._engine.run(self._lift(rows[cold], blocks.id[rows[cold]]))
        return m.Warmed(came, int(np.count_nonzero(~cold)), int(np.count_nonzero(cold)) - came)

    def _lift(self, rows: I64, ids: U64) -> Flow[int]:
        """Give blocks that are only on disk a copy in the fastest tier that has room."""
        placement, blocks = self._planner.placement, self._state.blocks
        came = 0
        for target in RAM_TIERS:
            if placement.enabled(target):
                left = (blocks.id[rows] == ids) & (blocks.best_tier(rows) == Tier.DISK)
                came += yield from placement.lift(Tier.DISK, target, rows[left], ids[left])
        return came


def _require_some(selector: m.Selector, verb: str) -> None:
    """Raise InvalidArgument for a selector that is about everything."""
    if selector.namespace < 0 and not selector.tenant and not selector.hash:
        raise InvalidArgument(f"{verb}: say which blocks: by namespace, tenant or hash")


def _chains(selected: Selected) -> list[Chained]:
    """The chain that was named, or all of those selected. Raises LimitExceeded."""
    lineage = selected.lineage
    ends = np.array([selected.place]) if selected.place >= 0 else selected.ends()
    links = int((lineage.depth[ends] + 1).sum())
    if links > LINKS_MAX:
        raise LimitExceeded(
            f"{len(ends)} chains have {links} links, many of them the same; one request may pin "
            f"{LINKS_MAX}: pin some of the chains by hash (`tierkv ls chains`)",
            limit=LINKS_MAX,
            asked=links,
        )
    chains = [lineage.chain(end) for end in ends.tolist()]
    return [(lineage.rows[chain], lineage.ids[chain]) for chain in chains]
