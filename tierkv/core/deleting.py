"""Deleting: blocks that nobody is to find again, whatever happens to the daemon."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import leading
from tierkv.core.effects import Flow, Signal, Wait
from tierkv.core.ids import I64, U64
from tierkv.core.placement import Placement

PART_BLOCKS = 4096
"""Deleted with one turn of the event loop, which takes a millisecond or so."""


@dataclass(frozen=True)
class Deleted:
    """So many blocks were deleted; of these so many ``stay`` with the sequences that hold them."""

    blocks: int = 0
    stay: int = 0


class Deleter:
    """Deletes blocks of one placement."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._blocks = placement.state.blocks

    def delete(self, rows: I64, ids: U64) -> Flow[Deleted]:
        """Delete sealed blocks; ``ids`` name those that ``rows`` held when the caller decided.

        Give at most PART_BLOCKS, and children before their parents: dying here leaves no child
        without its parent, as that would be found by no later delete. What moves or readers use
        now is waited for.

        A sequence that holds one of them keeps it, and gives its later blocks no names: they would
        not be found without it.
        """
        done = stay = 0
        while len(rows):
            alive = (self._blocks.id[rows] == ids) & self._blocks.is_indexed(rows)
            rows, ids = rows[alive], ids[alive]
            free = min(leading(~holds.has(rows)) for holds in self._placement.holds.values())
            going, rows, ids = rows[:free], rows[free:], ids[free:]
            stay += int(np.count_nonzero(self._blocks.refs[going]))
            done += len(going)
            self._placement.delete(going)
            if len(rows):
                yield Wait(self._user_of(rows[:1]))
        return Deleted(done, stay)

    def _user_of(self, row: I64) -> Signal:
        """Set when a move or a reader that uses the row, or another one, has done."""
        return next(one for one in self._placement.holds.values() if one.has(row)[0]).released()
