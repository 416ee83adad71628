"""Chains as they are in a picture of the block table: who comes before whom.

Blocks name their parents by id, and nothing finds a block by its id. So whoever wants ancestors or
descendants takes a picture of all blocks, in order of their ids, and works out the links once.
Nothing here looks at the state: a thread may do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tierkv.core.ids import I64, U64, Bool

NOWHERE = -1


@dataclass(frozen=True)
class Lineage:
    """Named blocks, ids ascending: ``rows``, ``ids``, ``parents`` (ids), all of shape [n].

    ``names``: upper halves of their chain hashes. Along a chain ids grow, so a block stands behind
    its parent. Blocks are told by their places.
    """

    rows: I64
    ids: U64
    parents: U64
    names: U64

    @classmethod
    def of(cls, rows: I64, ids: U64, parents: U64, names: U64) -> Lineage:
        """From columns in any order."""
        order = np.argsort(ids, kind="stable")
        return cls(rows[order], ids[order], parents[order], names[order])

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def parent(self) -> I64:
        """Each block's parent, NOWHERE if it is the first of its chain or its parent is gone."""
        if not len(self):
            return np.zeros(0, np.int64)
        at = np.minimum(np.searchsorted(self.ids, self.parents), len(self) - 1)
        return np.where(self.ids[at] == self.parents, at, NOWHERE)

    @cached_property
    def is_leaf(self) -> Bool:
        """Which blocks no other one follows."""
        leaf = np.ones(len(self), np.bool_)
        leaf[self.parent[self.parent >= 0]] = False
        return leaf

    @cached_property
    def depth(self) -> I64:
        """How many blocks come before each, as far as they are here."""
        # By doubling the distance looked back each time; behind the last place stands a beginning.
        start = len(self)
        before = np.append(np.where(self.parent >= 0, self.parent, start), start)
        depth = np.append((self.parent >= 0).astype(np.int64), 0)
        while (before != start).any():
            depth += depth[before]
            before = before[before]
        return depth[:-1]

    @cached_property
    def begins(self) -> Bool:
        """Which blocks have all those before them, so that somebody can find them."""
        root = self.chain_roots
        return np.asarray(self.parents[root] == 0)

    def named(self, prefix: str) -> I64:
        """Blocks whose chain hash may begin with these hexadecimal digits, judged by the first 16.

        Raises ValueError if they are none.
        """
        digits = prefix[:16]
        shift = np.uint64(64 - 4 * len(digits))
        return np.flatnonzero(self.names >> shift == np.uint64(int(digits, 16)))

    @cached_property
    def chain_roots(self) -> I64:
        """The first block before each that is here (itself, if none is)."""
        every = np.arange(len(self))
        root = np.where(self.parent >= 0, self.parent, every)
        while not np.array_equal(root, further := root[root]):
            root = further
        return root

    def descendants(self, chosen: Bool) -> Bool:
        """The chosen blocks (shape [n]) and all that follow them."""
        start = len(self)
        above = np.append(np.where(self.parent >= 0, self.parent, start), start)
        marked = np.append(chosen, False)
        while (above != start).any():
            marked |= marked[above]
            above = above[above]
        return marked[:-1]

    def chain(self, place: int) -> I64:
        """The chain that ends in this block, first block first; empty if it has no beginning."""
        found = [place]
        while (place := int(self.parent[place])) != NOWHERE:
            found.append(place)
        return np.array(found[::-1] if self.parents[found[-1]] == 0 else [], np.int64)
