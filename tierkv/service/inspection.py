"""What operators see of blocks, chains, sequences and leases: a page at a time.

Items are documents with stable keys: they may be added, never renamed.
"""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from typing import Any, NamedTuple

import numpy as np

from tierkv.core.effects import Flow, Headers, ReadHeaders
from tierkv.core.ids import I64, NO_SLOT, RAM_TIERS, U64, Tier, lease_of
from tierkv.core.lineage import Lineage
from tierkv.core.pins import is_pins, pinned_mask, pins_of
from tierkv.core.state import Sequence
from tierkv.errors import InvalidArgument, NotFound
from tierkv.rpc import messages as m
from tierkv.service.assembly import Parts
from tierkv.service.selection import Selected, Selection

PAGE_MAX = 1000
ROWS_PER_PAGE = 1 << 16
"""Looked at for one page of blocks, whatever is found."""

SEQUENCES_PER_TURN = 256
"""Whose tables are searched with one turn of the event loop."""

SHOWN_MAX = 20
"""Of children and holders when one block is inspected."""

Document = dict[str, Any]


class _Contents(NamedTuple):
    """``tokens`` as bytes, empty where nothing could be read; ``extras`` u64 [n]."""

    tokens: list[bytes]
    extras: U64


class Inspection:
    """Carries out the verbs that only look."""

    def __init__(self, parts: Parts, selection: Selection) -> None:
        self._engine = parts.engine
        self._state = parts.planner.state
        self._placement = parts.planner.placement
        self._namespaces = parts.namespaces
        self._arenas = parts.arenas
        self._selection = selection
        self._workers = parts.leases.names
        self._lists = {
            "blocks": self._blocks,
            "chains": self._chains,
            "sequences": self._sequences,
            "leases": self._leases,
            "pins": self._pins,
        }

    # --- lists ------------------------------------------------------------------------------------

    async def listed(self, message: m.List) -> m.Listed:
        """See messages.List. Raises NotFound, InvalidArgument."""
        make = self._lists.get(message.kind)
        if make is None or not 1 <= message.limit <= PAGE_MAX or message.after < 0:
            raise InvalidArgument(
                f"list: {message.kind!r} from {message.after}, {message.limit} of them; there are "
                f"{', '.join(self._lists)}, and pages of 1 to {PAGE_MAX}"
            )
        return await make(message)

    async def _blocks(self, message: m.List) -> m.Listed:
        """Pages go by row, so that each looks at few of them."""
        blocks, limit = self._state.blocks, message.limit
        if message.selector.hash:
            selected = await self._selection.of(message.selector, "after")
            rows = np.sort(selected.rows[selected.alive(self._state)])
            rows = rows[rows >= message.after]
            more = len(rows) > limit
        else:
            start = min(message.after, len(blocks))
            stop = min(start + ROWS_PER_PAGE, len(blocks))
            rows = np.arange(start, stop)
            here = np.isin(blocks.namespace[rows], self._selection.namespaces(message.selector))
            rows = rows[(blocks.id[rows] != 0) & here]
            more = len(rows) > limit or stop < len(blocks)
        after = int(rows[limit]) if len(rows) > limit else message.after + ROWS_PER_PAGE
        return m.Listed(self._block_items(rows[:limit]), after if more else 0)

    def _block_items(self, rows: I64) -> list[Document]:
        blocks, pinned = self._state.blocks, pinned_mask(self._state)[rows].tolist()
        return [
            self._block_item(row, blocks, held)
            for row, held in zip(rows.tolist(), pinned, strict=True)
        ]

    def _block_item(self, row: int, blocks: Any, pinned: bool) -> Document:
        namespace, one = int(blocks.namespace[row]), np.array([row])
        sealed, named = bool(blocks.is_sealed(one)[0]), bool(blocks.is_indexed(one)[0])
        return {
            "hash": self._name(row) if sealed else "",
            "id": int(blocks.id[row]),
            "namespace": namespace,
            "tenant": self._selection.tenant(namespace),
            "state": "cached" if named else "sealed" if sealed else "open",
            "tiers": [tier.label for tier in Tier if blocks.slot[tier][row] != NO_SLOT],
            "bytes": self._block_bytes(namespace),
            "references": int(blocks.refs[row]) - pinned,
            "mapped": int(blocks.active[row]),
            "pinned": pinned,
        }

    async def _chains(self, message: m.List) -> m.Listed:
        """The longest first."""
        selected = await self._selection.of(message.selector, "both")
        ends = await asyncio.to_thread(_longest_first, selected)
        page = ends[message.after : message.after + message.limit]
        pinned = pinned_mask(self._state)
        items = []
        for end in page.tolist():
            places = await asyncio.to_thread(selected.lineage.chain, end)
            chain = selected.lineage.rows[places]
            if self._state.blocks.id[chain[-1]] == selected.lineage.ids[end]:
                items.append(self._chain_item(chain, int(np.count_nonzero(pinned[chain]))))
        after = message.after + message.limit
        return m.Listed(items, after if after < len(ends) else 0, len(ends))

    def _chain_item(self, rows: I64, pinned: int) -> Document:
        blocks, namespace = self._state.blocks, int(self._state.blocks.namespace[rows[-1]])
        return {
            "hash": self._name(int(rows[-1])),
            "first": self._name(int(rows[0])),
            "namespace": namespace,
            "tenant": self._selection.tenant(namespace),
            "blocks": len(rows),
            "tokens": len(rows) * self._block_tokens(namespace),
            "bytes": len(rows) * self._block_bytes(namespace),
            "tiers": {
                tier.label: int(np.count_nonzero(blocks.has_copy(rows, tier))) for tier in Tier
            },
            "references": int(blocks.refs[rows[-1]]),
            "pinned": pinned,
        }

    async def _sequences(self, message: m.List) -> m.Listed:
        """Pages go by id; ``after`` is one more than the last one shown."""
        namespaces = set(self._selection.namespaces(message.selector))
        pins = {pin.id for pin in pins_of(self._state)}
        chosen = (
            one.id
            for one in self._state.sequences.values()
            if one.id >= message.after and one.namespace in namespaces and one.id not in pins
        )
        found = nsmallest(message.limit + 1, chosen)
        items = [self._sequence_item(self._state.sequences[one]) for one in found[: message.limit]]
        return m.Listed(items, found[message.limit] if len(found) > message.limit else 0)

    def _sequence_item(self, sequence: Sequence) -> Document:
        rows = sequence.rows
        size = self._block_bytes(sequence.namespace)
        return {
            "sequence": sequence.id,
            "lease": lease_of(sequence.id),
            "namespace": sequence.namespace,
            "tenant": self._selection.tenant(sequence.namespace),
            "state": "fenced"
            if sequence.fenced
            else "suspended"
            if sequence.suspended
            else "active",
            "blocks": len(rows),
            "sealed": int(np.count_nonzero(self._state.blocks.is_sealed(rows))),
            "bytes": len(rows) * size,
        }

    async def _leases(self, message: m.List) -> m.Listed:
        """Pages go by number. That which holds the pins is none of a worker."""
        numbers = (
            one.id
            for one in self._state.leases.values()
            if one.id >= message.after and not is_pins(one)
        )
        found = nsmallest(message.limit + 1, numbers)
        names = self._workers
        items = [self._lease_item(one, names) for one in found[: message.limit]]
        return m.Listed(items, found[message.limit] if len(found) > message.limit else 0)

    def _lease_item(self, number: int, names: dict[int, str]) -> Document:
        lease, held = self._state.leases[number], self._state.lease_sequences[number]
        return {
            "lease": number,
            "pid": lease.pid,
            "uid": lease.uid,
            "worker": names.get(number, ""),
            "connected": number in names,
            "sequences": len(held),
            "blocks": sum(len(self._state.sequences[one]) for one in held),
        }

    async def _pins(self, message: m.List) -> m.Listed:
        namespaces = self._selection.namespaces(message.selector)
        pins = [pin for pin in pins_of(self._state) if pin.namespace in namespaces]
        page = pins[message.after : message.after + message.limit]
        after = message.after + message.limit
        items = [self._pin_item(pin) for pin in page]
        return m.Listed(items, after if after < len(pins) else 0, len(pins))

    def _pin_item(self, pin: Sequence) -> Document:
        rows, namespace = pin.rows, pin.namespace
        return {
            "hash": self._name(int(rows[-1])) if len(rows) else "",
            "namespace": namespace,
            "tenant": self._selection.tenant(namespace),
            "blocks": len(rows),
            "tokens": len(rows) * self._block_tokens(namespace),
            "bytes": len(rows) * self._block_bytes(namespace),
        }

    # --- one thing --------------------------------------------------------------------------------

    async def inspect(self, message: m.Inspect) -> m.Inspected:
        """See messages.Inspect. Raises NotFound, InvalidArgument."""
        state, number = self._state, message.number
        if message.kind == "block":
            return m.Inspected(await self._block(message.hash))
        if message.kind == "namespace" and number in state.namespaces:
            return m.Inspected(self._namespace(number))
        if message.kind == "sequence" and number in state.sequences:
            item = self._sequence_item(state.sequences[number])
            rows = state.sequences[number].rows[:PAGE_MAX]
            return m.Inspected({**item, "table": self._block_items(rows)})
        if message.kind == "lease" and number in state.leases:
            item = self._lease_item(number, self._workers)
            held = list(state.lease_sequences[number])[:PAGE_MAX]
            items = [self._sequence_item(state.sequences[one]) for one in held]
            return m.Inspected({**item, "held": items})
        if message.kind not in ("namespace", "sequence", "lease"):
            raise InvalidArgument(f"inspect: {message.kind!r} is nothing that can be inspected")
        raise NotFound(f"there is no {message.kind} {number}; see `tierkv ls {message.kind}s`")

    def _namespace(self, number: int) -> Document:
        entry, spec = self._state.namespaces[number], self._namespaces.specs.get(number, b"")
        shape = self._state.pools[entry.pool]
        return {
            "namespace": number,
            "tenant": self._selection.tenant(number),
            "digest": entry.digest.hex(),
            "block_tokens": shape.block_tokens,
            "block_bytes": shape.block_bytes,
            "spec": spec.decode(),
        }

    async def _block(self, digits: str) -> Document:
        if not digits:
            raise InvalidArgument("inspect: give the first digits of a block's hash")
        selected = await self._selection.of(m.Selector(hash=digits), "both")
        lineage, place, blocks = selected.lineage, selected.place, self._state.blocks
        row, identity = int(lineage.rows[place]), lineage.ids[place]
        chain, depth, children = await asyncio.to_thread(_around, lineage, place)
        contents = await self._engine.run(self.contents(np.array([row])))
        if blocks.id[row] != identity:
            raise NotFound(f"the block {digits} has just gone")
        item = self._block_items(np.array([row]))[0]
        return {
            **item,
            "depth": depth,
            "chain": [self._name(one) for one in lineage.rows[chain][-SHOWN_MAX:].tolist()],
            "children": [self._name(one) for one in children[:SHOWN_MAX].tolist()],
            "child_count": len(children),
            "following": int(np.count_nonzero(selected.chosen)) - max(len(chain), 1),
            "checksum": f"{int(blocks.sum_hi[row]):016x}{int(blocks.sum_lo[row]):016x}",
            "holders": await self._holders(row),
            "tokens": np.frombuffer(contents.tokens[0], "<u4").tolist(),
            "extra_keys": f"{int(contents.extras[0]):016x}",
        }

    async def _holders(self, row: int) -> list[Document]:
        names = self._workers
        found: list[Document] = []
        for looked_at, sequence in enumerate(list(self._state.sequences.values())):
            if looked_at % SEQUENCES_PER_TURN == 0:
                await asyncio.sleep(0)
            if len(found) == SHOWN_MAX or not self._state.blocks.refs[row]:
                break
            if sequence.id in self._state.sequences and (sequence.rows == row).any():
                lease = self._state.leases[lease_of(sequence.id)]
                worker = "(pinned)" if is_pins(lease) else names.get(lease.id, "")
                found.append(
                    {
                        "sequence": sequence.id,
                        "lease": lease.id,
                        "pid": lease.pid,
                        "worker": worker,
                        "state": self._sequence_item(sequence)["state"],
                    }
                )
        return found

    # --- contents ---------------------------------------------------------------------------------

    async def page(self, message: m.Contents) -> m.Content:
        """See messages.Contents. Raises NotFound, InvalidArgument, TierFailed."""
        if not 1 <= message.limit <= PAGE_MAX * 4:
            raise InvalidArgument(f"contents: pages have 1 to {PAGE_MAX * 4} blocks")
        selected = await self._selection.of(message.selector, "both")
        places = await asyncio.to_thread(_from, selected, message.after)
        page = places[: message.limit]
        rows, ids = selected.lineage.rows[page], selected.lineage.ids[page]
        parents = selected.lineage.parent[page]
        names = self._state.blocks.names(selected.lineage.rows[parents])
        names[parents < 0] = 0
        contents = await self._engine.run(self.contents(rows))
        good = np.array([bool(one) for one in contents.tokens], np.bool_)
        good &= self._state.blocks.id[rows] == ids
        kept = rows[good]
        more = len(places) > message.limit
        return m.Content(
            namespaces=self._state.blocks.namespace[kept].astype("<i4").tobytes(),
            hashes=self._state.blocks.names(kept).tobytes(),
            parents=names[good].tobytes(),
            tokens=[contents.tokens[at] for at in np.flatnonzero(good).tolist()],
            extras=contents.extras[good].astype("<u8").tobytes(),
            next=int(selected.lineage.ids[places[message.limit]]) if more else 0,
            missing=int(np.count_nonzero(~good)),
        )

    def contents(self, rows: I64) -> Flow[_Contents]:
        """What the entries of sealed blocks say, wherever they lie. Raises TierFailed."""
        state, blocks = self._state, self._state.blocks
        tokens, extras = [b""] * len(rows), np.zeros(len(rows), np.uint64)
        ids, best, pools = blocks.id[rows], blocks.best_tier(rows), state.pool_of(rows)
        for pool in range(len(state.pools)):
            for tier in Tier:
                here = np.flatnonzero((pools == pool) & (best == tier))
                if not len(here):
                    continue
                slots = blocks.slot[tier][rows[here]].astype(np.int64)
                if tier in RAM_TIERS:
                    said = self._said(tier, pool, slots, ids[here])
                else:
                    with self._placement.holds[tier].taken(rows[here]):
                        said = yield ReadHeaders(pool, ids[here], slots)
                extras[here] = said.extras
                for at, found, ok in zip(here.tolist(), said.tokens, said.ok, strict=True):
                    tokens[at] = found.tobytes() if ok else b""
        return _Contents(tokens, extras)

    def _said(self, tier: Tier, pool: int, slots: I64, ids: U64) -> Headers:
        entries = self._arenas[tier].table(pool)[slots]
        return Headers(entries["id"] == ids, entries["tokens"], entries["extra"])

    # --- parts ------------------------------------------------------------------------------------

    def _name(self, row: int) -> str:
        return self._state.blocks.names(np.array([row])).tobytes().hex()

    def _block_tokens(self, namespace: int) -> int:
        return self._state.pools[self._state.namespaces[namespace].pool].block_tokens

    def _block_bytes(self, namespace: int) -> int:
        return self._state.pools[self._state.namespaces[namespace].pool].block_bytes


def _longest_first(selected: Selected) -> I64:
    """The last blocks of the selected chains, those of the longest first."""
    ends = selected.ends()
    return ends[np.argsort(-selected.lineage.depth[ends], kind="stable")]


def _around(lineage: Lineage, place: int) -> tuple[I64, int, I64]:
    """A block's chain (places), how many blocks come before it, and its children (rows)."""
    children = lineage.rows[np.flatnonzero(lineage.parents == lineage.ids[place])]
    return lineage.chain(place), int(lineage.depth[place]), children


def _from(selected: Selected, after: int) -> I64:
    """Places of the selected blocks that somebody can find, from this id on."""
    lineage = selected.lineage
    return np.flatnonzero(selected.chosen & lineage.begins & (lineage.ids >= after))
