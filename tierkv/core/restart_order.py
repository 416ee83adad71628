"""The order of eviction after a restart: worked out from chains, for the log does not keep it."""

from __future__ import annotations

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64


def restart_order(blocks: Blocks, rows: I64) -> I64:
    """An order of rows (positions, shape [n]) in which older chains come first, leaf before root.

    The log does not keep recency. Ids grow with time, so a chain is as young as its youngest
    block; a parent is never listed before its children, so victims still come leaf first.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    parent = _parent_positions(blocks, rows)
    depth = _depths(parent)
    youngest = blocks.id[rows].copy()
    by_depth = np.argsort(depth, kind="stable")
    starts = np.searchsorted(depth[by_depth], np.arange(int(depth.max()) + 2))
    for level in range(int(depth.max()), 0, -1):
        children = by_depth[starts[level] : starts[level + 1]]
        np.maximum.at(youngest, parent[children], youngest[children])
    return np.asarray(np.lexsort((-depth, youngest)))


def _parent_positions(blocks: Blocks, rows: I64) -> I64:
    """For each row the position of its parent among ``rows``, -1 where it is not there."""
    ids = blocks.id[rows]
    by_id = np.argsort(ids)
    at = np.minimum(np.searchsorted(ids[by_id], blocks.parent[rows]), len(rows) - 1)
    found = ids[by_id[at]] == blocks.parent[rows]
    return np.where(found, by_id[at], -1)


def _depths(parent: I64) -> I64:
    """How many ancestors each position has, by doubling the distance looked back each time."""
    ancestor = parent.copy()
    depth = (ancestor >= 0).astype(np.int64)
    while (deeper := ancestor >= 0).any():
        depth[deeper] += depth[ancestor[deeper]]
        ancestor[deeper] = ancestor[ancestor[deeper]]
    return depth
