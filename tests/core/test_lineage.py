"""Chains in a picture of the block table, against walking them one by one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tierkv.core.lineage import Lineage


def lineage_of(parents: dict[int, int]) -> Lineage:
    """Blocks by id, each with its parent's; rows and names follow from the ids."""
    ids = np.array(list(parents), np.uint64)
    above = np.array(list(parents.values()), np.uint64)
    return Lineage.of(ids.astype(np.int64) * 10, ids, above, ids << np.uint64(56))


TREE = {5: 2, 1: 0, 2: 1, 3: 2, 4: 1, 9: 8, 10: 9, 6: 0}
"""Two chains that share 1 and 2, one that has lost its beginning, and a block by itself."""


def test_a_small_tree() -> None:
    lineage = lineage_of(TREE)
    assert lineage.ids.tolist() == [1, 2, 3, 4, 5, 6, 9, 10]
    assert lineage.rows.tolist() == [10, 20, 30, 40, 50, 60, 90, 100]
    assert lineage.depth.tolist() == [0, 1, 2, 1, 2, 0, 0, 1]
    assert lineage.ids[lineage.is_leaf].tolist() == [3, 4, 5, 6, 10]
    assert lineage.ids[lineage.begins].tolist() == [1, 2, 3, 4, 5, 6]
    assert lineage.ids[lineage.descendants(lineage.ids == 2)].tolist() == [2, 3, 5]
    assert lineage.ids[lineage.chain(4)].tolist() == [1, 2, 5]
    assert lineage.chain(7).tolist() == []
    assert lineage.named("03").tolist() == [2]
    assert lineage.named("0").tolist() == list(range(8))


def test_an_empty_one() -> None:
    lineage = lineage_of({})
    assert len(lineage.depth) == len(lineage.begins) == len(lineage.is_leaf) == 0
    assert len(lineage.descendants(np.zeros(0, np.bool_))) == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed: int) -> None:
    random = Random(seed)
    ids = sorted(random.sample(range(1, 500), 60))
    parents = {
        one: random.choice([0, one - 1, *[other for other in ids if other < one]]) for one in ids
    }
    lineage = lineage_of(parents)

    def chain(one: int) -> list[int]:
        return [*chain(parents[one]), one] if parents[one] in parents else [one]

    for place, one in enumerate(ids):
        whole = parents[chain(one)[0]] == 0
        assert lineage.depth[place] == len(chain(one)) - 1
        assert lineage.begins[place] == whole
        assert lineage.ids[lineage.chain(place)].tolist() == (chain(one) if whole else [])
    chosen = {one for one in ids if random.random() < 0.2}
    marked = lineage.descendants(np.isin(lineage.ids, list(chosen)))
    assert set(lineage.ids[marked].tolist()) == {one for one in ids if chosen & set(chain(one))}
