"""A picture of all named blocks, for questions that are about whole chains.

Taken a part per turn of the event loop, and worked on by a thread: however many blocks there are,
nobody waits for it but who asked. By then blocks may have come and gone; who acts on a picture
looks again at each block, by its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import numpy as np

from tierkv.core.blocks import INDEXED
from tierkv.core.ids import I64, U64
from tierkv.core.lineage import Lineage
from tierkv.core.state import State

PART_ROWS = 1 << 16
"""Copied in a fraction of a millisecond."""

KEPT_S = 5.0
"""A picture is kept for so long, for who wants the next page of it."""

_Part = tuple[I64, U64, U64, U64]


class Surveyor:
    """Takes pictures of one state, one at a time: each needs 32 bytes per block."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._turn = asyncio.Lock()
        self._kept: tuple[set[int], Lineage] | None = None
        self._forget: asyncio.TimerHandle | None = None

    async def lineage(self, namespaces: Collection[int], *, fresh: bool = False) -> Lineage:
        """The named blocks of these namespaces.

        Not ``fresh``: as they were some seconds ago will do, as for one page after the other.
        """
        async with self._turn:
            kept = self._kept
            if not fresh and kept is not None and kept[0] == set(namespaces):
                return kept[1]
            lineage = await self._take(namespaces)
            self._keep(namespaces, lineage)
            return lineage

    def _keep(self, namespaces: Collection[int], lineage: Lineage) -> None:
        self._kept = set(namespaces), lineage
        if self._forget is not None:
            self._forget.cancel()
        self._forget = asyncio.get_running_loop().call_later(KEPT_S, self._drop)

    def _drop(self) -> None:
        self._kept = self._forget = None

    async def _take(self, namespaces: Collection[int]) -> Lineage:
        parts = [self._part(0, 0, namespaces)]
        for start in range(0, len(self._state.blocks), PART_ROWS):
            parts.append(self._part(start, start + PART_ROWS, namespaces))
            await asyncio.sleep(0)
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return await asyncio.to_thread(Lineage.of, *columns)

    def _part(self, start: int, stop: int, namespaces: Collection[int]) -> _Part:
        blocks = self._state.blocks
        chosen = (blocks.flags[start:stop] & INDEXED) != 0
        chosen &= np.isin(blocks.namespace[start:stop], list(namespaces))
        rows = np.flatnonzero(chosen) + start
        return rows, blocks.id[rows], blocks.parent[rows], blocks.hash_hi[rows]
