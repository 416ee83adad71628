"""Random work with a crash anywhere in it; afterwards the store holds what was acknowledged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovery_harness import (
    SIZE,
    Daemon,
    Killed,
    Machine,
    chain_of,
    content,
    kept,
    picture,
    tail_content,
)

from tierkv.core.ids import NO_SLOT, sequence_id
from tierkv.core.invariants import active_without_device_copy, check_invariants
from tierkv.errors import PoolExhausted

SEEDS = 24
STEPS = 120


class Work:
    """One worker, this process: it outlives every daemon and wants back what it was promised.

    ``tokens``: what each sequence holds. ``touched``: sequences that a request changed since the
    last acknowledgement; a crash may keep or lose such a change.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = Machine(folder)
        self.machine.settings = {
            "device": self.random.choice((5, 6, 8)),
            "host": self.random.choice((0, 2, 4)),
            "disk": self.random.choice((0, 5, 9)),
        }
        self.tokens: dict[int, list[int]] = {}
        self.asleep: set[int] = set()
        self.touched: set[int] = set()
        self.next = 1
        self.last = {"epoch": 0, "lsn": 0, "block": 0}
        self.happened: Counter[str] = Counter()
        self.daemon = self.start()
        self.lease = self.daemon.hello()
        self.namespace = self.daemon.namespace()
        self.daemon.write()

    def start(self) -> Daemon:
        """Recover; LSNs, epochs and block ids go on above all that were ever given out."""
        daemon = self.machine.start()
        now = self._numbers(daemon)
        assert all(now[name] > self.last[name] for name in now)
        self.last = now
        return daemon

    def _numbers(self, daemon: Daemon) -> dict[str, int]:
        return {
            "epoch": daemon.state.epoch,
            "lsn": daemon.writer.written_lsn,
            "block": daemon.state.next_block - 1,
        }

    def run(self) -> None:
        verbs = {
            self.begin: 6,
            self.grow: 10,
            self.fork: 2,
            self.roll_back: 2,
            self.suspend: 8,
            self.resume: 8,
            self.release: 4,
            self.write_behind: 3,
            self.checkpoint: 1,
            self.die_soon: 7,
            self.die_now: 1,
            self.die_twice: 1,
        }
        for verb in self.random.choices(list(verbs), list(verbs.values()), k=STEPS):
            verb()
            self.check()
        self.recover()
        first = kept(picture(self.daemon.state))
        self.daemon = self.machine.start()
        assert kept(picture(self.daemon.state)) == first
        self.machine.crash()

    # --- how requests end -------------------------------------------------------------------------

    def attempt(self, request: Callable[[], None], *locals_: int) -> None:
        """Carry out a request; it may be the one during which the daemon dies."""
        self.touched |= set(locals_)
        try:
            request()
            if self.random.random() < 0.6:
                self.daemon.write()
                self.touched.clear()
        except Killed as killed:
            self.happened[f"died {killed}"] += 1
            self.recover()

    def recover(self) -> None:
        """The daemon is dead; start another and compare."""
        self.last = {**self._numbers(self.daemon), "lsn": self.daemon.writer.written_lsn}
        before = self.daemon.written
        assert before is not None
        self.daemon = self.start()
        check_invariants(self.daemon.state)
        self._compare(before, picture(self.daemon.state))
        # What was under way may have survived, in part or not at all.
        for local in sorted(self.touched):
            self.daemon.planner.release(self.lease, [local])
            self.tokens.pop(local, None)
            self.asleep.discard(local)
        self.touched.clear()
        self.daemon.write()

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Recovery keeps all that was written, but for a sequence whose blocks were coming up."""
        before, after = kept(before), kept(after)
        coming = [
            identity
            for identity, (_, suspended, rows) in before["sequences"].items()
            if not suspended and any(before["blocks"][row][8] == NO_SLOT for row in rows)
        ]
        assert set(coming) <= {sequence_id(self.lease, local) for local in self.touched}
        for identity in coming:
            namespace, _, rows = before["sequences"][identity]
            before["sequences"][identity] = (namespace, True, rows)
        active = before.pop("active"), after.pop("active")
        assert coming or active[0] == active[1]
        assert after == before

    # --- crashes ----------------------------------------------------------------------------------

    def die_soon(self) -> None:
        self.machine.countdown.left = self.random.randint(1, 14)

    def die_now(self) -> None:
        self.recover()

    def die_twice(self) -> None:
        """And the second time while recovering, or soon after."""
        before = self.daemon.written
        self.machine.crash()
        self.machine.countdown.left = self.random.randint(1, 4)
        try:
            self.daemon = self.machine.start()
        except Killed:
            self.daemon.written = before
        else:
            self.machine.countdown.left = 0
        self.recover()

    def checkpoint(self) -> None:
        def request() -> None:
            self.daemon.checkpoint()
            self.happened["checkpoint"] += 1

        self.attempt(request)

    # --- work -------------------------------------------------------------------------------------

    def _some(self, locals_: set[int]) -> int | None:
        return self.random.choice(sorted(locals_)) if locals_ else None

    def _text(self, blocks: int) -> list[int]:
        """Whole blocks of few kinds, so that prompts meet again."""
        return [self.random.choice((0, 10)) + t for _ in range(blocks) for t in range(SIZE)]

    def begin(self) -> None:
        tokens = self._text(self.random.randint(0, 3))
        local, self.next = self.next, self.next + 1

        def request() -> None:
            planner = self.daemon.planner
            view = self.daemon.run(
                planner.acquire(self.lease, self.namespace, local, chain_of(tokens))
            )
            self.tokens[local] = tokens[: len(view.slots) * SIZE]
            self.happened["hit"] += bool(self.tokens[local])
            self._grow(local, tokens[len(self.tokens[local]) :])

        self.attempt(request, local)

    def grow(self) -> None:
        local = self._some(set(self.tokens) - self.asleep)
        if local is None:
            return
        if len(self.tokens[local]) % SIZE or self.random.random() < 0.4:
            fresh = [90 + self.random.randint(0, 1) for _ in range(self.random.randint(1, 5))]
        else:
            fresh = self._text(1)
        self.attempt(lambda: self._grow(local, fresh), local)

    def _grow(self, local: int, fresh: list[int]) -> None:
        daemon, tokens = self.daemon, self.tokens[local]
        total = len(tokens) + len(fresh)
        try:
            daemon.run(daemon.planner.reserve(self.lease, local, len(tokens), total))
        except PoolExhausted:
            self.happened["exhausted"] += 1
            return
        daemon.write()  # the worker has its slots, and writes into them
        first = len(tokens) // SIZE
        tokens = self.tokens[local] = tokens + fresh
        full = len(tokens) // SIZE
        if len(tokens) % SIZE:
            daemon.payload(daemon.slots(self.lease, local)[full])[:] = tail_content(tokens)
        if full > first:
            daemon.seal(self.lease, local, tokens, first)

    def fork(self) -> None:
        local = self._some(set(self.tokens) - self.asleep)
        if local is None:
            return
        new, self.next = self.next, self.next + 1

        def request() -> None:
            self.daemon.planner.fork(self.lease, local, new, len(self.tokens[local]))
            self.tokens[new] = list(self.tokens[local])

        self.attempt(request, new, local)

    def roll_back(self) -> None:
        """To whole blocks, so that the content of a tail follows from its tokens alone."""
        local = self._some(set(self.tokens) - self.asleep)
        if local is None:
            return
        keep = self.random.randint(0, len(self.tokens[local]) // SIZE) * SIZE

        def request() -> None:
            self.daemon.planner.truncate(self.lease, local, keep)
            self.tokens[local] = self.tokens[local][:keep]

        self.attempt(request, local)

    def suspend(self) -> None:
        local = self._some(set(self.tokens) - self.asleep)
        if local is None:
            return

        def request() -> None:
            self.daemon.planner.suspend(self.lease, local)
            self.asleep.add(local)

        self.attempt(request, local)

    def resume(self) -> None:
        local = self._some(self.asleep)
        if local is None:
            return

        def request() -> None:
            try:
                self.daemon.run(self.daemon.planner.resume(self.lease, local))
            except PoolExhausted:
                return
            self.asleep.discard(local)
            self.happened["resumed"] += 1

        self.attempt(request, local)

    def release(self) -> None:
        local = self._some(set(self.tokens))
        if local is None:
            return

        def request() -> None:
            self.daemon.planner.release(self.lease, [local])
            del self.tokens[local]
            self.asleep.discard(local)

        self.attempt(request, local)

    def write_behind(self) -> None:
        self.attempt(self.daemon.write_behind)

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        daemon = self.daemon
        check_invariants(daemon.state)
        assert active_without_device_copy(daemon.state) == 0
        assert not any(daemon.counters.checksum_failures.values())
        for slots in daemon.state.slots.values():
            assert slots.held_count == 0
        for local in set(self.tokens) - self.asleep:
            tokens, table = self.tokens[local], daemon.slots(self.lease, local)
            full = len(tokens) // SIZE
            for block in range(full):
                assert np.array_equal(daemon.payload(table[block]), content(tokens, block))
            if len(tokens) % SIZE:
                assert np.array_equal(daemon.payload(table[full]), tail_content(tokens))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_crash_loses_nothing_that_was_acknowledged(folder: Path, seed: int) -> None:
    work = Work(folder, seed)
    try:
        work.run()
    finally:
        work.machine.crash()


def test_the_random_work_meets_what_it_is_about(folder: Path) -> None:
    """Else the test above proves little."""
    happened: Counter[str] = Counter()
    for seed in range(6):
        work = Work(folder / str(seed), 1000 + seed)
        work.run()
        happened += work.happened
    deaths = ("before commit", "after commit", "before write", "after write", "after move")
    for name in ("hit", "resumed", "exhausted", "checkpoint", *(f"died {at}" for at in deaths)):
        assert happened[name], name
