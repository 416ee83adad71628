"""What cached blocks cost: bytes of memory each, and no Python object."""

from __future__ import annotations

import gc

import numpy as np

from tierkv.core.counters import Counters
from tierkv.core.ids import I64, Tier
from tierkv.core.placement import Placement
from tierkv.core.policy import Lru
from tierkv.core.records import Kind, Records, blank, join
from tierkv.core.state import PoolShape, State
from tierkv.manager import KVCacheManager  # noqa: F401  # objects of its imports are not counted
from tierkv.tiers.tables import ArenaTables

BYTES_PER_BLOCK_MAX = 110
BLOCKS = 200_000
AT_ONCE = 1000
SHAPE = PoolShape(64, 16)


def cached(rows: I64, random: np.random.Generator) -> Records:
    """New blocks that are on disk and can be found."""
    allocated, sealed = blank(len(rows), Kind.ALLOC), blank(len(rows), Kind.SEAL)
    for records in (allocated, sealed):
        records["key"], records["id"] = rows, rows + 1
    allocated["tier"], allocated["loc"] = Tier.DISK, rows
    sealed["hash_hi"], sealed["hash_lo"] = random.integers(0, 2**64, (2, len(rows)), np.uint64)
    sealed["tier"] = 1
    return join([allocated, sealed])


def filled(blocks: int) -> Placement:
    """A state of so many blocks on disk, made in small steps, in the order of eviction."""
    state = State(dict.fromkeys(Tier, 64 * blocks), lambda _tier, shape: shape.block_bytes)
    policies = {tier: Lru(state.rows_room) for tier in Tier}
    placement = Placement(state, ArenaTables({}), policies, state.commit, Counters())
    random = np.random.default_rng(1)
    state.add_namespace(0, bytes(16), SHAPE)
    for at in range(0, blocks, AT_ONCE):
        rows = np.arange(at, at + AT_ONCE)
        state.apply(cached(rows, random))
        # All of them have been in the faster tiers, some still are.
        for tier in (Tier.DEVICE, Tier.HOST):
            policies[tier].touch(rows)
            policies[tier].forget(rows[10:])
        placement.touch(rows)
        placement.touch(random.permutation(at + AT_ONCE)[:AT_ONCE])
        state.take_changes()
    return placement


def test_a_block_takes_110_bytes_at_most() -> None:
    placement = filled(BLOCKS)
    state = placement.state
    sets = [state.row_set, *state.slots.values()]
    parts = [state.blocks, state.index, *sets, *placement.policies.values()]
    assert state.row_set.used_count == BLOCKS
    assert sum(part.nbytes for part in parts) / BLOCKS <= BYTES_PER_BLOCK_MAX


def test_blocks_are_no_objects() -> None:
    filled(AT_ONCE)  # whatever is made once is there now
    gc.collect()
    before = len(gc.get_objects())
    placement = filled(100_000)
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
    assert placement.state.row_set.used_count == 100_000
