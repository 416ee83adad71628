"""How long blocks live, and how long they lie unused: measured on a sample of them.

A block is watched if its id is a multiple of ``SAMPLE``. What happens to blocks is only noted when
it happens, for some tens of nanoseconds; several times a second somebody looks at what was noted.
So all times are exact to the time between two looks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, Tier
from tierkv.core.records import Records

SAMPLE = 61
"""One block of so many is watched. A prime: the ids of a prompt's blocks follow each other, and
prompts of equal length must not show the same place each time."""

WATCHED_MAX = 65_536
"""Blocks watched at once. If that is too few, new ones go unwatched until older ones leave: the
sample gets thinner, and stays a fair one."""

NOTES_MAX = 256
NOTED_ROWS_MAX = 16_384
"""Notes that are gathered at most, and the rows in them: bounds their memory, and how long one look
takes, to a fraction of a millisecond."""


@dataclass(slots=True)
class _Watched:
    row: int
    born_s: float | None
    """None: before this daemon."""
    used_s: float


class Residency:
    """Watches blocks from the slot they get to the last copy they lose. Times in seconds."""

    def __init__(self, blocks: Blocks, watched_max: int = WATCHED_MAX) -> None:
        self.on_gone: Callable[[float], None] = lambda _lived_s: None
        """A block had to leave the last tier that had it, so long after it got its first slot."""
        self.on_left: Callable[[Tier, float], None] = lambda _tier, _idle_s: None
        """A block had to leave a tier, unused for so long."""
        self.on_reused: Callable[[float], None] = lambda _idle_s: None
        """A request found a block, unused for so long."""
        self._blocks = blocks
        self._watched_max = watched_max
        self._watched: OrderedDict[int, _Watched] = OrderedDict()
        self._born = 0
        self._notes: list[tuple[Callable[[Any], None], Any]] = []
        self._noted_rows = 0
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._watched)

    # --- what happens to blocks -------------------------------------------------------------------

    def born(self, first_id: int, rows: I64) -> None:
        """These rows are fresh blocks, with ids that follow each other. Mutates."""
        if -first_id % SAMPLE < len(rows):
            self._note(partial(self._bear, first_id), rows)

    def touched(self, rows: I64, *, found: bool = False) -> None:
        """A worker uses these blocks or has let go of them; ``found``: a request came upon them.

        Keeps ``rows``: they must not change. Mutates.
        """
        self._note(self._reuse if found else self._use, rows)

    def left(self, records: Records) -> None:
        """Copies left a tier for want of room, as these DROP records say; keeps them. Mutates."""
        self._note(self._leave, records)

    # --- looking at it ----------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """What was noted since the last look happened now. Mutates."""
        self._now_s = now_s
        self._settle()
        self._sweep(2 * self._born + 1)
        self._born = 0

    def _note(self, happened: Callable[[Any], None], rows: I64 | Records) -> None:
        self._notes.append((happened, rows))
        self._noted_rows += len(rows)
        if len(self._notes) >= NOTES_MAX or self._noted_rows >= NOTED_ROWS_MAX:
            self._settle()

    def _settle(self) -> None:
        for happened, rows in self._notes:
            happened(rows)
        self._notes.clear()
        self._noted_rows = 0

    def _bear(self, first_id: int, rows: I64) -> None:
        for at in range(-first_id % SAMPLE, len(rows), SAMPLE):
            self._born += 1
            self._watch(first_id + at, int(rows[at]), self._now_s)

    def _reuse(self, rows: I64) -> None:
        for block, _ in self._sampled(rows):
            if (watched := self._watched.get(block)) is not None:
                self.on_reused(self._now_s - watched.used_s)
        self._use(rows)

    def _use(self, rows: I64) -> None:
        for block, row in self._sampled(rows):
            watched = self._watched.get(block)
            if watched is None:
                self._watch(block, row, None)
            else:
                watched.used_s = self._now_s

    def _leave(self, records: Records) -> None:
        ids = records["id"]
        for at in np.flatnonzero(ids % SAMPLE == 0).tolist():
            block, row = int(ids[at]), int(records["key"][at])
            watched = self._watched.get(block)
            if watched is None:
                continue
            self.on_left(Tier(int(records["tier"][at])), self._now_s - watched.used_s)
            if not self._is_here(block, row):
                del self._watched[block]
                if watched.born_s is not None:
                    self.on_gone(self._now_s - watched.born_s)

    def _sampled(self, rows: I64) -> Iterator[tuple[int, int]]:
        """Ids and rows of the watched kind; a row that was freed meanwhile has none."""
        ids = self._blocks.id[rows]
        for at in np.flatnonzero((ids % SAMPLE == 0) & (ids != 0)).tolist():
            yield int(ids[at]), int(rows[at])

    def _is_here(self, block: int, row: int) -> bool:
        """Whether the row still has this block, with any copy."""
        blocks = self._blocks
        return bool(blocks.id[row] == block and blocks.has_any_copy(np.array([row]))[0])

    # --- who is watched ---------------------------------------------------------------------------

    def _watch(self, block: int, row: int, born_s: float | None) -> None:
        if len(self._watched) < self._watched_max:
            self._watched[block] = _Watched(row, born_s, self._now_s)

    def _sweep(self, count: int) -> None:
        """Forget what ended otherwise, of the ``count`` that were looked at longest ago.

        Blocks end with their sequences, before they are sealed; damaged ones; and others.
        """
        for _ in range(min(count, len(self._watched))):
            block, watched = self._watched.popitem(last=False)
            if self._is_here(block, watched.row):
                self._watched[block] = watched
