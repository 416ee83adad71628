"""What a run does: follows from a seed alone, and can be cut down to what makes it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

VERBS = {
    "begin": 6,
    "grow": 8,
    "release": 3,
    "suspend": 3,
    "resume": 3,
    "fork": 2,
    "truncate": 2,
    "checkpoint": 3,
    "flush": 1,
    "spare": 1,
    "sleep": 2,
}
WORKERS = 2


@dataclass(frozen=True)
class Step:
    """One act of a worker (or, by its hand, of the daemon's clock)."""

    worker: int
    verb: str
    a: int
    b: int


@dataclass(frozen=True)
class Fault:
    """What the device does: ``kind`` at the ``nth`` call of ``call`` on paths with ``path``.

    "eio", "enospc": the error. "lie": success without the act. "torn": a part, then the crash.
    """

    kind: Literal["eio", "enospc", "lie", "torn"]
    call: str
    path: str
    nth: int
    times: int = 1


@dataclass(frozen=True)
class Life:
    """One daemon: its work, and the call of the machine (or the step of a thread) it dies at."""

    steps: tuple[Step, ...]
    dies_at: int
    dies_by: Literal["kill", "power"]
    faults: tuple[Fault, ...] = ()
    rot: int = 0
    """Bits that flip on the device after the crash."""
    clock_jump_s: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A store's whole history. Sizes are in blocks."""

    durability: Literal["none", "kill", "power"]
    device: int
    host: int
    disk: int
    write: Literal["through", "demote"]
    lives: tuple[Life, ...] = field(default_factory=tuple)

    @property
    def keeps_all(self) -> bool:
        """Whether every block that workers can make has room on disk."""
        return self.disk >= ROOMY


ROOMY = 48


def make_plan(seed: int, *, faults: bool = True, lives: int = 3, steps: int = 40) -> Plan:
    """The plan of a seed."""
    rng = Random(seed)
    return Plan(
        durability=rng.choice(("kill", "kill", "power", "power", "power", "none")),
        device=rng.choice((6, 8, 12)),
        host=rng.choice((0, 0, 3)),
        disk=rng.choice((ROOMY, ROOMY, ROOMY, 6, 12)),
        write=rng.choice(("through", "through", "demote")),
        lives=tuple(_life(rng, faults, steps) for _ in range(rng.randint(1, lives))),
    )


def _life(rng: Random, faults: bool, steps: int) -> Life:
    count = rng.randint(steps // 4, steps)
    return Life(
        steps=tuple(_step(rng) for _ in range(count)),
        dies_at=rng.randint(1, 30 + 5 * count),
        dies_by=rng.choice(("kill", "power")),
        faults=(_fault(rng),) if faults and rng.random() < 0.7 else (),
        rot=rng.choice((1, 3, 10)) if faults and rng.random() < 0.1 else 0,
        clock_jump_s=rng.choice((0, 0, 10**9, -(10**9))),
        seed=rng.getrandbits(32),
    )


def _step(rng: Random) -> Step:
    (verb,) = rng.choices(list(VERBS), list(VERBS.values()))
    return Step(rng.randrange(WORKERS), verb, rng.getrandbits(16), rng.getrandbits(16))


def _fault(rng: Random) -> Fault:
    kind: Literal["eio", "enospc", "lie", "torn"] = rng.choice(("eio", "enospc", "lie", "torn"))
    calls = {
        "eio": ("fdatasync", "pwrite", "pwritev", "preadv", "fsync_dir"),
        "enospc": ("fallocate", "pwrite", "pwritev"),
        "lie": ("pwrite", "pwritev", "fdatasync", "fsync_dir"),
        "torn": ("pwrite", "pwritev"),
    }[kind]
    return Fault(
        kind,
        rng.choice(calls),
        rng.choice(("", ".wal", ".seg", "index")),
        rng.randint(1, 15),
        rng.choice((1, 1, 3, 1000)),
    )


def shrink(plan: Plan, still_fails: Callable[[Plan], bool], attempts: int = 400) -> Plan:
    """A smaller plan that fails as well: fewer lives, faults and steps, as far as that goes."""
    left = attempts
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in _smaller(plan):
            left -= 1
            if left < 0:
                break
            if still_fails(smaller):
                plan, progress = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    lives = plan.lives
    for at in range(len(lives)):
        if len(lives) > 1:
            yield replace(plan, lives=lives[:at] + lives[at + 1 :])
    for at, life in enumerate(lives):
        for simpler in _simpler(life):
            yield replace(plan, lives=(*lives[:at], simpler, *lives[at + 1 :]))


def _simpler(life: Life) -> Iterator[Life]:
    if life.faults:
        yield replace(life, faults=())
    if life.rot:
        yield replace(life, rot=0)
    if life.clock_jump_s:
        yield replace(life, clock_jump_s=0)
    size = len(life.steps)
    width = size
    while width >= 1:
        for start in range(0, size, width):
            yield replace(life, steps=life.steps[:start] + life.steps[start + width :])
        width //= 2
