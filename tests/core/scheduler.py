"""Many flows over one world, their effects in any order: a daemon whose threads obey a seed.

An effect happens in several moments, as it does on real threads: a move reads the source's entries
at one, the payloads at another, writes the target at a third, and its result reaches the flow even
later. Whatever else the seed picks happens in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from copy import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from world import FakeTiers, World, checksum

from tierkv.core.effects import Check, Effect, Headers, Move, Moved, ReadHeaders, Wait
from tierkv.core.ids import Tier
from tierkv.core.placement import Placement
from tierkv.core.slots import HELD
from tierkv.errors import InvariantViolation, TierkvError

Job = Generator[None, None, Any]
TURNS_MAX = 400
"""A flow that was resumed that often makes no progress."""


class SlowTiers(FakeTiers):
    """Fake tiers whose effects take several moments.

    ``writable`` says whether the slots of a move's target are still the move's own. ``fault`` may
    return an error for a write to disk; a part of it is written all the same.
    """

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self.writable: Callable[[Move], bool] = lambda _move: True
        self.fault: Callable[[], TierkvError | None] = lambda: None

    def begin(self, effect: Effect) -> Job:
        """The effect as a generator that yields between its moments and returns the result."""
        if isinstance(effect, Move):
            return self._slow_move(effect)
        assert isinstance(effect, Check | ReadHeaders)
        return self._slow_read(effect)

    def _slow_read(self, effect: Check | ReadHeaders) -> Generator[None, None, Any]:
        yield
        result = self.perform(effect)
        assert isinstance(result, np.ndarray | Headers)
        yield
        return result

    def _slow_move(self, move: Move) -> Generator[None, None, Moved]:
        yield
        sources = [(move.source, move.pool, int(slot)) for slot in move.source_slots]
        targets = [(move.target, move.pool, int(slot)) for slot in move.target_slots]
        if move.target is not Tier.DISK:
            assert self.writable(move), f"{move} empties slots that are not its own"
            for place in targets:
                self.at(*place).id = 0
        entries = [copy(self.at(*place)) for place in sources]
        yield
        payloads = [self.at(*place).payload for place in sources]
        yield
        assert self.writable(move), f"{move} writes to slots that are not its own"
        error = self.fault() if move.target is Tier.DISK else None
        ok, sums = [], []
        for name, entry, payload, place in zip(move.ids, entries, payloads, targets, strict=True):
            found = checksum(payload)
            stated = entry.sums if entry.sums != (0, 0) else found
            good = entry.id == name and stated == found
            if good:
                written = self.at(*place)
                written.id, written.tokens, written.extra = entry.id, entry.tokens, entry.extra
                written.sums, written.payload = stated, payload
            ok.append(good)
            sums.append(stated)
            if error is not None:
                raise error
        yield
        pairs = np.array(sums, np.uint64).reshape(-1, 2)
        return Moved(np.array(ok, bool), pairs[:, 0].copy(), pairs[:, 1].copy())


class Deadlock(AssertionError):
    """Flows wait, and nothing is left that could wake them."""


@dataclass
class Task:
    """One flow on its way."""

    name: str
    flow: Any
    done: Callable[[Any], None]
    weight: float
    effect: Effect | None = None
    job: Job | None = None
    turns: int = 0

    @property
    def runnable(self) -> bool:
        return not isinstance(self.effect, Wait) or self.effect.signal.done


@dataclass
class Scheduler:
    """Starts flows, and moves one of them on by one moment at a time."""

    world: World
    tiers: SlowTiers
    random: Random
    tasks: list[Task] = field(default_factory=list)

    def start(self, name: str, flow: Any, done: Callable[[Any], None]) -> None:
        """Run a flow up to its first effect, as the daemon does. ``done`` gets result or error."""
        task = Task(name, flow, done, self.random.choice((1.0, 1.0, 0.2, 0.03)))
        self.tasks.append(task)
        self._resume(task, None)

    def step(self) -> bool:
        """Move one flow on by one moment; False if there is none. Raises Deadlock."""
        if not self.tasks:
            return False
        ready = [task for task in self.tasks if task.runnable]
        if not ready:
            raise Deadlock(f"nobody can go on:\n{self.report()}")
        (task,) = self.random.choices(ready, [task.weight for task in ready])
        self.advance(task)
        return True

    def advance(self, task: Task) -> None:
        """Move a flow on by one moment."""
        if isinstance(task.effect, Wait):
            if not task.runnable:
                raise Deadlock(f"{task.name} cannot go on:\n{self.report()}")
            self._resume(task, None)
            return
        assert task.job is not None
        try:
            next(task.job)
        except StopIteration as stop:
            self._resume(task, stop.value)
        except TierkvError as error:
            self._resume(task, error)

    def drain(self, check: Callable[[], None] = lambda: None) -> None:
        """Go on until every flow has ended."""
        while self.step():
            check()

    def report(self) -> str:
        """Who waits for what, a line per flow."""
        names = _signal_names(self.world.placement)
        lines = []
        for task in self.tasks:
            effect = task.effect
            if isinstance(effect, Wait):
                what = names.get(id(effect.signal), "a signal that nobody will set")
                what = "a signal that is set" if effect.signal.done else what
            else:
                what = repr(effect)
            lines.append(f"  {task.name} waits for {what} (turn {task.turns})")
        return "\n".join(lines)

    def _resume(self, task: Task, result: Any) -> None:
        task.turns += 1
        if task.turns > TURNS_MAX:
            raise Deadlock(f"{task.name} makes no progress:\n{self.report()}")
        try:
            if isinstance(result, TierkvError):
                task.effect = task.flow.throw(result)
            else:
                task.effect = task.flow.send(result)
        except StopIteration as stop:
            self._end(task, stop.value)
        except InvariantViolation:
            raise
        except TierkvError as error:
            self._end(task, error)
        else:
            task.job = None if isinstance(task.effect, Wait) else self.tiers.begin(task.effect)

    def _end(self, task: Task, result: Any) -> None:
        self.tasks.remove(task)
        task.done(result)


def _signal_names(placement: Placement) -> dict[int, str]:
    names = {}
    for tier in Tier:
        names[id(placement.holds[tier].released())] = (
            f"copies in flight from {tier.label}: rows {placement.holds[tier].rows().tolist()}"
        )
        if (signal := placement._making_room[tier]) is not None:
            names[id(signal)] = f"whoever makes room in {tier.label}"
    for row, signal in placement._arriving.items():
        names[id(signal)] = f"row {row} on its way up"
    return names


def check_nothing_leaked(world: World) -> None:
    """What must hold when no flow is under way: nothing is promised, busy, or awaited."""
    placement, state = world.placement, world.state
    for (tier, pool), slots in state.slots.items():
        assert slots.held_count == 0, f"{tier.label} pool {pool}: {slots.held_count} slots held"
        assert not (slots._is == HELD).any()
    assert state.row_set.held_count == 0
    for tier in Tier:
        assert not len(placement.holds[tier].rows()), f"held in {tier.label}"
        assert placement._making_room[tier] is None
    assert not placement._arriving
