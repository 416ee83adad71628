"""Random work of several sequences on small tiers, against a model that knows every payload."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from replaying import check_replay, check_same
from world import World

from tierkv.core.ids import Tier
from tierkv.core.invariants import active_without_device_copy, check_invariants
from tierkv.core.pins import Pins, pinned_rows, pins_of
from tierkv.errors import LimitExceeded, PoolExhausted

SIZE = 4


class RandomWork(RuleBasedStateMachine):
    """Payload of a sealed block = its chain of tokens, so a wrong byte is a wrong block."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(device=6, host=3, disk=8)
        self.tokens: dict[int, list[int]] = {}
        self.tails: dict[int, bytes] = {}
        self.asleep: set[int] = set()
        self.next = 1
        self.stock = 0
        self.fenced: dict[int, bytes] = {}
        self.fenced_lease = 0
        self.pinned: set[int] = set()

    def _awake(self, data: Any) -> int | None:
        choices = sorted(set(self.tokens) - self.asleep)
        return data.draw(st.sampled_from(choices)) if choices else None

    def _table(self, local: int) -> Any:
        return self.world.planner.table(self.world.planner.sequence(self.world.lease, local))

    def _check(self, local: int) -> None:
        view, tokens = self._table(local), self.tokens[local]
        full = len(tokens) // SIZE
        assert view.sealed >= full
        for block in range(full):
            assert self.world.payload(view.slots, block) == _payload(tokens, block)
        if len(tokens) % SIZE:
            assert self.world.payload(view.slots, full) == self.tails[local]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=0, max_size=3), tail=st.integers(0, 3))
    def begin(self, prompt: list[int], tail: int) -> None:
        tokens = [bit * 10 + t for bit in prompt for t in range(SIZE)]
        local, self.next = self.next, self.next + 1
        world = self.world
        view = world.run(
            world.planner.acquire(world.lease, world.namespace, local, world.chain(tokens))
        )
        have = tokens[: len(view.slots) * SIZE]
        self.tokens[local] = have
        self._check(local)
        self._grow(local, [*tokens[len(have) :], *range(90, 90 + tail)])

    @rule(data=st.data(), bits=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: Any, bits: list[int]) -> None:
        local = self._awake(data)
        if local is not None:
            self._grow(local, bits)

    def _grow(self, local: int, fresh: list[int]) -> None:
        world, tokens = self.world, self.tokens[local]
        total = len(tokens) + len(fresh)
        try:
            view = world.run(world.planner.reserve(world.lease, local, len(tokens), total))
        except PoolExhausted:
            self._check(local)
            return
        first = len(tokens) // SIZE
        if len(tokens) % SIZE and len(view.slots) > first:
            assert world.payload(view.slots, first) == self.tails[local]
        tokens = self.tokens[local] = tokens + fresh
        full = len(tokens) // SIZE
        if full > first:
            payloads = [_payload(tokens, block) for block in range(first, full)]
            hi, lo = world.write(view.slots, first, payloads)
            chain = world.chain(tokens).part(first, full)
            view = world.run(world.planner.seal(world.lease, local, first, chain, hi, lo))
        if len(tokens) % SIZE:
            self.tails[local] = f"tail of {local}: {tokens}".encode()
            world.write(view.slots, full, [self.tails[local]])
        self._check(local)

    @rule(
        bits=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        first=st.integers(0, 3),
        room=st.integers(0, 3),
    )
    def put(self, bits: list[int], first: int, room: int) -> None:
        tokens = [bit * 10 + t for bit in bits for t in range(SIZE)]
        first = min(first, len(bits) - 1)
        stock = self._stock(len(bits) - first)
        if stock is None:
            return
        new, self.next = self.next, self.next + 1
        found = sum(self.world.planner.lookup(self.world.namespace, *self._names(tokens)))
        stored = self.world.put(stock, new, tokens, first, room=room)
        if found < first:
            assert stored < 0
            return
        assert stored == len(bits) - first
        self.stock, held = new, self._table(new)
        assert len(held.slots) <= max(room, 0)
        assert held.sealed == 0
        assert sum(self.world.planner.lookup(self.world.namespace, *self._names(tokens))) > 0

    def _names(self, tokens: list[int]) -> Any:
        chain = self.world.chain(tokens)
        return chain.hi, chain.lo

    def _stock(self, blocks: int) -> int | None:
        """A sequence with so many open blocks, if they can be had."""
        world = self.world
        if not self.stock:
            self.stock, self.next = self.next, self.next + 1
            chain = world.chain([])
            world.run(world.planner.acquire(world.lease, world.namespace, self.stock, chain))
        try:
            world.run(world.planner.reserve(world.lease, self.stock, 0, blocks * SIZE))
        except PoolExhausted:
            world.planner.release(world.lease, [self.stock])
            self.stock = 0
        return self.stock or None

    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        local = self._awake(data)
        if local is None:
            return
        new, self.next = self.next, self.next + 1
        self.world.planner.fork(self.world.lease, local, new, len(self.tokens[local]))
        self.tokens[new] = list(self.tokens[local])
        self.tails[new] = self.tails.get(local, b"")
        self._check(new)

    @rule(data=st.data(), share=st.floats(0, 1))
    def roll_back(self, data: Any, share: float) -> None:
        local = self._awake(data)
        if local is None:
            return
        keep = int(len(self.tokens[local]) * share)
        self.world.planner.truncate(self.world.lease, local, keep)
        if keep % SIZE:
            view = self._table(local)
            self.tails[local] = self.world.payload(view.slots, keep // SIZE)
        self.tokens[local] = self.tokens[local][:keep]

    @rule(data=st.data())
    def suspend(self, data: Any) -> None:
        local = self._awake(data)
        if local is not None:
            self.world.planner.suspend(self.world.lease, local)
            self.asleep.add(local)

    @precondition(lambda self: self.asleep)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        local = data.draw(st.sampled_from(sorted(self.asleep)))
        try:
            self.world.run(self.world.planner.resume(self.world.lease, local))
        except PoolExhausted:
            return
        self.asleep.discard(local)
        self._check(local)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        local = data.draw(st.sampled_from(sorted(self.tokens)))
        self.world.planner.release(self.world.lease, [local])
        del self.tokens[local]
        self.asleep.discard(local)

    @rule()
    def write_behind(self) -> None:
        sealed = self.world.planner.take_sealed()
        if sealed:  # all in one, as they may stand in the daemon's queue
            rows, ids = map(np.concatenate, zip(*sealed, strict=True))
            self.world.run(self.world.placement.clean_down(rows, ids))

    @rule(bits=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def delete(self, bits: list[int]) -> None:
        tokens = [bit * 10 + t for bit in bits for t in range(SIZE)]
        self.world.delete(tokens)
        assert sum(self.world.planner.lookup(self.world.namespace, *self._names(tokens))) < len(
            bits
        )

    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        """Somebody pins a chain that is cached, and it stays so however full the tiers get."""
        lineage = self.world.lineage()
        ends = np.flatnonzero(lineage.begins & lineage.is_leaf)
        if not len(ends):
            return
        chain = lineage.chain(int(data.draw(st.sampled_from(ends.tolist()))))
        rows, ids = lineage.rows[chain], lineage.ids[chain]
        try:
            Pins(self.world.planner).pin([(rows, ids)])
        except LimitExceeded:
            return
        self.pinned.update(ids.tolist())

    @rule()
    def unpin(self) -> None:
        Pins(self.world.planner).unpin(pins_of(self.world.state))
        self.pinned.clear()

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        state = self.world.state
        rows = pinned_rows(state)
        assert set(state.blocks.id[rows].tolist()) == self.pinned
        assert state.blocks.has_any_copy(rows).all()

    @rule()
    def lose_the_lease(self) -> None:
        world = self.world
        world.planner.close_lease(world.lease)
        self._open_a_lease()

    @rule()
    def be_fenced(self) -> None:
        """The worker is given up but lives: what it may write into goes to nobody."""
        world = self.world
        self._let_fenced_go()
        for local in sorted(set(self.tokens) - self.asleep):
            view, tail = self._table(local), len(self.tokens[local]) // SIZE
            if len(self.tokens[local]) % SIZE and view.sealed <= tail:
                self.fenced[int(view.slots[tail])] = self.tails[local]
        if self.stock:
            self.fenced |= dict.fromkeys(self._table(self.stock).slots.tolist(), b"stock")
            self.world.write(list(self.fenced), 0, list(self.fenced.values()))
        self.fenced_lease = world.lease
        assert world.planner.fence_lease(world.lease) >= bool(self.fenced)
        assert world.planner.sequences_of(world.lease) == []
        self._open_a_lease()

    @precondition(lambda self: self.fenced)
    @rule()
    def be_told(self) -> None:
        lease = self.fenced_lease
        held = list(self.world.state.lease_sequences[lease])
        self.world.planner.release(lease, held)
        assert not self.world.state.lease_sequences[lease]
        self._let_fenced_go()

    @invariant()
    def nobody_writes_where_a_fenced_worker_may(self) -> None:
        for slot, tail in self.fenced.items():
            assert self.world.tiers.at(Tier.DEVICE, 0, slot).payload == tail

    def _let_fenced_go(self) -> None:
        self.world.planner.close_lease(self.fenced_lease)
        self.fenced.clear()

    def _open_a_lease(self) -> None:
        world = self.world
        world.lease = world.planner.open_lease(b"v" * 16, 1, 2, 3).id
        self.tokens.clear()
        self.asleep.clear()
        self.stock = 0

    @invariant()
    def the_state_is_sound(self) -> None:
        check_invariants(self.world.state)
        self.world.check_shown()
        self.world.check_deleted()
        assert active_without_device_copy(self.world.state) == 0
        for local in set(self.tokens) - self.asleep:
            self._check(local)
        for tier in Tier:
            held = sum(s.held_count for (t, _), s in self.world.state.slots.items() if t is tier)
            assert held == 0

    def teardown(self) -> None:
        world = self.world
        check_same(world.state, world.replayed())
        check_replay(world.log, world.empty(), world.empty(), Random(len(world.log)))


def _payload(tokens: list[int], block: int) -> bytes:
    return repr(tokens[: (block + 1) * SIZE]).encode()


TestRandomWork = RandomWork.TestCase
TestRandomWork.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
