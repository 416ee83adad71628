"""The order of eviction after a restart: worked out from chains, for the log does not keep it.

Blocks of a chain most often have ids one after the other. So among all blocks in the order of their
ids there are runs, in which each is the child of the one before; few have their parent elsewhere.
Where such a child is, its parent's run is cut behind the parent: the blocks of one stretch have the
same youngest block below them. Only runs and stretches are looked at, not block after block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U64

PART_ROWS = 1 << 16

_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)


def restart_order(blocks: Blocks, rows: I64) -> I64:
    """An order of rows (positions, shape [n]) in which older chains come first, leaf before root.

    The log does not keep recency. Ids grow with time, so a chain is as young as its youngest
    block; a parent is never listed before its children, so victims still come leaf first.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    # Here and below, what is to be sorted has long ascending parts: a stable sort makes use of it.
    by_id = np.argsort(blocks.id[rows], kind="stable")
    return np.asarray(by_id[_Runs.of(blocks, rows, by_id).order()])


@dataclass(frozen=True)
class _Runs:
    """Runs of n blocks in the order of ids. A block's place is its number in that order.

    Per run, shape [r]: the places of its first block (``head``) and of its last one, that of the
    first one's parent or -1 (``parent``), and the run of that (``up``) or -1.
    """

    head: I64
    last: I64
    parent: I64
    up: I64

    @classmethod
    def of(cls, blocks: Blocks, rows: I64, by_id: I64) -> _Runs:
        """The runs of the blocks in these rows, whose ids ascend in the order ``by_id``."""
        before, begins = np.zeros(len(rows) + 1, np.uint64), np.empty(len(rows), np.bool_)
        ids = before[1:]
        # Some at a time: to touch new memory takes longer than to look at what is there.
        for start in range(0, len(rows), PART_ROWS):
            part = slice(start, min(start + PART_ROWS, len(rows)))
            members = rows[by_id[part]]
            ids[part] = blocks.id[members]
            begins[part] = blocks.parent[members] != before[part]
        begins[0] = True
        head = np.flatnonzero(begins)
        named = blocks.parent[rows[by_id[head]]]
        parent, up = np.full((2, len(head)), -1)
        known = np.flatnonzero(named)
        at = np.minimum(np.searchsorted(ids, named[known]), len(ids) - 1)
        there = ids[at] == named[known]
        known, at = known[there], at[there]
        parent[known] = at
        up[known] = np.searchsorted(head, at, side="right") - 1
        return cls(head, np.append(head[1:], len(ids)) - 1, parent, up)

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

    def order(self) -> I64:
        """Places in the order of eviction, shape [n]."""
        ends = np.zeros(int(self.last[-1]) + 1, np.bool_)
        ends[self.last] = ends[self.parent[self.parent >= 0]] = True
        end = np.flatnonzero(ends)
        start = np.append(0, end[:-1] + 1)
        begins = np.zeros(len(ends), np.bool_)
        begins[self.head] = True
        run = np.cumsum(begins[start]) - 1
        depth = self.depths(self.parent - self.head[self.up] + 1)[run] + start - self.head[run]
        # No two stretches of one depth have the same youngest block below them.
        keys = (self._youngest(end, run) << _HALF) | (_LOW - depth.astype(np.uint64))
        order = np.argsort(keys, kind="stable")
        end, length = end[order], (end - start + 1)[order]
        # Each of them from its end on: it begins where those before it leave off.
        before = np.cumsum(length) - length
        places = np.repeat(end + before, length)
        places -= np.arange(len(places))
        return places

    def _youngest(self, end: I64, run: I64) -> U64:
        """The place of the youngest block among those of a stretch and below them, shape [s].

        ``end``, ``run`` [s]: the place where each stretch ends, and the run it is of.
        """
        level = self.depths(np.ones(len(self.head), np.int64))
        by_level = np.argsort(level, kind="stable")
        starts = np.searchsorted(level[by_level], np.arange(int(level.max()) + 2))
        of_run, of_stretch = self.last.copy(), end.copy()
        for deep in range(int(level.max()), 0, -1):
            runs = by_level[starts[deep] : starts[deep + 1]]
            np.maximum.at(of_run, self.up[runs], of_run[runs])
            above = np.searchsorted(end, self.parent[runs])
            np.maximum.at(of_stretch, above, of_run[runs])
        # From the end on, each run over the largest so far: a run begins above all behind it.
        order = (len(self.head) - run).astype(np.uint64) << _HALF
        highest = np.maximum.accumulate((order | of_stretch.astype(np.uint64))[::-1])
        return np.asarray(highest[::-1] & _LOW)
