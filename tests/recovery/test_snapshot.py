"""State to index and back: nothing is lost, nothing that went comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovery_harness import kept, picture

from tierkv.core.blocks import INDEXED, SEALED
from tierkv.core.ids import Tier, sequence_id
from tierkv.core.invariants import check_invariants
from tierkv.core.records import Kind, Records, blank, push
from tierkv.core.state import PoolShape, State
from tierkv.errors import InvariantViolation, TierFailed
from tierkv.service.snapshot import index_changes, restore
from tierkv.tiers.index import Index

SHAPES = [PoolShape(4096, 16), PoolShape(1024, 4), PoolShape(4096, 32)]
BUDGETS = {Tier.DEVICE: 64 << 20, Tier.HOST: 32 << 20, Tier.DISK: 128 << 20}
MAX = 2**64 - 1


def _state() -> State:
    return State(dict(BUDGETS), lambda _tier, shape: shape.block_bytes)


def _record(kind: Kind, **fields: Any) -> Records:
    records = blank(1, kind)
    for name, value in fields.items():
        records[name] = value
    return records


@pytest.fixture
def index(folder: Path) -> Iterator[Index]:
    index = Index(folder / "index", 8 << 20)
    yield index
    index.close()


@pytest.fixture
def full() -> State:
    """Three pools, four namespaces, thousands of rows, everything at its limits."""
    state = _state()
    for number, pool in enumerate((0, 1, 0, 2)):
        digest = bytes([number + 1]) * 16
        hi, lo = np.frombuffer(digest, "<u8")
        shape = SHAPES[pool]
        state.apply(
            _record(
                Kind.NAMESPACE,
                key=number,
                hash_hi=hi,
                hash_lo=lo,
                id=shape.block_bytes,
                loc=shape.block_tokens,
            )
        )
    for lease, token in ((1, b"a" * 16), (2, bytes(range(240, 256))), (9, b"\0" * 15 + b"\1")):
        hi, lo = np.frombuffer(token, "<u8")
        state.apply(
            _record(
                Kind.LEASE_OPEN,
                key=lease,
                id=2**22,
                gen=MAX,
                loc=2**32 - 1,
                extra_hi=hi,
                extra_lo=lo,
            )
        )
    for namespace, count in ((0, 2500), (1, 700), (2, 300), (3, 200)):
        _blocks(state, namespace, count)
    rows = state.live_rows()
    by_space = state.blocks.namespace[rows]
    for local, (lease, namespace, suspended) in enumerate(
        ((1, 0, False), (1, 1, True), (2, 0, True), (9, 3, False), (9, 2, False)), 1
    ):
        identity = sequence_id(lease, local)
        held = rows[by_space == namespace][: 100 * local]
        opened = _record(Kind.SEQ_OPEN, id=identity, key=namespace)
        state.apply(np.concatenate([opened, push(identity, held.astype(np.uint32))]))
        if suspended:
            state.apply(_record(Kind.SEQ_SUSPEND, id=identity))
    state.apply(_record(Kind.SEQ_OPEN, id=sequence_id(2, 2**32 - 1), key=0))
    state.epoch = 77
    check_invariants(state)
    return state


def _blocks(state: State, namespace: int, count: int) -> None:
    """A chain of sealed blocks in device; every third also on disk, every fifth in host."""
    random_values = np.random.default_rng(namespace)
    pool = state.namespaces[namespace].pool
    rows = state.row_set.hold(count)
    allocated = blank(count, Kind.ALLOC)
    allocated["key"] = rows
    allocated["id"] = np.arange(count) + state.next_block
    allocated["aux"] = namespace
    allocated["tier"] = Tier.DEVICE
    allocated["loc"] = state.slots[Tier.DEVICE, pool].hold(count)
    state.apply(allocated)
    sealed = blank(count, Kind.SEAL)
    sealed["key"], sealed["id"] = rows, allocated["id"]
    for name in ("hash_hi", "hash_lo", "extra_hi", "extra_lo"):
        sealed[name] = random_values.integers(0, MAX, count, np.uint64, endpoint=True)
    sealed["loc"][1:] = allocated["id"][:-1]
    sealed["tier"] = 1
    state.apply(sealed)
    for tier, step in ((Tier.DISK, 3), (Tier.HOST, 5)):
        placed = sealed[::step].copy()
        placed["type"], placed["tier"] = Kind.PLACE, tier
        placed["loc"] = state.slots[tier, pool].hold(len(placed))
        state.apply(placed)


def _stored(index: Index) -> State:
    state = _state()
    restore(state, index.load(), index.blocks())
    state.reindex()
    return state


def _store(index: Index, state: State, specs: dict[int, bytes] | None = None) -> None:
    changes = state.take_changes()
    index.commit(index_changes(state, changes, specs or {}, {"checkpoint_lsn": 5}))


def test_every_field_comes_back(index: Index, full: State) -> None:
    _store(index, full, {0: b"{}", 2: b'{"model":"x"}'})
    contents = index.load()
    state = _state()
    assert restore(state, contents, index.blocks()) == {
        0: b"{}",
        1: b"",
        2: b'{"model":"x"}',
        3: b"",
    }
    check_invariants(state)
    assert picture(state) == picture(full)
    assert (state.epoch, state.next_lease) == (77, 10)
    assert {tier: int(contents.meta[f"{tier.label}_bytes"]) for tier in Tier} == BUDGETS
    assert contents.meta["checkpoint_lsn"] == 5
    assert state.changed_rows == 0


def test_an_empty_state_comes_back(index: Index) -> None:
    state = _state()
    _store(index, state)
    assert picture(_stored(index)) == picture(state)


def test_what_went_is_gone_from_the_index_too(index: Index, full: State) -> None:
    _store(index, full)
    full.apply(_record(Kind.LEASE_CLOSE, key=9))
    full.apply(_record(Kind.SEQ_CLOSE, id=sequence_id(2, 3)))
    rows = full.live_rows()
    gone = rows[full.blocks.refs[rows] == 0][::2]
    _drop_all(full, gone)
    _store(index, full)
    contents = index.load()
    assert set(contents.leases) == {1, 2}
    assert not any(np.isin(part.rows, gone).any() for part in index.blocks())
    state = _stored(index)
    check_invariants(state)
    assert picture(state) == picture(full)


def _drop_all(state: State, rows: Any) -> None:
    for tier in Tier:
        here = rows[state.blocks.has_copy(rows, tier)]
        dropped = blank(len(here), Kind.DROP)
        dropped["key"], dropped["id"] = here, state.blocks.id[here]
        dropped["tier"], dropped["loc"] = tier, state.blocks.slot[tier][here]
        state.apply(dropped)


def test_a_row_that_was_freed_and_taken_again_holds_the_new_block(
    index: Index, full: State
) -> None:
    _store(index, full)
    rows = full.live_rows()
    idle = rows[full.blocks.refs[rows] == 0]
    _drop_all(full, idle)
    _blocks(full, 1, 50)
    assert np.isin(idle, full.live_rows()).any()
    _store(index, full)
    state = _stored(index)
    check_invariants(state)
    assert picture(state) == picture(full)


def test_changes_of_a_failed_commit_are_in_the_next(
    index: Index, full: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(index, full)
    full.apply(_record(Kind.LEASE_CLOSE, key=1))
    rows = full.live_rows()
    first = rows[full.blocks.refs[rows] == 0][:40]
    _drop_all(full, first[:20])
    changes = full.take_changes()
    content = index_changes(full, changes, {}, {"checkpoint_lsn": 6})

    def fails(_content: Any) -> None:
        raise TierFailed("no space")

    with monkeypatch.context() as patch:
        patch.setattr(index, "_commit", fails)
        with pytest.raises(TierFailed):
            index.commit(content)
    full.put_back(changes)
    assert full.changed_rows >= 20
    # Meanwhile a freed row is taken again and a changed one is freed.
    _drop_all(full, first[20:])
    _blocks(full, 0, 5)
    _store(index, full)
    assert picture(_stored(index)) == picture(full)


def test_a_spec_that_comes_later_is_stored_without_any_record(index: Index, full: State) -> None:
    _store(index, full)
    full.touch_namespace(1)
    _store(index, full, {1: b'{"model":"late"}'})
    state = _state()
    assert restore(state, index.load(), index.blocks())[1] == b'{"model":"late"}'
    assert picture(state) == picture(full)


def test_a_budget_that_shrank_below_what_is_stored_is_a_contradiction(
    index: Index, full: State
) -> None:
    """Recovery restores with the old budgets first; see test_changed_sizes."""
    _store(index, full)
    small = State(dict.fromkeys(Tier, 4096), lambda _tier, shape: shape.block_bytes)
    with pytest.raises(InvariantViolation, match="beyond the pool's capacity"):
        restore(small, index.load(), index.blocks())


def test_open_and_unindexed_blocks_come_back_as_they_are(index: Index, full: State) -> None:
    rows = full.row_set.hold(1)
    allocated = _record(
        Kind.ALLOC,
        key=rows,
        id=full.next_block,
        aux=0,
        tier=Tier.DEVICE,
        loc=full.slots[Tier.DEVICE, 0].hold(1),
    )
    full.apply(np.concatenate([allocated, push(sequence_id(1, 1), rows.astype(np.uint32))]))
    # A younger twin takes the place of one that a sequence still holds.
    old = int(full.sequences[sequence_id(2, 3)].rows[0])
    twin = full.row_set.hold(1)
    allocated = _record(
        Kind.ALLOC,
        key=twin,
        id=full.next_block,
        aux=0,
        tier=Tier.DEVICE,
        loc=full.slots[Tier.DEVICE, 0].hold(1),
    )
    sealed = _record(
        Kind.SEAL,
        key=twin,
        id=allocated["id"],
        tier=1,
        hash_hi=full.blocks.hash_hi[old],
        hash_lo=full.blocks.hash_lo[old],
    )
    full.apply(np.concatenate([allocated, sealed]))
    check_invariants(full)
    assert full.blocks.flags[old] == SEALED
    assert full.blocks.flags[rows[0]] == 0
    _store(index, full)
    state = _stored(index)
    check_invariants(state)
    assert picture(state) == picture(full)
    assert state.blocks.flags[int(twin[0])] == SEALED | INDEXED


@pytest.mark.parametrize("seed", range(3))
def test_many_small_checkpoints_are_as_good_as_one(index: Index, full: State, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(12):
        rows = full.live_rows()
        idle = rows[full.blocks.refs[rows] == 0]
        if chance.random() < 0.5:
            _drop_all(full, np.array(chance.sample(idle.tolist(), min(30, len(idle)))))
        else:
            _blocks(full, chance.randrange(4), chance.randrange(1, 40))
        if chance.random() < 0.4:
            _store(index, full)
    _store(index, full)
    state = _stored(index)
    check_invariants(state)
    assert kept(picture(state)) == kept(picture(full))
