"""Interleavings written out by hand: each was, or could have been, a way to lose bytes."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from scheduler import Scheduler, SlowTiers, check_nothing_leaked
from world import World

from tierkv.core.ids import Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.storing import ToStore
from tierkv.errors import CorruptionError, InvalidArgument, PoolExhausted, UnknownSequence

TOKENS = list(range(1000, 1040))
ENTRIES_READ, PAYLOAD_READ, WRITTEN = 2, 3, 4
"""Moments of a move."""


class Stage:
    """A small world whose flows move on only when they are told to."""

    def __init__(self, device: int, host: int, disk: int) -> None:
        tiers = SlowTiers(4)
        self.world = World(device, host, disk, tiers=tiers)
        self.scheduler = Scheduler(self.world, tiers, Random(0))
        self.answers: dict[str, Any] = {}
        self.plan = self.world.planner
        self.lease = self.world.lease

    def start(self, name: str, flow: Any) -> None:
        self.scheduler.start(name, flow, lambda result: self.answers.update({name: result}))

    def go(self, name: str, moments: int = 10_000) -> Any:
        """Move one flow on, to its end or until it must wait; its answer, if it has ended."""
        for _ in range(moments):
            tasks = [task for task in self.scheduler.tasks if task.name == name and task.runnable]
            if not tasks:
                break
            self.scheduler.advance(tasks[0])
            check_invariants(self.world.state)
        return self.answers.get(name)

    def finish(self) -> None:
        self.scheduler.drain(lambda: check_invariants(self.world.state))
        check_nothing_leaked(self.world)

    def begin(self, local: int, tokens: list[int] | None = None) -> Any:
        chain = self.world.chain(tokens or [])
        return self.world.run(self.plan.acquire(self.lease, self.world.namespace, local, chain))

    def open(self, local: int, tokens: int, payload: bytes) -> Any:
        """A sequence with one open block."""
        self.begin(local)
        view = self.reserve(local, 0, tokens)
        self.world.write(view.slots, 0, [payload])
        return view

    def reserve(self, local: int, written: int, total: int) -> Any:
        return self.world.run(self.plan.reserve(self.lease, local, written, total))

    def resume(self, local: int) -> Any:
        return self.world.run(self.plan.resume(self.lease, local))

    def seal(self, local: int, view: Any, tokens: list[int], payloads: list[bytes]) -> Any:
        sums = self.world.write(view.slots, 0, payloads)
        return self.plan.seal(self.lease, local, 0, self.world.chain(tokens), *sums)

    def rows(self, local: int) -> Any:
        return self.plan.sequence(self.lease, local).rows

    def damage(self, tier: Tier, row: int) -> None:
        slot = self.world.state.blocks.slot[tier][row]
        self.world.tiers.at(tier, 0, slot).payload += b"!"

    def push_out(self, blocks: int) -> None:
        """Fill the device tier for a moment, so that all inactive blocks leave it."""
        self.begin(99)
        self.reserve(99, 0, 4 * blocks)
        self.plan.release(self.lease, [99])


def test_a_copy_of_an_open_block_does_not_count_once_the_block_may_be_written_again() -> None:
    stage = Stage(2, 2, 0)
    view = stage.open(1, 2, b"half")
    stage.plan.suspend(stage.lease, 1)
    stage.begin(2)
    stage.start("reserve", stage.plan.reserve(stage.lease, 2, 0, 8))
    stage.go("reserve", PAYLOAD_READ)
    view = stage.resume(1)
    stage.world.write(view.slots, 0, [b"more than half"])
    assert isinstance(stage.go("reserve"), PoolExhausted)
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    assert stage.world.payload(stage.resume(1).slots, 0) == b"more than half"
    stage.finish()


def test_a_copy_of_an_open_block_that_was_sealed_meanwhile_does_not_condemn_it() -> None:
    stage = Stage(2, 2, 0)
    stage.open(1, 2, b"half")
    stage.plan.suspend(stage.lease, 1)
    stage.begin(2)
    stage.start("reserve", stage.plan.reserve(stage.lease, 2, 0, 8))
    stage.go("reserve", PAYLOAD_READ)
    view = stage.resume(1)
    stage.world.run(stage.seal(1, view, TOKENS[:4], [b"whole"]))
    stage.plan.suspend(stage.lease, 1)
    stage.go("reserve")
    assert stage.world.payload(stage.resume(1).slots, 0) == b"whole"
    assert stage.world.counters.checksum_failures["device"] == 0
    stage.finish()


def test_a_copy_of_the_payload_before_a_refresh_does_not_condemn_the_new_one() -> None:
    stage = Stage(2, 1, 1)
    stage.world.store(1, TOKENS[:4], b"old ")
    row = stage.rows(1)
    ids = stage.world.state.blocks.id[row].copy()
    stage.plan.release(stage.lease, [1])
    stage.push_out(2)
    blocks = stage.world.state.blocks
    assert blocks.best_tier(row) == Tier.HOST
    stage.start("write-behind", stage.world.placement.clean_down(row, ids))
    stage.go("write-behind", PAYLOAD_READ)
    view = stage.open(2, 4, b"")
    stage.world.run(stage.seal(2, view, TOKENS[:4], [b"new"]))
    assert stage.rows(2) == row
    stage.plan.suspend(stage.lease, 2)
    stage.push_out(2)
    assert blocks.best_tier(row) == Tier.HOST
    stage.go("write-behind")
    assert stage.world.payload(stage.resume(2).slots, 0) == b"new"
    stage.finish()


def test_a_resume_that_is_repeated_waits_for_the_blocks_too() -> None:
    stage = Stage(2, 2, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    stage.start("first", stage.plan.resume(stage.lease, 1))
    stage.go("first", 1)
    stage.start("again", stage.plan.resume(stage.lease, 1))
    assert stage.answers == {}
    stage.finish()
    slots = stage.answers["first"].slots.tolist()
    assert stage.answers["again"].slots.tolist() == slots
    assert set(slots) == {0, 1}


@pytest.mark.parametrize("verb", ["reserve", "seal", "fork"])
def test_verbs_on_a_sequence_that_comes_up_are_refused(verb: str) -> None:
    stage = Stage(2, 2, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    stage.plan.truncate(stage.lease, 1, 6)
    stage.start("resume", stage.plan.resume(stage.lease, 1))
    stage.go("resume", 1)
    zero = np.zeros(0, np.uint64)
    asks = {
        "reserve": lambda: stage.reserve(1, 6, 8),
        "seal": lambda: stage.world.run(
            stage.plan.seal(stage.lease, 1, 0, stage.world.chain([]), zero, zero)
        ),
        "fork": lambda: stage.plan.fork(stage.lease, 1, 2, 6),
    }
    with pytest.raises(InvalidArgument, match="coming up"):
        asks[verb]()
    stage.finish()


def test_a_sequence_suspended_while_it_comes_up_stays_suspended() -> None:
    stage = Stage(2, 2, 0)
    stage.open(1, 2, b"half")
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    stage.start("resume", stage.plan.resume(stage.lease, 1))
    stage.go("resume", PAYLOAD_READ)
    stage.plan.suspend(stage.lease, 1)
    assert isinstance(stage.go("resume"), InvalidArgument)
    stage.push_out(2)
    assert stage.world.payload(stage.resume(1).slots, 0) == b"half"
    stage.finish()


def test_an_acquire_does_not_cut_a_sequence_that_another_request_began_anew() -> None:
    stage = Stage(4, 4, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.release(stage.lease, [1])
    stage.push_out(4)
    stage.damage(Tier.HOST, stage.world.state.live_rows()[0])
    chain = stage.world.chain(TOKENS[:8])
    stage.start("acquire", stage.plan.acquire(stage.lease, stage.world.namespace, 2, chain))
    stage.go("acquire", PAYLOAD_READ)
    stage.plan.release(stage.lease, [2])
    stage.open(2, 4, b"mine")
    assert isinstance(stage.go("acquire"), UnknownSequence)
    assert len(stage.rows(2)) == 1
    stage.finish()


def test_an_acquire_ends_when_its_worker_has_died() -> None:
    stage = Stage(2, 4, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.release(stage.lease, [1])
    stage.push_out(2)
    stage.open(3, 4, b"takes one of two slots")
    other = stage.plan.open_lease(b"u" * 16, 1, 2, 3).id
    chain = stage.world.chain(TOKENS[:8])
    stage.start("acquire", stage.plan.acquire(other, stage.world.namespace, 1, chain))
    stage.go("acquire", 1)
    stage.plan.close_lease(other)
    stage.finish()


@pytest.mark.parametrize("cold", [False, True])
def test_sealing_a_block_that_a_fork_holds_too_keeps_both_tables_sound(cold: bool) -> None:
    stage = Stage(6, 6, 0)
    stage.world.store(1, TOKENS[:4])
    stage.plan.release(stage.lease, [1])
    if cold:
        stage.push_out(6)
    stage.begin(2)
    view = stage.reserve(2, 0, 8)
    stage.plan.fork(stage.lease, 2, 3, 8)
    for local in (2, 3):
        stage.world.run(stage.seal(local, view, TOKENS[:8], [b"first", b"second"]))
        check_invariants(stage.world.state)
    assert stage.rows(2).tolist() == stage.rows(3).tolist()
    view = stage.begin(4, TOKENS[:4])
    assert len(view.slots) == 1
    stage.finish()


def test_sealing_a_block_that_a_fork_holds_too_hides_nothing_that_is_cached() -> None:
    stage = Stage(8, 0, 8)
    world, payloads = stage.world, [b"one", b"two", b"three"]
    stage.begin(1)
    view = stage.reserve(1, 0, 8)
    stage.plan.fork(stage.lease, 1, 2, 8)
    stage.begin(3)
    world.run(stage.seal(3, stage.reserve(3, 0, 12), TOKENS[:12], payloads))
    world.run(stage.seal(1, view, TOKENS[:4] + TOKENS[20:24], [b"one", b"other"]))
    assert len(stage.begin(4, TOKENS[:12]).slots) == 3
    stage.finish()


def test_two_forks_may_seal_their_common_block_at_the_same_time() -> None:
    stage = Stage(4, 0, 4)
    stage.world.store(1, TOKENS[:4])
    stage.plan.release(stage.lease, [1])
    stage.push_out(4)
    view = stage.open(2, 4, b"")
    stage.plan.fork(stage.lease, 2, 3, 4)
    for local in (2, 3):
        stage.start(f"seal {local}", stage.seal(local, view, TOKENS[:4], [b"same"]))
    stage.finish()
    assert stage.answers["seal 2"].sealed == stage.answers["seal 3"].sealed == 1


def test_a_sequence_that_was_cut_while_it_is_sealed_is_looked_at_again() -> None:
    stage = Stage(6, 6, 0)
    stage.world.store(1, TOKENS[:12])
    stage.plan.release(stage.lease, [1])
    stage.push_out(6)
    chain = stage.world.chain(TOKENS[:12])
    stage.begin(2, TOKENS[:4])
    view = stage.reserve(2, 4, 12)
    stage.start("acquire", stage.plan.acquire(stage.lease, stage.world.namespace, 3, chain))
    stage.go("acquire", 1)
    sums = stage.world.write(view.slots, 1, [b"b", b"c"])
    stage.start("seal", stage.plan.seal(stage.lease, 2, 1, chain.part(1, 3), *sums))
    stage.plan.truncate(stage.lease, 2, 0)
    stage.go("acquire")
    assert isinstance(stage.go("seal"), InvalidArgument)
    stage.finish()


def test_a_block_is_not_sealed_while_its_sequence_comes_up_again() -> None:
    stage = Stage(4, 0, 8)
    stage.world.store(1, TOKENS[:4])
    stage.plan.release(stage.lease, [1])
    stage.push_out(4)
    view = stage.open(2, 4, b"")
    stage.start("seal", stage.seal(2, view, TOKENS[:4], [b"whole"]))
    stage.go("seal", 1)
    stage.plan.suspend(stage.lease, 2)
    stage.push_out(4)
    stage.start("resume", stage.plan.resume(stage.lease, 2))
    stage.go("resume", 1)
    assert isinstance(stage.go("seal"), InvalidArgument)
    stage.finish()
    assert stage.world.payload(stage.answers["resume"].slots, 0) == b"whole"


def test_a_block_that_is_copied_on_write_does_not_leave_its_slot() -> None:
    stage = Stage(4, 4, 0)
    stage.open(1, 2, b"half")
    stage.plan.fork(stage.lease, 1, 2, 2)
    stage.start("copy", stage.plan.reserve(stage.lease, 2, 2, 4))
    stage.go("copy", ENTRIES_READ)
    stage.plan.suspend(stage.lease, 1)
    stage.plan.suspend(stage.lease, 2)
    stage.begin(3)
    stage.start("other", stage.plan.reserve(stage.lease, 3, 0, 12))
    stage.go("other")
    if "other" in stage.answers:
        stage.world.write(stage.answers["other"].slots, 0, [b"other"] * 3)
        stage.plan.release(stage.lease, [3])
    stage.start("resume", stage.plan.resume(stage.lease, 2))
    stage.go("resume")
    stage.finish()
    view = stage.plan.table(stage.plan.sequence(stage.lease, 2))
    assert stage.world.payload(view.slots, 0) == b"half"


def test_a_block_that_is_sealed_does_not_take_an_unverified_twin() -> None:
    stage = Stage(4, 0, 0)
    stage.world.store(1, TOKENS[:4])
    row = stage.rows(1)
    stage.plan.release(stage.lease, [1])
    stage.world.placement.doubt.mark(row)
    stage.damage(Tier.DEVICE, int(row[0]))
    view = stage.open(2, 4, b"")
    view = stage.world.run(stage.seal(2, view, TOKENS[:4], [b"mine"]))
    assert stage.world.payload(view.slots, 0) == b"mine"
    stage.finish()


def test_a_damaged_copy_is_not_taken_from_the_worker_that_has_it_mapped() -> None:
    stage = Stage(4, 0, 0)
    view = stage.world.store(1, TOKENS[:4])
    stage.world.placement.doubt.mark(stage.rows(1))
    stage.damage(Tier.DEVICE, int(stage.rows(1)[0]))
    other = stage.plan.open_lease(b"u" * 16, 1, 2, 3).id
    chain = stage.world.chain(TOKENS[:4])
    stage.start("acquire", stage.plan.acquire(other, stage.world.namespace, 1, chain))
    stage.go("acquire", 1)
    stage.plan.close_lease(other)
    stage.finish()
    assert stage.plan.table(stage.plan.sequence(stage.lease, 1)).slots.tolist() == [view.slots[0]]


def test_doubt_ends_when_a_block_comes_up_anew() -> None:
    stage = Stage(2, 2, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.suspend(stage.lease, 1)
    stage.world.placement.doubt.mark(stage.rows(1))
    stage.push_out(2)
    assert len(stage.resume(1).slots) == 2
    stage.finish()


def test_doubt_does_not_pass_to_the_next_block_in_a_row() -> None:
    stage = Stage(1, 0, 0)
    stage.world.store(1, TOKENS[:4])
    row = stage.rows(1)
    stage.plan.release(stage.lease, [1])
    stage.world.placement.doubt.mark(row)
    stage.open(2, 2, b"half")
    assert stage.rows(2) == row
    stage.plan.suspend(stage.lease, 2)
    assert stage.world.payload(stage.resume(2).slots, 0) == b"half"
    stage.finish()


def test_an_acquire_repeated_after_a_restart_is_served_as_far_as_it_fits() -> None:
    stage = Stage(2, 4, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    stage.open(2, 4, b"takes one of two slots")
    assert len(stage.begin(1, TOKENS[:12]).slots) == 1
    stage.finish()


def test_a_damaged_block_that_must_be_copied_is_an_error_and_no_endless_loop() -> None:
    stage = Stage(4, 0, 0)
    stage.world.store(1, TOKENS[:8])
    stage.plan.truncate(stage.lease, 1, 6)
    stage.damage(Tier.DEVICE, int(stage.rows(1)[1]))
    stage.start("reserve", stage.plan.reserve(stage.lease, 1, 6, 8))
    assert isinstance(stage.go("reserve", 100), CorruptionError)
    stage.finish()


def test_an_open_block_before_a_lost_one_forgets_its_copies() -> None:
    stage = Stage(2, 0, 4)
    view = stage.open(1, 8, b"half")
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    stage.damage(Tier.DISK, int(stage.rows(1)[1]))
    with pytest.raises(CorruptionError):
        stage.resume(1)
    view = stage.resume(1)
    stage.world.write(view.slots, 0, [b"more than half"])
    stage.plan.suspend(stage.lease, 1)
    stage.push_out(2)
    assert stage.world.payload(stage.resume(1).slots, 0) == b"more than half"
    stage.finish()


def test_blocks_that_cannot_go_down_do_not_hide_those_that_can_just_go() -> None:
    stage = Stage(4, 0, 1)
    stage.world.store(1, TOKENS[:8])
    stage.plan.suspend(stage.lease, 1)
    stage.world.store(2, [7] * 8)
    stage.plan.release(stage.lease, [2])
    stage.begin(3)
    assert len(stage.reserve(3, 0, 12).slots) == 3
    stage.finish()


def test_an_optional_copy_does_not_take_the_place_of_one_that_lets_a_block_leave() -> None:
    stage = Stage(2, 0, 1)
    stage.world.store(1, TOKENS[:4])
    rows = stage.rows(1)
    stage.plan.suspend(stage.lease, 1)
    ids = stage.world.state.blocks.id[rows]
    assert stage.world.run(stage.world.placement.clean_down(rows, ids)) == 1
    stage.world.store(2, [7] * 4)
    stage.plan.release(stage.lease, [2])
    stage.world.placement.touch(rows)
    stage.begin(3)
    assert len(stage.reserve(3, 0, 8).slots) == 2
    stage.finish()


def names(count: int) -> list[int]:
    return TOKENS[: 4 * count]


@pytest.mark.parametrize("verb", ["seal", "store"])
def test_blocks_that_another_worker_seals_meanwhile_stay_the_ones_that_are_found(verb: str) -> None:
    """Whoever replaced one by its own would hide all that the other had cached behind it."""
    stage = Stage(8, 0, 8)
    world, payloads = stage.world, [b"one", b"two", b"three"]
    views = {}
    for local in (1, 2, 3):
        stage.begin(local)
        views[local] = stage.reserve(local, 0, 12 if local == 2 else 8)
    world.run(stage.seal(3, views[3], names(1), payloads[:1]))
    stage.plan.release(stage.lease, [3])
    stage.push_out(3)  # the first block is on disk only, where it must be proven
    if verb == "seal":
        flow = stage.seal(1, views[1], names(2), payloads[:2])
    else:
        sums = world.write(views[1].slots, 0, payloads[:2])
        wanted = ToStore(1, 4, world.chain(names(2)), 0, *sums, 2)
        flow = stage.plan.store(stage.lease, world.namespace, wanted)
    stage.start("first", flow)
    assert stage.go("first", 1) is None
    world.run(stage.seal(2, views[2], names(3), payloads))
    stage.finish()
    assert not isinstance(stage.answers["first"], Exception)
    assert len(stage.begin(5, names(3)).slots) == 3
