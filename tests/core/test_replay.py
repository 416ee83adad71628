"""Replaying a log at once leads where its changes lead one by one."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from replaying import check_replay
from world import World

from tierkv.core.ids import Tier, sequence_id
from tierkv.core.invariants import check_invariants
from tierkv.core.records import Kind, Records, blank, join, push
from tierkv.core.replay import replay
from tierkv.core.state import State
from tierkv.errors import ConfigError, InvariantViolation

BLOCK_BYTES = 64
LEASE = 1


def empty() -> State:
    budgets = dict.fromkeys(Tier, 100 * BLOCK_BYTES)
    return State(budgets, lambda _tier, shape: shape.block_bytes)


def record(kind: int, **fields: int) -> Records:
    records = blank(1, Kind.EPOCH)
    records["type"] = kind
    for name, value in fields.items():
        records[name] = value
    return records


OPENING = [
    record(Kind.NAMESPACE, key=0, hash_hi=1, id=BLOCK_BYTES, loc=4),
    record(Kind.NAMESPACE, key=1, hash_hi=2, id=2 * BLOCK_BYTES, loc=4),
    record(Kind.LEASE_OPEN, key=LEASE, id=5),
]


def opened(local: int, *rows: int, namespace: int = 0) -> Records:
    """A sequence that holds these rows."""
    identity = sequence_id(LEASE, local)
    parts = [record(Kind.SEQ_OPEN, id=identity, key=namespace)]
    if rows:
        parts.append(push(identity, np.array(rows, np.uint32)))
    return join(parts)


def closed(local: int) -> Records:
    return record(Kind.SEQ_CLOSE, id=sequence_id(LEASE, local))


def alloc(row: int, block: int, slot: int, namespace: int = 0, tier: int = 0) -> Records:
    return record(Kind.ALLOC, key=row, id=block, aux=namespace, tier=tier, loc=slot)


def seal(row: int, block: int, name: int, *, indexed: bool = True, parent: int = 0) -> Records:
    return record(
        Kind.SEAL, key=row, id=block, hash_lo=name, extra_lo=block, loc=parent, tier=int(indexed)
    )


def place(row: int, block: int, tier: int, slot: int) -> Records:
    return record(Kind.PLACE, key=row, id=block, tier=tier, loc=slot, extra_lo=block)


def drop(row: int, block: int, tier: int, slot: int) -> Records:
    return record(Kind.DROP, key=row, id=block, tier=tier, loc=slot)


def cached(row: int, block: int, name: int, *, behind: tuple[int, int] | None = None) -> list[Any]:
    """A sealed block in the device slot of its row's number, which nobody holds.

    ``behind``: row and id of its parent.
    """
    parents, parent = ((), 0) if behind is None else ((behind[0],), behind[1])
    pushed = push(sequence_id(LEASE, 9), _u32(row))
    begun = join([opened(9, *parents), alloc(row, block, row), pushed])
    return [begun, seal(row, block, name, parent=parent), closed(9)]


def _u32(*rows: int) -> Any:
    return np.array(rows, np.uint32)


CASES: dict[str, list[Records]] = {
    "a block is cached": cached(3, 1, 77),
    "an open block goes with its sequence": [
        join([opened(1), alloc(0, 1, 0), push(sequence_id(LEASE, 1), _u32(0))]),
        closed(1),
    ],
    "a row is used again": [
        *cached(3, 1, 77),
        drop(3, 1, 0, 3),
        *cached(3, 2, 78),
    ],
    "a row is used again in another pool": [
        *cached(3, 1, 77),
        join(
            [
                drop(3, 1, 0, 3),
                opened(1, namespace=1),
                alloc(3, 2, 3, namespace=1),
                push(sequence_id(LEASE, 1), _u32(3)),
            ]
        ),
    ],
    "a name moves to a newer block, and the older one goes": [
        *cached(3, 1, 77),
        *cached(4, 2, 77),
    ],
    "a name moves to a newer block, and the older one stays as it is held": [
        join([opened(1), alloc(3, 1, 3), push(sequence_id(LEASE, 1), _u32(3))]),
        seal(3, 1, 77),
        *cached(4, 2, 77),
    ],
    "the newer block goes, too, and nobody has the name": [
        join([opened(1), alloc(3, 1, 3), push(sequence_id(LEASE, 1), _u32(3))]),
        seal(3, 1, 77),
        *cached(4, 2, 77),
        drop(4, 2, 0, 4),
    ],
    "a twin that is not indexed takes nobody's name": [
        *cached(3, 1, 77),
        join([opened(1), alloc(4, 2, 4), push(sequence_id(LEASE, 1), _u32(4))]),
        seal(4, 2, 77, indexed=False),
    ],
    "copies come and go": [
        *cached(3, 1, 77),
        place(3, 1, 2, 8),
        drop(3, 1, 0, 3),
        place(3, 1, 0, 6),
        place(3, 1, 1, 0),
        drop(3, 1, 2, 8),
    ],
    "a held block that loses its last copy loses its name for good": [
        join([opened(1), alloc(3, 1, 3), push(sequence_id(LEASE, 1), _u32(3))]),
        seal(3, 1, 77),
        drop(3, 1, 0, 3),
        place(3, 1, 2, 8),
    ],
    "a checksum is the last one that was said": [
        join([opened(1), alloc(3, 1, 3), push(sequence_id(LEASE, 1), _u32(3))]),
        place(3, 1, 1, 5),
        seal(3, 1, 77),
    ],
    "a lease takes its sequences along": [
        *cached(2, 9, 70),
        join([opened(1), alloc(3, 1, 3), push(sequence_id(LEASE, 1), _u32(2, 3))]),
        record(Kind.LEASE_CLOSE, key=LEASE),
        record(Kind.LEASE_OPEN, key=LEASE + 1, id=6),
    ],
    "tables are swapped, cut, suspended and resumed": [
        *cached(2, 8, 70),
        *cached(3, 9, 71, behind=(2, 8)),
        *cached(4, 10, 72),
        opened(1, 2),
        opened(2, 2, 3),
        record(Kind.SEQ_SUSPEND, id=sequence_id(LEASE, 2)),
        record(Kind.SEQ_SWAP, id=sequence_id(LEASE, 1), loc=0, key=4),
        record(Kind.SEQ_RESUME, id=sequence_id(LEASE, 2)),
        record(Kind.SEQ_SUSPEND, id=sequence_id(LEASE, 1)),
        record(Kind.SEQ_TRUNCATE, id=sequence_id(LEASE, 2), loc=1),
    ],
    "a sequence's name is used again": [*cached(2, 8, 70), opened(1, 2), closed(1), opened(1)],
    "records that may be skipped are skipped": [record(200, id=3), *cached(3, 1, 77)],
    "an epoch begins": [record(Kind.EPOCH, id=4), record(Kind.EPOCH, id=5)],
}


@pytest.mark.parametrize("case", CASES)
def test_at_once_is_as_one_by_one(case: str) -> None:
    commits = [*OPENING, *CASES[case]]
    for seed in range(30):
        check_replay(commits, empty(), empty(), Random(seed))


def test_a_long_log_is_as_one_by_one() -> None:
    """Prefixes shared by many, tiers too small, blocks found again in every tier."""
    random = Random(7)
    world = World(12, 6, 30)
    held: list[int] = []
    for local in range(1, 400):
        tokens = [random.randrange(3) for _ in range(random.randrange(1, 5)) for _ in range(4)]
        world.store(local, tokens)
        held.append(local)
        while len(held) > 2:
            gone = held.pop(random.randrange(len(held)))
            world.planner.release(world.lease, [gone])
        if random.random() < 0.3:
            for rows, ids in world.planner.take_sealed():
                world.run(world.placement.clean_down(rows, ids))
    for seed in range(5):
        check_replay(world.log, world.empty(), world.empty(), Random(seed))


def test_nothing_is_replayed_from_nothing() -> None:
    state = empty()
    replay(state, blank(0, Kind.EPOCH))
    assert state.take_changes().rows.tolist() == []


HELD = [join([opened(1), alloc(3, 1, 3), push(sequence_id(LEASE, 1), _u32(3))]), seal(3, 1, 77)]

CONTRADICTIONS: dict[str, Records] = {
    "a table that is not open": push(sequence_id(LEASE, 7), _u32(3)),
    "closing what is not open": closed(7),
    "a sequence of no lease": record(Kind.SEQ_OPEN, id=77 << 32),
    "opening twice": opened(1),
    "suspending twice": join([record(Kind.SEQ_SUSPEND, id=sequence_id(LEASE, 1))] * 2),
    "resuming the active": record(Kind.SEQ_RESUME, id=sequence_id(LEASE, 1)),
    "a lease that is not open": record(Kind.LEASE_CLOSE, key=44),
    "a row nobody has": push(sequence_id(LEASE, 1), _u32(10**6)),
    "a row without a block": place(90, 5, 1, 0),
    "another block's copy": place(3, 2, 1, 0),
    "sealing twice": seal(3, 1, 78),
    "placing twice": place(3, 1, 0, 9),
    "dropping what is elsewhere": drop(3, 1, 0, 4),
    "dropping what is not there": drop(3, 1, 1, 0),
    "a slot of another block": join(
        [opened(2), alloc(4, 2, 3), push(sequence_id(LEASE, 2), _u32(4))]
    ),
    "a slot beyond the tier": place(3, 1, 1, 5000),
    "a tier that does not exist": place(3, 1, 7, 0),
    "a namespace that does not exist": join(
        [opened(2), alloc(4, 2, 4, namespace=9), push(sequence_id(LEASE, 2), _u32(4))]
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contradiction_is_found(case: str) -> None:
    sound = join([*OPENING, *HELD])
    with pytest.raises(InvariantViolation):
        replay_and_check(empty(), join([sound, CONTRADICTIONS[case]]))
    state = empty()
    replay_and_check(state, sound)
    with pytest.raises(InvariantViolation):
        replay_and_check(state, CONTRADICTIONS[case])


def replay_and_check(state: State, records: Records) -> None:
    """What recovery does."""
    replay(state, records)
    check_invariants(state)


@pytest.mark.parametrize("case", ["another block's copy", "closing what is not open"])
def test_a_log_of_a_newer_version_is_not_taken_for_damage(case: str) -> None:
    with pytest.raises(ConfigError, match="newer tierkv"):
        replay(empty(), join([*OPENING, *HELD, CONTRADICTIONS[case], record(99)]))
