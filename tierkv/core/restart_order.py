"""The order of eviction after a restart: worked out from chains, for the log does not keep it.

Blocks of a chain most often have ids one after the other. So among all blocks in the order of their
ids there are runs, in which each is the child of the one before; few have their parent elsewhere.
What goes from block to block of a chain is done for whole runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U64

_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)


def restart_order(blocks: Blocks, rows: I64) -> I64:
    """An order of rows (positions, shape [n]) in which older chains come first, leaf before root.

    The log does not keep recency. Ids grow with time, so a chain is as young as its youngest
    block; a parent is never listed before its children, so victims still come leaf first.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    # Both times what is to be sorted comes in ascending stretches: a stable sort makes use of that.
    by_id = np.argsort(blocks.id[rows], kind="stable")
    runs = _Runs.of(blocks.id[rows[by_id]], blocks.parent[rows[by_id]])
    depth = runs.depths(runs.offset + 1)[runs.which] + np.arange(len(rows)) - runs.head[runs.which]
    # No two blocks of one depth have the same youngest one below them.
    keys = (runs.youngest() << _HALF) | (_LOW - depth.astype(np.uint64))
    order = np.argsort(keys, kind="stable")
    return np.asarray(by_id[order])


@dataclass(frozen=True)
class _Runs:
    """Runs of n blocks in the order of ids. A block's place is its number in that order.

    ``which`` [n]: the run of each block. Per run, shape [r]: the places of its first block
    (``head``) and of its last one, that of the first one's parent or -1 (``parent``), the run of
    that (``up``) or -1, and where in that run it is (``offset``).
    """

    which: I64
    head: I64
    last: I64
    parent: I64
    up: I64
    offset: I64

    @classmethod
    def of(cls, ids: U64, parents: U64) -> _Runs:
        """The runs of blocks whose ids ascend."""
        begins = np.ones(len(ids), np.bool_)
        begins[1:] = parents[1:] != ids[:-1]
        head = np.flatnonzero(begins)
        which = np.cumsum(begins) - 1
        last = np.append(head[1:], len(ids)) - 1
        at = np.minimum(np.searchsorted(ids, parents[head]), len(ids) - 1)
        parent = np.where(ids[at] == parents[head], at, -1)
        up = np.where(parent >= 0, which[parent], -1)
        return cls(which, head, last, parent, up, np.where(parent >= 0, parent - head[up], -1))

    def depths(self, distance: I64) -> I64:
        """How far each run's first block is from its root, shape [r].

        ``distance`` [r]: how far it is from the first block of the run above, if there is one. The
        distance looked back doubles each time.
        """
        ancestor = self.up.copy()
        depth = np.where(ancestor >= 0, distance, 0)
        while (deeper := ancestor >= 0).any():
            depth[deeper] += depth[ancestor[deeper]]
            ancestor[deeper] = ancestor[ancestor[deeper]]
        return depth

    def youngest(self) -> U64:
        """The place of the youngest block among each block and those below it, shape [n]."""
        level = self.depths(np.ones(len(self.head), np.int64))
        by_level = np.argsort(level, kind="stable")
        starts = np.searchsorted(level[by_level], np.arange(int(level.max()) + 2))
        of_run = self.last.copy()
        of_block = np.zeros(len(self.which), np.int64)
        of_block[self.last] = self.last
        for deep in range(int(level.max()), 0, -1):
            runs = by_level[starts[deep] : starts[deep + 1]]
            np.maximum.at(of_run, self.up[runs], of_run[runs])
            np.maximum.at(of_block, self.parent[runs], of_run[runs])
        # From the end on, each run over the largest so far: a run begins above all behind it.
        above = (len(self.head) - self.which).astype(np.uint64) << _HALF
        highest = np.maximum.accumulate((above | of_block.astype(np.uint64))[::-1])
        return np.asarray(highest[::-1] & _LOW)
