"""In which order blocks leave first after a restart: old chains before young ones, leaves first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.blocks import Blocks
from tierkv.core.restart_order import restart_order


@st.composite
def forests(draw) -> tuple[list[int], list[int]]:
    """Ids, and each block's parent id (0 for a root, or for one that is gone), in any order."""
    count = draw(st.integers(0, 30))
    parents = [draw(st.sampled_from([-1, *range(at)])) for at in range(count)]
    ids = draw(st.permutations(range(1, count + 1)))
    parent_ids = [0 if parent < 0 else ids[parent] for parent in parents]
    order = draw(st.permutations(range(count)))
    return [ids[at] for at in order], [parent_ids[at] for at in order]


def youngest_below(ids: list[int], parents: list[int], block: int) -> int:
    children = [one for one, parent in zip(ids, parents, strict=True) if parent == block]
    return max([block, *(youngest_below(ids, parents, child) for child in children)])


@given(forests())
def test_children_come_before_parents_and_old_chains_before_young_ones(forest) -> None:
    ids, parents = forest
    blocks = Blocks(max(1, len(ids)))
    rows = np.arange(len(ids))
    blocks.id[rows] = ids
    blocks.parent[rows] = parents
    order = [ids[at] for at in restart_order(blocks, rows)]
    assert sorted(order) == sorted(ids)
    place = {block: at for at, block in enumerate(order)}
    for block, parent in zip(ids, parents, strict=True):
        assert parent == 0 or place[block] < place[parent]
    ages = [youngest_below(ids, parents, block) for block in order]
    assert ages == sorted(ages)
