"""Workers that use the core through flows that interleave, and know every byte they may read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from replaying import check_replay, check_same
from scheduler import Scheduler, SlowTiers, check_nothing_leaked
from world import SHAPE, World

from tierkv.core.blocks import SEALED
from tierkv.core.effects import Flow
from tierkv.core.ids import NO_BLOCK, Tier, sequence_id
from tierkv.core.invariants import active_without_device_copy, check_invariants
from tierkv.core.matching import Chain
from tierkv.core.records import Kind, blank
from tierkv.core.sequences import TableView
from tierkv.core.slots import HELD
from tierkv.core.state import PoolShape
from tierkv.core.storing import Stored, ToStore
from tierkv.errors import (
    CorruptionError,
    InvariantViolation,
    PoolExhausted,
    TierFailed,
    TierFull,
    TierkvError,
)

RUDE_VERBS = (
    *("acquire", "acquire", "reserve", "reserve", "reserve", "seal", "seal", "seal", "truncate"),
    *("fork", "suspend", "suspend", "resume", "resume", "release", "die", "store", "store"),
)
SIZE = 4
BIG = PoolShape(256, SIZE)


@dataclass(frozen=True)
class Plan:
    """What a run is made of. Sizes in blocks of the small pool."""

    device: int
    host: int
    disk: int
    two_pools: bool = False
    faults: bool = False
    rude: bool = False
    restarts: bool = False
    naps: bool = False
    """Sequences mostly fall asleep and wake up again, with half-written blocks."""
    roomy: bool = False
    """The disk has room for all that is ever sealed, so nothing of it may get out of reach."""


@dataclass(frozen=True)
class Namespace:
    number: int
    pool: int
    seed: bytes


@dataclass
class Held:
    """A polite worker's view of one of its sequences.

    ``content``: per block of its table what it may read there, None where nothing was written.
    ``writable_end``: tokens below it, from ``len(tokens)`` on, are the sequence's alone.
    """

    local: int
    namespace: Namespace
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    content: list[bytes | None] = field(default_factory=list)
    sealed: int = 0
    writable_end: int = 0
    asleep: bool = False
    asking: str = ""
    """The verb that has not been answered yet."""
    readable: int = 0
    """Blocks that it may read while a request is under way."""
    again: Callable[[], None] = lambda: None
    """Sends the last request once more."""


@dataclass
class Worker:
    lease: int
    sequences: dict[int, Held] = field(default_factory=dict)
    stocks: dict[int, int] = field(default_factory=dict)
    """By namespace: the sequence that is its stock."""
    putting: bool = False
    next: int = 1
    dead: bool = False

    def name(self) -> int:
        """A name for a new sequence."""
        self.next += 1
        return self.next - 1


class Run:
    """One world, its workers, and the checks after every step."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.random = Random(seed)
        self.plan = plan
        self.trace: deque[str] = deque(maxlen=120)
        self.tiers = SlowTiers(SIZE)
        self.world = World(plan.device, plan.host, plan.disk, SHAPE, self.tiers)
        self.tiers.writable = self._writable
        self.tiers.fault = self._fault
        self.scheduler = Scheduler(self.world, self.tiers, self.random)
        self.world.placement.disk_failed = self._disk_failed
        self.shadow = self.world.empty()
        self.seen_log = 0
        self.namespaces = [Namespace(self.world.namespace, 0, b"n" * 16)]
        self.rude_namespace = self._namespace(b"r" * 16, SHAPE)
        if plan.two_pools:
            self.namespaces.append(self._namespace(b"m" * 16, BIG))
        self.workers = [Worker(self.world.lease), self._new_worker()]
        self.rude_lease = self._open_lease()
        self.rude_tables: dict[int, TableView] = {}
        self.tails = 0
        self.damaged: set[int] = set()
        """Ids of blocks of which a copy was damaged."""

    # --- parts of the world -----------------------------------------------------------------------

    def _namespace(self, seed: bytes, shape: PoolShape) -> Namespace:
        number = self.world.planner.open_namespace(seed, shape)
        return Namespace(number, self.world.state.namespaces[number].pool, seed)

    def _open_lease(self) -> int:
        return self.world.planner.open_lease(self.random.randbytes(16), 1, 2, 3).id

    def _new_worker(self) -> Worker:
        return Worker(self._open_lease())

    def _writable(self, move: Any) -> bool:
        slots = self.world.state.slots[move.target, move.pool]
        return bool((slots._is[move.target_slots] == HELD).all())

    def _fault(self) -> TierkvError | None:
        if not self.plan.faults or self.random.random() > 0.1:
            return None
        return self.random.choice([TierFull("no space", tier="disk"), TierFailed("EIO")])

    def _disk_failed(self, _error: TierkvError) -> None:
        self.world.placement.disk_paused = self.random.random() < 0.7

    def _chain(self, held: Held, first: int, stop: int) -> Chain:
        return self.world.chain(held.tokens[: stop * SIZE], held.namespace.seed).part(first, stop)

    def _read(self, held: Held, slot: int) -> bytes:
        return self.tiers.at(Tier.DEVICE, held.namespace.pool, slot).payload

    def _ids(self, worker: Worker, held: Held) -> list[int]:
        sequence = self.world.state.sequences.get(sequence_id(worker.lease, held.local))
        return [] if sequence is None else self.world.state.blocks.id[sequence.rows].tolist()

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold between any two steps."""
        if len(self.world.log) > self.seen_log:
            check_invariants(self.world.state)
            for records in self.world.log[self.seen_log :]:
                self.shadow.apply(records)
            self.seen_log = len(self.world.log)
            check_same(self.world.state, self.shadow)
        for worker in self.workers:
            for held in worker.sequences.values():
                self._check_content(worker, held)
        if not self.plan.faults:
            assert not any(self.world.counters.checksum_failures.values())

    def _check_content(self, worker: Worker, held: Held) -> None:
        if held.asleep:
            return
        readable = held.readable if held.asking else len(held.content)
        for block, expected in enumerate(held.content[:readable]):
            if expected is not None:
                found = self._read(held, held.slots[block])
                assert found == expected, (
                    f"lease {worker.lease} sequence {held.local} block {block} in slot "
                    f"{held.slots[block]}: {found!r} instead of {expected!r}"
                )

    def _adopt(self, worker: Worker, held: Held, view: TableView, kept: int) -> None:
        """Take a reply's table. The first ``kept`` blocks must lie where they lay."""
        slots = view.slots.tolist()
        assert slots[:kept] == held.slots[:kept], f"{slots} moved {held.slots} before {kept}"
        capacity = self.world.state.slots[Tier.DEVICE, held.namespace.pool].capacity
        assert all(slot < capacity for slot in slots), f"{slots} names no place"
        held.slots = slots
        held.content = (held.content + [None] * len(slots))[: len(slots)]
        full = len(held.tokens) // SIZE
        held.sealed = min(view.sealed, full)
        for block in range(kept, len(slots)):
            was, now = held.content[block], self._read(held, slots[block])
            if block < held.sealed:
                name = canonical(held, block)
                assert now.split(b"#")[0] == name, f"block {block}: {now!r} instead of {name!r}"
                held.content[block] = now
            elif was is not None and b"#" in was:
                assert now.split(b"#")[0] == was.split(b"#")[0], f"{block}: {now!r}, not {was!r}"
                held.content[block] = now
            elif was is not None:
                assert now == was, f"block {block}: {now!r} instead of {was!r}"

    # --- polite workers ---------------------------------------------------------------------------

    def _ask(
        self,
        worker: Worker,
        held: Held,
        verb: str,
        flow: Callable[[], Any],
        answered: Callable[[Any], None],
    ) -> None:
        def done(result: Any) -> None:
            if worker.dead or held.local not in worker.sequences:
                return
            self.trace.append(f"{worker.lease}/{held.local} {verb} -> {_brief(result)}")
            held.asking = ""
            answered(result)

        def send() -> None:
            self.trace.append(f"{worker.lease}/{held.local} {verb}")
            self.scheduler.start(f"{worker.lease}/{held.local} {verb}", flow(), done)

        held.asking, held.again = verb, send
        send()

    def begin(self, worker: Worker) -> None:
        namespace = self.random.choice(self.namespaces)
        bits = (0, 1, 2) if self.plan.naps else (0, 0, 0, 1)
        tokens = [
            bit * 10 + t
            for bit in self.random.choices(bits, k=self.random.randint(0, 4))
            for t in range(SIZE)
        ]
        held = Held(worker.next, namespace, tokens)
        worker.next += 1
        worker.sequences[held.local] = held
        chain = self._chain(held, 0, len(tokens) // SIZE)
        planner, lease = self.world, worker.lease

        def answered(view: Any) -> None:
            assert isinstance(view, TableView), repr(view)
            assert len(view.slots) <= len(chain)
            held.tokens = held.tokens[: len(view.slots) * SIZE]
            assert view.sealed == len(view.slots)
            self._adopt(worker, held, view, 0)

        self._ask(
            worker,
            held,
            "acquire",
            lambda: planner.planner.acquire(lease, namespace.number, held.local, chain),
            answered,
        )

    def grow(self, worker: Worker, held: Held) -> None:
        fresh = [
            bit * 10 + t
            for bit in self.random.choices((0, 0, 1), k=self.random.randint(1, 3))
            for t in range(SIZE)
        ][: self.random.randint(1, 12)]
        written = len(held.tokens)
        # Continue the pattern of whole blocks, so that chains meet.
        offset = written % SIZE
        fresh = fresh[offset:] or [9]
        total = written + len(fresh) + self.random.choice((0, 0, 3, 8))
        first = written // SIZE
        held.readable = len(held.content)

        def answered(result: Any) -> None:
            if isinstance(result, PoolExhausted):
                return
            assert isinstance(result, TableView), repr(result)
            assert len(result.slots) * SIZE >= total
            self._adopt(worker, held, result, min(first, len(held.slots)))
            held.writable_end = len(result.slots) * SIZE
            self._write(worker, held, fresh)

        self._ask(
            worker,
            held,
            f"reserve {written} {total}",
            lambda: self.world.planner.reserve(worker.lease, held.local, written, total),
            answered,
        )

    def _write(self, worker: Worker, held: Held, fresh: list[int]) -> None:
        """Write KV of tokens into reserved places, then maybe ask to seal what is full."""
        first = len(held.tokens) // SIZE
        assert len(held.tokens) + len(fresh) <= held.writable_end
        held.tokens = held.tokens + fresh
        full = len(held.tokens) // SIZE
        for block in range(first, full):
            self.tails += 1
            self._store(held, block, canonical(held, block) + b"#%d" % self.tails)
        if len(held.tokens) % SIZE:
            self.tails += 1
            self._store(held, full, b"tail %d" % self.tails)
        if self.random.random() < 0.8:
            self.seal(worker, held)

    def scribble(self, held: Held) -> None:
        """One more token of the tail, as far as there is room."""
        if held.writable_end > len(held.tokens) and len(held.tokens) % SIZE:
            self.tails += 1
            self._store(held, len(held.tokens) // SIZE, b"tail %d" % self.tails)

    def _store(self, held: Held, block: int, payload: bytes) -> None:
        self.tiers.at(Tier.DEVICE, held.namespace.pool, held.slots[block]).payload = payload
        held.content[block] = payload

    def seal(self, worker: Worker, held: Held) -> None:
        first, full = held.sealed, len(held.tokens) // SIZE
        if full <= first:
            return
        chain = self._chain(held, first, full)
        payloads = [held.content[block] for block in range(first, full)]
        sums = self.world.write(held.slots, first, payloads, held.namespace.pool)
        held.readable = first

        def answered(result: Any) -> None:
            assert isinstance(result, TableView), repr(result)
            assert result.sealed >= full
            self._adopt(worker, held, result, first)

        self._ask(
            worker,
            held,
            f"seal {first}:{full}",
            lambda: self.world.planner.seal(worker.lease, held.local, first, chain, *sums),
            answered,
        )

    def put(self, worker: Worker) -> None:
        """Cache blocks out of a stock, at the beginning of a chain or behind cached ones."""
        if worker.putting:
            return
        namespace, random = self.random.choice(self.namespaces), self.random
        bits = random.choices((0, 0, 0, 1), k=random.randint(1, 4))
        tokens = [bit * 10 + t for bit in bits for t in range(SIZE)]
        first = min(random.choice((0, 0, 1, 2)), len(bits) - 1)
        name = f"{worker.lease} put {bits} from {first} on"

        def done(result: Any) -> None:
            self.trace.append(f"{name} -> {_brief(result)}")
            if worker.dead:
                return
            worker.putting = False
            if isinstance(result, PoolExhausted):
                stock = worker.stocks.pop(namespace.number)
                self.world.planner.release(worker.lease, [stock])
                return
            assert isinstance(result, Stored), repr(result)
            assert len(result.rows) < first or len(result.rows) == len(bits)

        worker.putting = True
        self.trace.append(name)
        flow = self._put(worker, Held(0, namespace, tokens), first)
        self.scheduler.start(name, flow, done)

    def _put(self, worker: Worker, held: Held, first: int) -> Flow[Stored]:
        planner, namespace, count = self.world.planner, held.namespace, len(held.tokens) // SIZE
        if namespace.number not in worker.stocks:
            stock = worker.stocks[namespace.number] = worker.name()
            empty = self._chain(held, 0, 0)
            yield from planner.acquire(worker.lease, namespace.number, stock, empty)
        stock, new = worker.stocks[namespace.number], worker.name()
        view = yield from planner.reserve(worker.lease, stock, 0, (count - first) * SIZE)
        self.tails += 1
        payloads = [canonical(held, block) + b"#%d" % self.tails for block in range(first, count)]
        sums = self.world.write(view.slots, 0, payloads, namespace.pool)
        room = self.random.randint(0, 4)
        wanted = ToStore(stock, new, self._chain(held, 0, count), first, *sums, room)
        stored = yield from planner.store(worker.lease, namespace.number, wanted)
        yield from planner.fill_stock(worker.lease, wanted)
        if len(stored.rows) >= first:
            worker.stocks[namespace.number] = new
            assert not planner.has_sequence(worker.lease, stock)
        return stored

    def fork(self, worker: Worker, held: Held) -> None:
        child = Held(worker.next, held.namespace, list(held.tokens))
        worker.next += 1
        view = self.world.planner.fork(worker.lease, held.local, child.local, len(held.tokens))
        self.trace.append(f"{worker.lease}/{held.local} fork {child.local} -> {_brief(view)}")
        held.writable_end = 0
        child.slots = held.slots[: len(view.slots)]
        child.content = held.content[: len(view.slots)]
        child.sealed = held.sealed
        worker.sequences[child.local] = child
        self._adopt(worker, child, view, len(view.slots))

    def truncate(self, worker: Worker, held: Held) -> None:
        keep = self.random.randint(0, len(held.tokens))
        view = self.world.planner.truncate(worker.lease, held.local, keep)
        self.trace.append(f"{worker.lease}/{held.local} truncate {keep} -> {_brief(view)}")
        held.tokens = held.tokens[:keep]
        held.writable_end = 0
        held.sealed = min(held.sealed, keep // SIZE)
        blocks = -(-keep // SIZE)
        held.content = held.content[:blocks]
        self._adopt(worker, held, view, blocks)

    def suspend(self, worker: Worker, held: Held) -> None:
        self.world.planner.suspend(worker.lease, held.local)
        self.trace.append(f"{worker.lease}/{held.local} suspend")
        held.asleep = True

    def resume(self, worker: Worker, held: Held) -> None:
        ids = self._ids(worker, held)
        held.readable = 0

        def answered(result: Any) -> None:
            if isinstance(result, PoolExhausted):
                return
            if isinstance(result, CorruptionError):
                kept = result.details["blocks"]
                assert ids[kept] in self.damaged, f"block {kept} was lost without damage"
                held.tokens = held.tokens[: kept * SIZE]
                held.content = held.content[:kept]
                held.writable_end = 0
                return
            assert isinstance(result, TableView), repr(result)
            held.asleep = False
            self._adopt(worker, held, result, 0)
            self.scribble(held)

        self._ask(
            worker,
            held,
            "resume",
            lambda: self.world.planner.resume(worker.lease, held.local),
            answered,
        )

    def release(self, worker: Worker, held: Held) -> None:
        self.trace.append(f"{worker.lease}/{held.local} release")
        self.world.planner.release(worker.lease, [held.local])
        del worker.sequences[held.local]

    def kill(self, worker: Worker) -> None:
        self.trace.append(f"{worker.lease} dies")
        worker.dead = True
        self.workers.remove(worker)
        self.world.planner.close_lease(worker.lease)

    # --- the rude worker --------------------------------------------------------------------------

    def be_rude(self) -> None:
        """Any verbs on one of three sequences, whether or not the last one was answered."""
        local = self.random.randint(1, 3)
        for _ in range(self.random.choice((1, 2, 4))):
            self._be_rude_to(local)
            self.check()

    def _be_rude_to(self, local: int) -> None:
        planner, lease, random = self.world.planner, self.rude_lease, self.random
        tokens = [
            bit * 10 + t for bit in random.choices((0, 1), k=random.randint(0, 4)) for t in range(4)
        ]
        chain = self.world.chain(tokens, self.rude_namespace.seed)
        count = random.randint(0, 16)
        verb = random.choice(RUDE_VERBS)
        name = f"rude {local} {verb}"
        self.trace.append(f"{name} {count} {len(chain)}")
        try:
            if verb == "acquire":
                flow = planner.acquire(lease, self.rude_namespace.number, local, chain)
                self.scheduler.start(name, flow, self._rude_answer)
            elif verb == "reserve":
                written = random.randint(0, count)
                flow = planner.reserve(lease, local, written, count)
                self.scheduler.start(name, flow, self._rude_answer)
            elif verb == "seal":
                first = random.randint(0, 2)
                part = chain.part(min(first, len(chain)), len(chain))
                sums = self._rude_sums(local, first, len(part))
                flow = planner.seal(lease, local, first, part, *sums)
                self.scheduler.start(name, flow, self._rude_answer)
            elif verb == "store":
                first = min(random.choice((0, 0, 0, 1)), len(chain))
                sums = self._rude_sums(local, 0, len(chain) - first)
                wanted = ToStore(local, random.randint(1, 3), chain, first, *sums, count // SIZE)
                flow = planner.store(lease, self.rude_namespace.number, wanted)
                self.scheduler.start(name, flow, self._rude_answer)
            elif verb == "resume":
                self.scheduler.start(name, planner.resume(lease, local), self._rude_answer)
            elif verb == "truncate":
                planner.truncate(lease, local, count)
            elif verb == "fork":
                planner.fork(lease, local, random.randint(1, 3), count)
            elif verb == "suspend":
                planner.suspend(lease, local)
            elif verb == "release":
                planner.release(lease, [local])
            elif random.random() < 0.3:
                planner.close_lease(lease)
                self.rude_lease = self._open_lease()
        except InvariantViolation:
            raise
        except TierkvError as error:
            self.trace.append(f"{name} -> {error!r}")

    def _rude_sums(self, local: int, first: int, count: int) -> Any:
        """Write into blocks that are the sequence's own, and tell their checksums."""
        state = self.world.state
        sequence = state.sequences.get(sequence_id(self.rude_lease, local))
        rows = sequence.rows[first : first + count] if sequence is not None else []
        sums = np.zeros((count, 2), np.uint64)
        for n, row in enumerate(rows):
            slot = int(state.blocks.slot[Tier.DEVICE][row])
            open_ = not state.blocks.flags[row] & SEALED
            alone = state.blocks.refs[row] == 1 and state.blocks.active[row] == 1
            if open_ and alone and slot < 2**32 - 1:
                self.tails += 1
                hi, lo = self.world.write([slot], 0, [b"rude %d" % self.tails])
                sums[n] = hi[0], lo[0]
        return sums[:, 0].copy(), sums[:, 1].copy()

    def _rude_answer(self, result: Any) -> None:
        self.trace.append(f"rude -> {_brief(result)}")
        if isinstance(result, TableView):
            capacity = self.world.state.slots[Tier.DEVICE, 0].capacity
            assert (result.slots < capacity).all(), f"{result} names no place"

    # --- the daemon's own work --------------------------------------------------------------------

    def write_behind(self) -> None:
        sealed = self.world.planner.take_sealed()
        if sealed:  # all in one, as they may stand in the daemon's queue
            rows, ids = map(np.concatenate, zip(*sealed, strict=True))
            flow = self.world.placement.clean_down(rows, ids)
            self.scheduler.start(f"write-behind {rows.tolist()}", flow, lambda _done: None)

    def pause(self) -> None:
        placement = self.world.placement
        placement.disk_paused = not placement.disk_paused
        self.trace.append(f"disk paused: {placement.disk_paused}")

    def damage(self) -> None:
        """Change the payload of a copy in host or disk."""
        state = self.world.state
        rows = state.live_rows()
        for tier in self.random.sample([Tier.HOST, Tier.DISK], 2):
            here = rows[state.blocks.has_copy(rows, tier)]
            if len(here):
                self._damage(tier, self.random.choice(here.tolist()))
                return

    def _damage(self, tier: Tier, row: int) -> None:
        state = self.world.state
        pool = int(state.pool_of(np.array([row]))[0])
        slot = self.tiers.at(tier, pool, state.blocks.slot[tier][row])
        slot.payload += b"!"
        self.damaged.add(int(state.blocks.id[row]))
        self.trace.append(f"damaged {tier.label} copy of row {row}, id {state.blocks.id[row]}")

    def restart(self) -> None:
        """The daemon is killed and comes back; some workers outlive it and ask again."""
        self.check()
        self.trace.append("restart")
        self.scheduler.tasks.clear()
        world = self.world
        world.state = world.revived()
        check_same(world.state, self.shadow)
        for worker in list(self.workers):
            if self.random.random() < 0.3:
                worker.dead = True
                self.workers.remove(worker)
        kept = {worker.lease for worker in self.workers}
        for lease in list(world.state.leases):
            if lease not in kept:
                self._log(Kind.LEASE_CLOSE, key=lease)
        self._undo()
        world.state.reindex()
        world._assemble()
        world.placement.disk_failed = self._disk_failed
        rows = world.state.live_rows()
        sealed = (world.state.blocks.flags[rows] & SEALED) != 0
        doubtful = rows[sealed & world.state.blocks.has_copy(rows, Tier.DEVICE)]
        if self.plan.faults:
            for row in doubtful[world.state.blocks.active[doubtful] == 0].tolist():
                if self.random.random() < 0.3:
                    self._damage(Tier.DEVICE, row)
        world.placement.doubt.mark(doubtful)
        world.placement.list_all()
        self.rude_lease = self._open_lease()
        self.check()
        for worker in self.workers:
            worker.stocks, worker.putting = {}, False
            self._release_strangers(worker)
            for held in list(worker.sequences.values()):
                self._reconnect(worker, held)
        while len(self.workers) < 2:
            self.workers.append(self._new_worker())

    def _log(self, kind: Kind, **values: int) -> None:
        records = blank(1, kind)
        for name, value in values.items():
            records[name] = value
        self.world.commit(records)

    def _undo(self) -> None:
        """What recovery does: drop RAM copies whose entry differs, cut and suspend sequences."""
        state = self.world.state
        blocks = state.blocks
        for tier in (Tier.DEVICE, Tier.HOST):
            rows = state.live_rows()
            for pool, members in list(state.by_pool(rows[blocks.has_copy(rows, tier)])):
                for row in members.tolist():
                    slot = int(blocks.slot[tier][row])
                    entry = self.tiers.at(tier, pool, slot)
                    sums = int(blocks.sum_hi[row]), int(blocks.sum_lo[row])
                    sealed = blocks.flags[row] & SEALED
                    assert entry.id == blocks.id[row], f"{tier.label} entry of row {row}: {entry}"
                    assert not sealed or entry.sums == sums, f"{tier.label} row {row}: {entry}"
        for sequence in list(state.sequences.values()):
            assert blocks.has_any_copy(sequence.rows).all() or self.damaged
            lost = np.flatnonzero(~blocks.has_any_copy(sequence.rows))
            if len(lost):
                self._log(Kind.SEQ_TRUNCATE, id=sequence.id, loc=int(lost[0]))
            if not sequence.suspended and not blocks.has_copy(sequence.rows, Tier.DEVICE).all():
                self._log(Kind.SEQ_SUSPEND, id=sequence.id)

    def _release_strangers(self, worker: Worker) -> None:
        """What the daemon holds and the worker does not know, or will not take up."""
        held = self.world.planner.sequences_of(worker.lease)
        names = {sequence.id & 0xFFFFFFFF for sequence in held} - set(worker.sequences)
        self.world.planner.release(worker.lease, sorted(names))

    def _reconnect(self, worker: Worker, held: Held) -> None:
        sequence = self.world.state.sequences.get(sequence_id(worker.lease, held.local))
        if held.asking == "acquire":
            held.again()
            return
        assert sequence is not None, f"{worker.lease}/{held.local} was forgotten"
        view = self.world.planner.table(sequence)
        if len(view.slots) < len(held.content) or view.sealed < held.sealed:
            # A damaged block was found before the restart: a worker gives such a sequence up.
            assert self.damaged, f"{worker.lease}/{held.local} lost blocks"
            held.asking = ""
            self.release(worker, held)
            return
        assert held.asking == "resume" or sequence.suspended == held.asleep
        if held.asking == "resume" or (held.asking and not held.asleep):
            held.again()

    # --- one run ----------------------------------------------------------------------------------

    def act(self) -> None:
        """Something new happens."""
        plan = self.plan
        happenings: list[tuple[float, Callable[[], None]]] = [
            (60, self._act_politely),
            (5, self.write_behind),
            (10, lambda: self.put(self.random.choice(self.workers))),
            (1, self._crowd),
            (1, self._replace_worker),
            (2 * plan.faults, self.pause),
            (4 * plan.faults, self.damage),
            (40 * plan.rude, self.be_rude),
            (0.5 * plan.restarts, self.restart),
        ]
        weights = [weight for weight, _ in happenings]
        ((_, happening),) = self.random.choices(happenings, weights)
        happening()

    def _crowd(self) -> None:
        """Many want the same prefix at once."""
        for _ in range(3):
            self.begin(self.random.choice(self.workers))

    def _replace_worker(self) -> None:
        self.kill(self.random.choice(self.workers))
        self.workers.append(self._new_worker())

    def _act_politely(self) -> None:
        random = self.random
        worker = random.choice(self.workers)
        idle = [held for held in worker.sequences.values() if not held.asking]
        many = 8 if self.plan.naps else 5
        if len(worker.sequences) < 2 or (len(worker.sequences) < many and random.random() < 0.1):
            self.begin(worker)
            return
        if not idle:
            return
        held = random.choice(idle)
        if held.asleep:
            if random.random() < 0.9:
                self.resume(worker, held)
            else:
                self.release(worker, held)
            return
        verbs = ("grow", "scribble", "seal", "fork", "truncate", "suspend", "release")
        weights = (3, 3, 1, 1, 0.3, 15, 0.3) if self.plan.naps else (5, 3, 2, 2, 1, 4, 1)
        verb = random.choices(verbs, weights)[0]
        if verb == "scribble":
            self.scribble(held)
        else:
            getattr(self, verb)(worker, held)

    def go(self, steps: int) -> None:
        """Random work, then silence: every flow must end and nothing may be left behind."""
        for _ in range(steps):
            if not self.scheduler.tasks or (
                len(self.scheduler.tasks) < 12 and self.random.random() < 0.25
            ):
                self.act()
            else:
                self.scheduler.step()
            self.check()
        self.settle()

    def settle(self) -> None:
        """No new requests: all flows must end, and leave nothing behind."""
        self.scheduler.drain(self.check)
        check_nothing_leaked(self.world)
        assert active_without_device_copy(self.world.state) == 0
        for worker in self.workers:
            for held in worker.sequences.values():
                assert not held.asking
        if not self.plan.faults:
            self._probe()

    def _probe(self) -> None:
        """Nobody else is about: what the tiers can surely give must be given."""
        worker = self._new_worker()
        for namespace in self.namespaces:
            count = surely_available(self.world, namespace.pool)
            if not count:
                continue
            self.world.run(
                self.world.planner.acquire(
                    worker.lease, namespace.number, 1, self.world.chain([], namespace.seed)
                )
            )
            try:
                self.world.run(self.world.planner.reserve(worker.lease, 1, 0, count * SIZE))
            except PoolExhausted as error:
                raise AssertionError(f"{count} blocks could be had") from error
            self.world.planner.release(worker.lease, [1])
            self.check()
        self.world.planner.close_lease(worker.lease)
        self.check()
        check_nothing_leaked(self.world)

    def end(self) -> None:
        """All workers go; every cached chain must still be what it says."""
        for worker in list(self.workers):
            self.kill(worker)
        self.world.planner.close_lease(self.rude_lease)
        self.check()
        state = self.world.state
        rows = state.live_rows()
        assert not state.blocks.refs[rows].any()
        assert state.blocks.has_any_copy(rows).all()
        if self.plan.roomy:
            self._check_reach(rows)
        in_one = self.world.empty()
        at = 0
        while at < len(self.world.log):
            size = self.random.randint(1, 30)
            in_one.apply(np.concatenate(self.world.log[at : at + size]))
            at += size
        check_invariants(in_one)
        check_same(state, in_one)
        check_replay(self.world.log, self.world.empty(), self.world.empty(), self.random)

    def _check_reach(self, rows: np.ndarray) -> None:
        """Every block that has a name is found: the one before it has its name, too."""
        blocks = self.world.state.blocks
        named = rows[blocks.is_indexed(rows)]
        before = blocks.parent[named]
        known = np.isin(before, blocks.id[named]) | (before == NO_BLOCK)
        assert known.all(), f"out of reach: {blocks.id[named[~known]]}, behind {before[~known]}"


def surely_available(world: World, pool: int) -> int:
    """Blocks of a pool that the device tier can give when nothing else goes on, at least.

    Counted are free bytes, inactive blocks that have another copy or that nobody holds, and as
    many others as fit into the free bytes of the tiers below.
    """
    state, blocks = world.state, world.state.blocks
    rows = state.live_rows()
    rows = rows[blocks.has_copy(rows, Tier.DEVICE) & (blocks.active[rows] == 0)]
    lower = blocks.has_copy(rows, Tier.HOST) | blocks.has_copy(rows, Tier.DISK)
    loose = lower | (blocks.refs[rows] == 0)
    sizes = state.slot_bytes_of(Tier.DEVICE, rows)
    size_bytes = state.free_bytes(Tier.DEVICE) + int(sizes[loose].sum())
    room = {tier: state.free_bytes(tier) for tier in (Tier.HOST, Tier.DISK)}
    for stuck in sorted(sizes[~loose].tolist()):
        for tier in room:
            if room[tier] >= stuck:
                room[tier] -= stuck
                size_bytes += stuck
                break
    return size_bytes // state.slot_bytes(Tier.DEVICE, pool)


def canonical(held: Held, block: int) -> bytes:
    """What the payload of a full block begins with: its whole chain."""
    return held.namespace.seed[:1] + repr(held.tokens[: (block + 1) * SIZE]).encode()


def _brief(result: Any) -> str:
    if isinstance(result, TableView):
        return f"{result.slots.tolist()} sealed {result.sealed}"
    return repr(result)
