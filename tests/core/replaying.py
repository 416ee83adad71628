"""A log replayed at once and change by change: the second is the oracle of the first."""

from __future__ import annotations

from random import Random

import numpy as np

from tierkv.core.invariants import check_invariants
from tierkv.core.records import Records, join
from tierkv.core.replay import replay
from tierkv.core.state import State


def check_replay(commits: list[Records], plain: State, at_once: State, random: Random) -> None:
    """Replay whole commits in pieces of any size, into two states that are the same now."""
    at = 0
    while at < len(commits):
        piece = commits[at : at + random.choice((1, 3, 30, 1000))]
        at += len(piece)
        before = set(plain.sequences)
        for records in piece:
            plain.apply(records)
        replay(at_once, join(piece))
        check_invariants(at_once)
        check_same(plain, at_once)
        check_same_changes(plain, at_once, before)


def check_same(state: State, twin: State) -> None:
    """Both hold the same blocks, sequences and leases, and what follows from them."""
    rows = state.live_rows()
    assert np.array_equal(rows, twin.live_rows())
    assert np.array_equal(state.blocks.export(rows), twin.blocks.export(rows))
    assert np.array_equal(state.blocks.refs[rows], twin.blocks.refs[rows])
    assert np.array_equal(state.blocks.active[rows], twin.blocks.active[rows])
    assert state.leases == twin.leases
    assert list(state.sequences) == list(twin.sequences)
    assert state.lease_sequences == twin.lease_sequences
    for identity, sequence in state.sequences.items():
        other = twin.sequences[identity]
        assert np.array_equal(sequence.rows, other.rows)
        assert sequence.suspended == other.suspended
        assert sequence.namespace == other.namespace
    assert state.namespaces == twin.namespaces
    assert state.pools == twin.pools
    for place, slots in state.slots.items():
        assert np.array_equal(slots.used(), twin.slots[place].used())
        assert slots.used_count == twin.slots[place].used_count
    assert len(state.index) == len(twin.index)
    names = ("next_block", "next_lease", "epoch")
    for name in names:
        assert getattr(state, name) == getattr(twin, name), name


def check_same_changes(plain: State, at_once: State, before: set[int]) -> None:
    """Both ask the next checkpoint for the same. ``before``: sequences of the last one."""
    theirs, ours = plain.take_changes(), at_once.take_changes()
    assert np.array_equal(theirs.rows, ours.rows)
    assert np.array_equal(theirs.freed_rows, ours.freed_rows)
    assert theirs.leases == ours.leases
    assert theirs.namespaces == ours.namespaces
    assert ours.sequences <= theirs.sequences
    # What opened and closed in between is nothing to a checkpoint.
    assert not (theirs.sequences - ours.sequences) & (before | set(plain.sequences))
