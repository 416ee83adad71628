"""How long blocks live, and how long they lie unused: measured on a sample of them.

A block is watched if its id is a multiple of ``SAMPLE``. What happens to blocks is only noted when
it happens, for some tens of nanoseconds; several times a second somebody looks at what was noted.
So all times are exact to the time between two looks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierkv.core.blocks import Blocks
from tierkv.core.ids import I64, U32, U64, Tier
from tierkv.core.records import Records

SAMPLE = 61
"""One block of so many is watched. A prime: the ids of a prompt's blocks follow each other, and
prompts of equal length must not show the same place each time."""

WATCHED_MAX = 16_384
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


_Happened = Callable[[int, int], None]
"""Takes a block and its row."""


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
        self._happened: list[_Happened] = []
        self._rows: list[I64 | U32] = []
        """What was noted: what happened, to the blocks of which rows."""
        self._named: list[tuple[int, U64]] = []
        """By the number of a note: which blocks, where the rows may have others by now."""
        self._noted_rows = 0
        self._leaving: list[int] = []
        """Blocks that have left a tier since the last look, and maybe their last one."""
        self._now_s = 0.0
        self._leave_by = {tier: partial(self._leave, tier) for tier in Tier}

    def __len__(self) -> int:
        return len(self._watched)

    # --- what happens to blocks -------------------------------------------------------------------

    def born(self, first_id: int, rows: I64) -> None:
        """These rows are fresh blocks, with ids that follow each other. Mutates."""
        first = -first_id % SAMPLE
        if first < len(rows):
            chosen = rows[first::SAMPLE]
            ids = first_id + np.arange(first, len(rows), SAMPLE, dtype=np.uint64)
            self._named.append((len(self._rows), ids))
            self._note(self._bear, chosen)

    def touched(self, rows: I64, *, found: bool = False) -> None:
        """A worker uses these blocks or has let go of them; ``found``: a request came upon them.

        Keeps ``rows``: they must not change. Mutates.
        """
        self._note(self._reuse if found else self._use, rows)

    def left(self, tier: Tier, records: Records) -> None:
        """Copies left a tier for want of room, as its DROP records say; keeps them. Mutates."""
        self._named.append((len(self._rows), records["id"]))
        self._note(self._leave_by[tier], records["key"])

    # --- looking at it ----------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """What was noted since the last look happened now. Mutates."""
        self._now_s = now_s
        self._settle()
        self._sweep(2 * self._born + 1)
        self._born = 0

    def _note(self, happened: _Happened, rows: I64 | U32) -> None:
        self._happened.append(happened)
        self._rows.append(rows)
        self._noted_rows += len(rows)
        if len(self._rows) >= NOTES_MAX or self._noted_rows >= NOTED_ROWS_MAX:
            self._settle()

    def _settle(self) -> None:
        if not self._rows:
            return
        rows = np.concatenate(self._rows)
        ends = np.cumsum(list(map(len, self._rows)))
        ids = self._blocks.id[rows]  # 0 where a row was freed by now
        for at, named in self._named:
            ids[ends[at] - len(named) : ends[at]] = named
        chosen = np.flatnonzero((ids % SAMPLE == 0) & (ids != 0))
        notes = np.searchsorted(ends, chosen, "right")
        for at, note in zip(chosen.tolist(), notes.tolist(), strict=True):
            self._happened[note](int(ids[at]), int(rows[at]))
        # By now all that was noted of a block that has ended has been looked at.
        for block in self._leaving:
            self._end(block)
        for noted in (self._happened, self._rows, self._named, self._leaving):
            noted.clear()
        self._noted_rows = 0

    def _bear(self, block: int, row: int) -> None:
        self._born += 1
        self._watch(block, row, self._now_s)

    def _reuse(self, block: int, row: int) -> None:
        if (watched := self._watched.get(block)) is not None:
            self.on_reused(self._now_s - watched.used_s)
        self._use(block, row)

    def _use(self, block: int, row: int) -> None:
        if (watched := self._watched.get(block)) is not None:
            watched.used_s = self._now_s
        else:
            self._watch(block, row, None)

    def _leave(self, tier: Tier, block: int, _row: int) -> None:
        if (watched := self._watched.get(block)) is not None:
            self.on_left(tier, self._now_s - watched.used_s)
            self._leaving.append(block)

    def _end(self, block: int) -> None:
        """Forget a block if it has left its last tier."""
        watched = self._watched.get(block)
        if watched is not None and not self._is_here(block, watched.row):
            del self._watched[block]
            if watched.born_s is not None:
                self.on_gone(self._now_s - watched.born_s)

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
