"""How long sampled blocks live and lie unused, against a plain account of all of them."""

from __future__ import annotations

import random

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import Tier
from tierkv.core.records import Kind, of_copies
from tierkv.core.residency import NOTES_MAX, SAMPLE, Residency


class World:
    """Blocks in rows, a clock, and what the watcher says of them when it looks at once."""

    def __init__(self, watched_max: int = 1000) -> None:
        self.now_s = 0.0
        self.looking = True
        self.blocks = Blocks()
        self.gone: list[float] = []
        self.left: list[tuple[Tier, float]] = []
        self.reused: list[float] = []
        self.restart(watched_max)

    def restart(self, watched_max: int = 1000) -> None:
        """Another daemon takes over the blocks."""
        self.residency = Residency(self.blocks, watched_max)
        self.residency.on_gone = self.gone.append
        self.residency.on_left = lambda tier, idle_s: self.left.append((tier, idle_s))
        self.residency.on_reused = self.reused.append

    def make(self, first_id: int, rows: list[int], *tiers: Tier) -> None:
        """Fresh blocks in these rows, with copies in these tiers (none: device)."""
        at = np.array(rows)
        self.blocks.id[at] = np.arange(first_id, first_id + len(rows))
        for tier in tiers or (Tier.DEVICE,):
            self.blocks.place(at, tier, at.astype(np.uint32))
        self.residency.born(first_id, at)
        self.look()

    def touch(self, rows: list[int], *, found: bool = False) -> None:
        self.residency.touched(np.array(rows), found=found)
        self.look()

    def drop(self, tier: Tier, rows: list[int]) -> None:
        """Copies leave for want of room; a block without any copy is cleared."""
        at = np.array(rows)
        records = of_copies(Kind.DROP, tier, at, self.blocks.id[at].copy(), at)
        self.blocks.clear(self.blocks.drop(records))
        self.residency.left(tier, records)
        self.look()

    def look(self) -> None:
        if self.looking:
            self.residency.look(self.now_s)


def test_one_block_from_its_first_slot_to_the_loss_of_its_last_copy() -> None:
    world = World()
    world.now_s = 100.0
    world.make(SAMPLE, [7], Tier.DEVICE, Tier.DISK)
    world.now_s = 101.0
    world.touch([7])  # its worker lets go of it
    world.now_s = 111.0
    world.touch([7], found=True)
    world.now_s = 112.0
    world.touch([7])
    world.now_s = 142.0
    world.drop(Tier.DEVICE, [7])
    world.now_s = 172.0
    world.drop(Tier.DISK, [7])
    assert world.reused == [10.0]
    assert world.left == [(Tier.DEVICE, 30.0), (Tier.DISK, 60.0)]
    assert world.gone == [72.0]
    assert len(world.residency) == 0


def test_one_in_so_many_is_watched_wherever_prompts_begin() -> None:
    world = World(watched_max=10_000)
    at = 1
    for length in (1, 3, 64, 500, 61, 122):
        world.make(at, list(range(at, at + length)))
        at += length
    assert len(world.residency) == (at - 1) // SAMPLE


def test_blocks_that_are_not_of_the_sample_leave_no_trace() -> None:
    world = World()
    world.make(SAMPLE + 1, [1, 2, 3])
    world.touch([1, 2, 3], found=True)
    world.drop(Tier.DEVICE, [1, 2, 3])
    assert (world.reused, world.left, world.gone, len(world.residency)) == ([], [], [], 0)


def test_a_row_that_has_another_block_by_now_is_passed_over() -> None:
    world = World()
    world.make(SAMPLE, [3])
    world.now_s, world.looking = 10.0, False
    world.touch([3], found=True)
    world.drop(Tier.DEVICE, [3])
    world.make(2 * SAMPLE, [3])
    world.now_s, world.looking = 20.0, True
    world.look()
    assert world.reused == []
    assert world.left == [(Tier.DEVICE, 20.0)]
    assert len(world.residency) == 1


def test_a_block_from_before_this_daemon_has_no_known_age() -> None:
    world = World()
    world.make(SAMPLE, [3])
    world.restart()
    world.now_s = 10.0
    world.touch([3], found=True)
    world.now_s = 15.0
    world.drop(Tier.DEVICE, [3])
    assert (world.left, world.gone) == ([(Tier.DEVICE, 5.0)], [])


def test_blocks_that_end_unevicted_are_forgotten() -> None:
    world = World()
    for number in range(1, 51):
        world.make(number * SAMPLE, [number])
        world.blocks.clear(np.array([number]))
        world.now_s = float(number)
        world.look()
    assert len(world.residency) <= 1
    assert (world.left, world.gone) == ([], [])


def test_the_table_is_bounded_and_takes_new_blocks_when_old_ones_leave() -> None:
    world = World(watched_max=2)
    for number in (1, 2, 3):
        world.make(number * SAMPLE, [number])
    assert len(world.residency) == 2
    world.now_s = 2.0
    world.drop(Tier.DEVICE, [1])
    world.now_s = 3.0
    world.make(4 * SAMPLE, [4])
    world.now_s = 5.0
    world.drop(Tier.DEVICE, [3, 4])
    assert world.gone == [2.0, 5.0 - 3.0]


def test_notes_do_not_pile_up_between_looks() -> None:
    world = World()
    world.make(SAMPLE, [1])
    world.looking = False
    for _ in range(3 * NOTES_MAX):
        world.touch([1], found=True)
    assert len(world.reused) >= 2 * NOTES_MAX


def test_a_long_random_life_agrees_with_an_account_of_every_block() -> None:
    random.seed(1)
    world = World(watched_max=100_000)
    born: dict[int, float] = {}
    used: dict[int, float] = {}
    rows: dict[int, int] = {}
    free = list(range(2000))
    gone, left, reused = [], [], []
    next_id, now_s = 1, 0.0
    for _ in range(1500):
        now_s += random.random()
        world.now_s = now_s
        match random.choice(["make", "touch", "find", "drop"]):
            case "make" if len(free) >= 30:
                at = [free.pop() for _ in range(random.randint(1, 30))]
                world.make(next_id, at)
                for row in at:
                    rows[next_id], born[next_id], used[next_id] = row, now_s, now_s
                    next_id += 1
            case "touch" | "find" as how if rows:
                some = random.sample(sorted(rows), min(len(rows), 20))
                world.touch([rows[one] for one in some], found=how == "find")
                for one in some:
                    if how == "find" and one % SAMPLE == 0:
                        reused.append(now_s - used[one])
                    used[one] = now_s
            case "drop" if rows:
                some = random.sample(sorted(rows), min(len(rows), 10))
                world.drop(Tier.DEVICE, [rows[one] for one in some])
                for one in some:
                    free.append(rows.pop(one))
                    if one % SAMPLE == 0:
                        left.append((Tier.DEVICE, now_s - used[one]))
                        gone.append(now_s - born[one])
            case _:
                pass
    assert len(gone) > 50
    assert len(reused) > 50
    assert (world.reused, world.left, world.gone) == (reused, left, gone)


def test_a_block_that_leaves_all_tiers_between_two_looks_has_left_each() -> None:
    world = World()
    world.make(SAMPLE, [3], Tier.DEVICE, Tier.HOST)
    world.now_s, world.looking = 4.0, False
    world.drop(Tier.DEVICE, [3])
    world.drop(Tier.HOST, [3])
    world.looking = True
    world.look()
    assert world.left == [(Tier.DEVICE, 4.0), (Tier.HOST, 4.0)]
    assert world.gone == [4.0]
