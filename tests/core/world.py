"""A whole core on make-believe tiers: payloads lie in dicts, every rule of the real ones holds.

Its state has the native structures; what is replayed has those in numpy, so that each such check
compares the two as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from tierkv.core.counters import Counters
from tierkv.core.deleting import Deleted, Deleter
from tierkv.core.effects import Check, Effect, Flow, Headers, Move, Moved, ReadHeaders
from tierkv.core.ids import Tier
from tierkv.core.inline import run_inline
from tierkv.core.lineage import Lineage
from tierkv.core.matching import Chain
from tierkv.core.placement import Placement
from tierkv.core.planner import Limits, Planner
from tierkv.core.policy import SCAN
from tierkv.core.prefix import chain_hashes
from tierkv.core.records import join
from tierkv.core.replay import replay
from tierkv.core.slot_tables import BlockEntries
from tierkv.core.state import PoolShape, State
from tierkv.core.storing import Stored, ToStore
from tierkv.core.structures import Structures
from tierkv.native.core import structures
from tierkv.native.library import load

SHAPE = PoolShape(block_bytes=64, block_tokens=4)


def checksum(payload: bytes) -> tuple[int, int]:
    digest = xxhash.xxh3_128_digest(payload)
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


@dataclass
class Slot:
    id: int = 0
    tokens: tuple[int, ...] = ()
    extra: int = 0
    sums: tuple[int, int] = (0, 0)
    payload: bytes = b""
    shown: int | None = None
    """The low half of the name by which workers find it here."""


@dataclass
class FakeTiers:
    """All tiers as dicts; also the SlotTables of the RAM tiers."""

    block_tokens: int = SHAPE.block_tokens
    slots: dict[tuple[Tier, int, int], Slot] = field(default_factory=dict)
    moves: int = 0
    punched: int = 0

    def at(self, tier: Tier, pool: int, slot: int) -> Slot:
        return self.slots.setdefault((Tier(tier), pool, int(slot)), Slot())

    def tokens(self, tier: Tier, pool: int, slots: Any) -> Any:
        rows = [self.at(tier, pool, s).tokens or (2**32 - 1,) * self.block_tokens for s in slots]
        return np.array(rows, np.uint32).reshape(len(rows), self.block_tokens)

    def extras(self, tier: Tier, pool: int, slots: Any) -> Any:
        return np.array([self.at(tier, pool, s).extra for s in slots], np.uint64)

    def same(self, tier: Tier, pool: int, slots: Any, tokens: Any, extras: Any) -> Any:
        same = (self.tokens(tier, pool, slots) == tokens).all(1)
        return same & (self.extras(tier, pool, slots) == extras)

    def fill(self, tier: Tier, pool: int, slots: Any, entries: BlockEntries) -> None:
        for n, s in enumerate(slots):
            slot = self.at(tier, pool, s)
            slot.id = int(entries.ids[n])
            slot.tokens = tuple(entries.tokens[n].tolist())
            slot.extra = int(entries.extras[n])
            slot.sums = (int(entries.sum_hi[n]), int(entries.sum_lo[n]))
        self.enter(tier, pool, slots, entries.hash_lo)

    def open(self, tier: Tier, pool: int, slots: Any, ids: Any) -> None:
        for s, name in zip(slots, ids, strict=True):
            slot = self.at(tier, pool, s)
            slot.id, slot.tokens, slot.extra, slot.sums = int(name), (), 0, (0, 0)
            slot.shown = None

    def enter(self, tier: Tier, pool: int, slots: Any, hash_lo: Any) -> None:
        for s, name in zip(slots, hash_lo, strict=True):
            self.at(tier, pool, s).shown = int(name)

    def leave(self, tier: Tier, pool: int, slots: Any) -> None:
        for s in slots:
            self.at(tier, pool, s).shown = None

    def punch(self, tier: Tier, pool: int, slots: Any) -> None:
        for s in slots:
            self.slots.pop((tier, pool, int(s)), None)
            self.punched += 1

    def perform(self, effect: Effect) -> Any:
        if isinstance(effect, Move):
            return self._move(effect)
        if isinstance(effect, ReadHeaders):
            found = [self.at(Tier.DISK, effect.pool, s) for s in effect.slots]
            ok = np.array([f.id == i for f, i in zip(found, effect.ids, strict=True)], bool)
            tokens = self.tokens(Tier.DISK, effect.pool, effect.slots)
            return Headers(ok, tokens, self.extras(Tier.DISK, effect.pool, effect.slots))
        assert isinstance(effect, Check)
        return np.array(
            [
                (slot := self.at(effect.tier, effect.pool, s)).id == i
                and checksum(slot.payload) == slot.sums
                for s, i in zip(effect.slots, effect.ids, strict=True)
            ],
            bool,
        )

    def _move(self, move: Move) -> Moved:
        self.moves += 1
        ok, hi, lo = [], [], []
        for name, source_at, target_at in zip(
            move.ids, move.source_slots, move.target_slots, strict=True
        ):
            source = self.at(move.source, move.pool, source_at)
            target = self.at(move.target, move.pool, target_at)
            sums = source.sums if source.sums != (0, 0) else checksum(source.payload)
            good = source.id == name and checksum(source.payload) == sums
            if good:
                target.id, target.tokens, target.extra = source.id, source.tokens, source.extra
                target.sums, target.payload = sums, source.payload
            ok.append(good)
            hi.append(sums[0])
            lo.append(sums[1])
        return Moved(np.array(ok, bool), np.array(hi, np.uint64), np.array(lo, np.uint64))


class World:
    """State, placement, planner and fake tiers, driven inline; keeps the log of all records."""

    def __init__(
        self,
        device: int,
        host: int,
        disk: int,
        shape: PoolShape = SHAPE,
        tiers: FakeTiers | None = None,
    ) -> None:
        self.budgets = {
            Tier.DEVICE: device * shape.block_bytes,
            Tier.HOST: host * shape.block_bytes,
            Tier.DISK: disk * shape.block_bytes,
        }
        self.log: list[np.ndarray] = []
        self.deleted: set[int] = set()
        self.tiers = tiers or FakeTiers(shape.block_tokens)
        self.state = self._new(structures(load({})))
        self.counters = Counters()
        self._assemble()
        self.lease = self.planner.open_lease(b"t" * 16, 1, 2, 3).id
        self.namespace = self.planner.open_namespace(b"n" * 16, shape)
        self.shape = shape

    def _assemble(self) -> None:
        self.placement = Placement(
            self.state,
            self.tiers,
            {tier: self.state.structures.lru(SCAN) for tier in Tier},
            self.commit,
            self.counters,
        )
        self.planner = Planner(self.state, self.placement, Limits())

    def commit(self, records: np.ndarray, *, applied: bool = False) -> None:
        self.log.append(records.copy())
        self.state.commit(records, applied=applied)

    def run(self, flow: Any) -> Any:
        return run_inline(flow, self.tiers.perform)

    def empty(self) -> State:
        """A state with the same budgets, to replay the log into."""
        return self._new(Structures())

    def _new(self, structures: Structures) -> State:
        return State(self.budgets, lambda _tier, pool: pool.block_bytes, structures)

    def check_shown(self) -> None:
        """Workers find every block that has a name in the device tier, and no other in its slot.

        One that lost its name to a newer twin they may find, too: it has the same content.
        """
        blocks = self.state.blocks
        for row in self.state.rows_in(Tier.DEVICE).tolist():
            pool = int(self.state.pool_of(np.array([row]))[0])
            shown = self.tiers.at(Tier.DEVICE, pool, blocks.slot[Tier.DEVICE][row]).shown
            sealed, named = (
                bool(of(np.array([row]))[0]) for of in (blocks.is_sealed, blocks.is_indexed)
            )
            name = int(blocks.hash_lo[row]) if sealed else None
            assert shown == name or (shown is None and not named)

    def lineage(self) -> Lineage:
        """All blocks that have names."""
        blocks, rows = self.state.blocks, self.state.live_rows()
        rows = rows[blocks.is_indexed(rows)]
        return Lineage.of(rows, blocks.id[rows], blocks.parent[rows], blocks.hash_hi[rows])

    def delete(self, tokens: list[int]) -> Deleted:
        """Delete the block that ends with these tokens, and all that follow it."""
        chain, lineage, blocks = self.chain(tokens), self.lineage(), self.state.blocks
        chosen = blocks.hash_hi[lineage.rows] == chain.hi[-1]
        chosen &= blocks.hash_lo[lineage.rows] == chain.lo[-1]
        doomed = lineage.descendants(chosen)
        rows, ids = lineage.rows[doomed][::-1], lineage.ids[doomed][::-1]
        self.deleted.update(ids.tolist())
        done = self.run(Deleter(self.placement).delete(rows, ids))
        self.placement.leave_left(0)
        return done

    def check_deleted(self) -> None:
        """Nobody finds a block that was deleted, by whatever way."""
        rows = self.state.live_rows()
        named = rows[self.state.blocks.is_indexed(rows)]
        assert not self.deleted & set(self.state.blocks.id[named].tolist())
        for (tier, _, _), slot in self.tiers.slots.items():
            if tier is Tier.DEVICE and slot.shown is not None:
                assert slot.id not in self.deleted

    def replayed(self) -> State:
        """A second state, made from the log alone."""
        state = self.empty()
        for records in self.log:
            state.apply(records)
        return state

    def revived(self) -> State:
        """The state as a daemon has it that comes back: of native structures, from the log."""
        state = self._new(structures(load({})))
        replay(state, join(self.log))
        state.take_changes()
        return state

    def chain(self, tokens: list[int], seed: bytes = b"n" * 16) -> Chain:
        """The full blocks of ``tokens``."""
        size = self.shape.block_tokens
        full = np.array(tokens[: len(tokens) // size * size], np.uint32).reshape(-1, size)
        hashes = chain_hashes(seed, full.reshape(-1), size)
        halves = hashes.view("<u8").reshape(-1, 2)
        return Chain(halves[:, 0].copy(), halves[:, 1].copy(), full, np.zeros(len(full), np.uint64))

    def write(
        self, slots: Any, start_block: int, payloads: list[bytes], pool: int = 0
    ) -> tuple[Any, Any]:
        """Write payloads into device slots; returns their checksums (hi, lo)."""
        sums = []
        for n, payload in enumerate(payloads):
            self.tiers.at(Tier.DEVICE, pool, slots[start_block + n]).payload = payload
            sums.append(checksum(payload))
        pairs = np.array(sums, np.uint64).reshape(-1, 2)
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def payload(self, slots: Any, block: int, pool: int = 0) -> bytes:
        return self.tiers.at(Tier.DEVICE, pool, slots[block]).payload

    def store(self, local: int, tokens: list[int], tag: bytes = b"") -> Any:
        """Begin, fill and seal a sequence of full blocks; payload = tag + tokens of the chain."""
        chain = self.chain(tokens)
        view = self.run(self.planner.acquire(self.lease, self.namespace, local, chain))
        have = len(view.slots)
        size = self.shape.block_tokens
        view = self.run(self.planner.reserve(self.lease, local, have * size, len(tokens)))
        payloads = [tag + repr(tokens[: (b + 1) * size]).encode() for b in range(have, len(chain))]
        hi, lo = self.write(view.slots, have, payloads)
        return self.run(
            self.planner.seal(self.lease, local, have, chain.part(have, len(chain)), hi, lo)
        )

    def stock(self, local: int, blocks: int) -> Any:
        """Begin a sequence that only has room."""
        self.run(self.planner.acquire(self.lease, self.namespace, local, self.chain([])))
        return self.run(
            self.planner.reserve(self.lease, local, 0, blocks * self.shape.block_tokens)
        )

    def to_store(
        self,
        stock: int,
        new_stock: int,
        tokens: list[int],
        first: int = 0,
        tag: bytes = b"",
        room: int | None = None,
    ) -> ToStore:
        """What ``put`` asks for, its payloads written into the stock."""
        chain, size = self.chain(tokens), self.shape.block_tokens
        payloads = [tag + repr(tokens[: (b + 1) * size]).encode() for b in range(first, len(chain))]
        slots = self.planner.table(self.planner.sequence(self.lease, stock)).slots
        hi, lo = self.write(slots, 0, payloads)
        room = len(payloads) if room is None else room
        return ToStore(stock, new_stock, chain, first, hi, lo, room)

    def storing(self, wanted: ToStore) -> Flow[Stored]:
        """All that the verb does."""
        stored = yield from self.planner.store(self.lease, self.namespace, wanted)
        yield from self.planner.fill_stock(self.lease, wanted)
        return stored

    def put(self, *arguments: Any, **options: Any) -> int:
        """Store blocks out of a stock, with the payload that ``store`` would give them.

        Returns how many of them are cached.
        """
        wanted = self.to_store(*arguments, **options)
        stored = self.run(self.storing(wanted))
        return len(stored.rows) - wanted.first
