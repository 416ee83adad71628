"""What slot entries alone make of a state, for forests with twins, collisions, gaps and cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.ids import NO_SLOT, Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.records import Kind, blank
from tierkv.core.state import PoolShape, State
from tierkv.service.deleted import Deletion
from tierkv.service.rebuild import FoundCopies, LastWords, rebuild
from tierkv.tiers.entry import make_entries

SHAPES = [PoolShape(64, 1), PoolShape(64, 2)]
MISSING = 10_000

Path = tuple[int, ...]


@dataclass
class Block:
    """A block as its copies name it. ``path``: its tokens, after those of all before it."""

    id: int
    parent: int
    path: Path
    name: int
    shape: int = 0


def found(blocks: list[Block], *, tier: Tier = Tier.DISK, total: int = 7) -> FoundCopies:
    copies = FoundCopies()
    for slot, block in enumerate(blocks):
        add(copies, tier, slot, block, total)
    return copies


def add(copies: FoundCopies, tier: Tier, slot: int, block: Block, total: int = 7) -> None:
    shape = SHAPES[block.shape]
    entry = make_entries(
        ids=np.array([block.id], np.uint64),
        parents=block.parent,
        hash_hi=block.shape + 1,
        hash_lo=block.name,
        tokens=np.full((1, shape.block_tokens), block.path[-1], np.uint32),
        length=shape.block_bytes,
        digest=bytes([block.shape + 1]) * 16,
        sum_hi=total,
    )
    copies.add(tier, shape, np.array([slot], np.uint32), entry)


def state_of(
    copies: FoundCopies, words: LastWords | None = None, deletions: Sequence[Deletion] = ()
) -> State:
    state = State(dict.fromkeys(Tier, 1 << 20), lambda _tier, shape: shape.block_bytes)
    for records in rebuild(copies.all(), copies.shapes, words or LastWords(), deletions).records:
        state.apply(records)
    check_invariants(state)
    return state


def path_of(state: State, path_of_id: dict[int, Path], identity: int) -> Path | None:
    """The tokens that a lookup would take the block to stand for; None where it finds nothing."""
    tokens: list[int] = []
    rows = {int(state.blocks.id[row]): row for row in state.live_rows()}
    while identity:
        if identity not in rows:
            return None
        tokens.append(path_of_id[identity][-1])
        identity = int(state.blocks.parent[rows[identity]])
    return tuple(tokens[::-1])


@st.composite
def forests(draw: st.DrawFn, *, collide: bool) -> list[Block]:
    """Chains of few kinds. Several blocks may have the same path; some parents are missing."""
    count = draw(st.integers(0, 14))
    ids = draw(st.permutations(range(1, count + 1)))
    blocks: list[Block] = []
    names: dict[Path, int] = {}
    for identity in ids:
        before = draw(st.sampled_from([None, *range(len(blocks))]))
        token = draw(st.integers(0, 1))
        parent = 0 if before is None else blocks[before].id
        path = (*(() if before is None else blocks[before].path), token)
        if draw(st.integers(0, 9)) == 0:
            parent, path = MISSING, (99, *path)
        name = draw(st.integers(0, 3)) if collide else names.setdefault(path, len(names))
        blocks.append(Block(identity, parent, path, name))
    return draw(st.permutations(blocks))


def whole_paths(blocks: list[Block]) -> set[Path]:
    by_id = {block.id: block for block in blocks}

    def whole(block: Block) -> bool:
        return block.parent == 0 or (block.parent in by_id and whole(by_id[block.parent]))

    return {block.path for block in blocks if whole(block)}


@settings(max_examples=300, deadline=None)
@given(forests(collide=False))
def test_every_chain_that_is_whole_is_found_and_nothing_else(blocks: list[Block]) -> None:
    state = state_of(found(blocks))
    path_of_id = {block.id: block.path for block in blocks}
    ids = [int(state.blocks.id[row]) for row in state.live_rows()]
    paths = [path_of(state, path_of_id, one) for one in ids]
    assert paths == [path_of_id[one] for one in ids]
    assert set(paths) == whole_paths(blocks)
    youngest = {block.path: block.id for block in sorted(blocks, key=lambda one: one.id)}
    assert all(one == youngest[path] or path[0] == 99 for one, path in zip(ids, paths, strict=True))


@settings(max_examples=300, deadline=None)
@given(forests(collide=True))
def test_a_name_that_two_chains_share_never_mixes_them(blocks: list[Block]) -> None:
    """Of a collision one side stays, and its children are its own."""
    state = state_of(found(blocks))
    path_of_id = {block.id: block.path for block in blocks}
    for row in state.live_rows():
        identity = int(state.blocks.id[row])
        assert path_of(state, path_of_id, identity) == path_of_id[identity]


@settings(max_examples=200, deadline=None)
@given(forests(collide=False), st.integers(0, 20), st.data())
def test_what_was_deleted_is_left_out_with_all_that_followed(
    blocks: list[Block], before: int, data: st.DataObject
) -> None:
    """Whoever is the youngest of a name: one that came later is none of those deleted."""
    chosen = data.draw(st.sampled_from(blocks)) if blocks else None
    name = chosen.name if chosen else 0
    halves = (1).to_bytes(8, "big") + name.to_bytes(8, "big")
    state = state_of(found(blocks), deletions=[Deletion(bytes([1]) * 16, halves, before)])
    gone = {block.id for block in blocks if block.name == name and block.id < before}
    left = [block for block in blocks if block.id not in gone]
    by_id = {block.id: block for block in left}

    def whole(block: Block) -> bool:
        return block.parent == 0 or (block.parent in by_id and whole(by_id[block.parent]))

    ids = {int(state.blocks.id[row]) for row in state.live_rows()}
    assert not ids & gone
    path_of_id = {block.id: block.path for block in blocks}
    paths = {path_of_id[one] for one in ids}
    assert paths == {block.path for block in left if whole(block)}


def test_a_whole_namespace_is_left_out_but_for_what_came_later() -> None:
    blocks = [Block(1, 0, (1,), 1), Block(2, 1, (1, 1), 2), Block(5, 0, (2,), 3)]
    other = Block(3, 0, (1,), 1, shape=1)
    state = state_of(found([*blocks, other]), deletions=[Deletion(bytes([1]) * 16, b"", 5)])
    assert sorted(state.blocks.id[state.live_rows()].tolist()) == [3, 5]


def test_a_circle_of_parents_is_left_out() -> None:
    blocks = [Block(1, 2, (1, 1), 1), Block(2, 1, (1,), 2), Block(3, 3, (1,), 3)]
    state = state_of(found([*blocks, Block(4, 0, (5,), 4)]))
    assert state.blocks.id[state.live_rows()].tolist() == [4]


def test_a_copy_of_another_payload_than_the_fastest_one_does_not_count() -> None:
    copies, block = FoundCopies(), Block(1, 0, (1,), 1)
    add(copies, Tier.DISK, 3, block, total=7)
    add(copies, Tier.DISK, 5, block, total=8)
    add(copies, Tier.DISK, 6, block, total=8)
    add(copies, Tier.HOST, 9, block, total=8)
    state = state_of(copies)
    (row,) = state.live_rows()
    assert state.blocks.slot[Tier.HOST][row] == 9
    assert state.blocks.slot[Tier.DISK][row] == 5
    assert state.blocks.slot[Tier.DEVICE][row] == NO_SLOT
    assert state.blocks.sum_hi[row] == 8


def test_namespaces_are_numbered_from_zero_in_the_order_of_their_blocks() -> None:
    blocks = [Block(5, 0, (1,), 1, shape=0), Block(2, 0, (1,), 1, shape=1)]
    state = state_of(found(blocks))
    assert [entry.digest[0] for entry in state.namespaces.values()] == [2, 1]
    assert list(state.namespaces) == [0, 1]
    assert state.pools == [SHAPES[1], SHAPES[0]]
    rows = state.live_rows()
    assert state.blocks.namespace[rows].tolist() == [0, 1]


def test_the_last_record_of_a_copy_decides() -> None:
    """Slots are those of one tier; another tier's record of the same number says nothing."""
    blocks = [Block(one, 0, (one,), one) for one in range(1, 5)]
    words = LastWords()
    for kind, identity, tier, slot in (
        (Kind.DROP, 1, Tier.DISK, 0),
        (Kind.DROP, 2, Tier.DISK, 1),
        (Kind.PLACE, 2, Tier.DISK, 1),
        (Kind.DROP, 3, Tier.HOST, 2),
        (Kind.DROP, 4, Tier.DISK, 2),
    ):
        record = blank(1, kind)
        record["id"], record["tier"], record["loc"] = identity, tier, slot
        words.hear(record)
    state = state_of(found(blocks), words)
    assert state.blocks.id[state.live_rows()].tolist() == [2, 3, 4]


def test_numbers_go_on_above_those_that_the_log_gave_out() -> None:
    words = LastWords()
    for kind, field, number in (
        (Kind.ALLOC, "id", 70),
        (Kind.ALLOC, "id", 60),
        (Kind.LEASE_OPEN, "key", 8),
        (Kind.EPOCH, "id", 3),
    ):
        record = blank(1, kind)
        record[field] = number
        words.hear(record)
    assert (words.next_block, words.next_lease, words.epoch) == (71, 9, 3)


def test_nothing_makes_an_empty_state() -> None:
    state = state_of(FoundCopies())
    assert len(state.live_rows()) == 0
    assert state.namespaces == {}
