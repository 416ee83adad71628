"""Many workers at once, every interleaving a seed may pick: bytes, invariants, no deadlock."""

from __future__ import annotations

import os
from random import Random

import pytest
from workers import Plan, Run

KINDS = {
    "calm": {},
    "naps": {"naps": True},
    "pools": {"two_pools": True},
    "roomy": {"roomy": True},
    "rude": {"rude": True},
    "faults": {"faults": True, "two_pools": True},
    "restarts": {"restarts": True},
    "all": {"faults": True, "rude": True, "restarts": True, "two_pools": True},
}


def one_run(kind: str, seed: int, steps: int = 250) -> None:
    """A run of its own world; a failure tells the seed and what came before."""
    random = Random(seed)
    big = 8 if KINDS[kind].get("two_pools") else 0
    plan = Plan(
        device=random.randint(3, 8) + big,
        host=random.choice((0, 2, 2, 5)) + (big // 2 if random.random() < 0.5 else 0),
        disk=1000 if KINDS[kind].get("roomy") else random.choice((0, 3, 8, 24)) + big,
        **KINDS[kind],
    )
    run = Run(seed, plan)
    try:
        run.go(steps)
        run.go(steps)
        run.end()
    except BaseException as error:
        error.add_note(f"kind {kind}, seed {seed}, {plan}")
        error.add_note("\n".join(run.trace))
        error.add_note("under way:\n" + run.scheduler.report())
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_random_interleavings(kind: str) -> None:
    for seed in range(6):
        one_run(kind, seed, steps=200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_interleavings(kind: str) -> None:
    first = int(os.environ.get("TIERKV_SEED", "1000"))
    for seed in range(first, first + int(os.environ.get("TIERKV_RUNS", "2"))):
        one_run(kind, seed)
