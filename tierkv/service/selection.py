"""Which blocks an operator means: by namespace, by tenant, by the name of a block."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tierkv.core.ids import I64, U64, Bool
from tierkv.core.lineage import Lineage
from tierkv.core.state import State
from tierkv.errors import InvalidArgument, NotFound
from tierkv.rpc.messages import Selector
from tierkv.service.assembly import Parts
from tierkv.service.survey import Surveyor

HASH_DIGITS = 32

SHOWN_MAX = 20
"""Namespaces that a message names."""

Reach = Literal["before", "after", "both"]
"""What a block's name stands for: its chain up to it, it and all that follow it, or both."""


@dataclass(frozen=True)
class Selected:
    """Blocks of a picture; ``chosen`` [n] says which. ``place``: of the one named, or -1.

    ``rows`` and ``ids`` are those of the chosen ones, parents before children.
    """

    lineage: Lineage
    chosen: Bool
    place: int
    rows: I64
    ids: U64

    @classmethod
    def of(cls, lineage: Lineage, chosen: Bool, place: int = -1) -> Selected:
        """Takes its time with many blocks, as all does that is about a whole picture."""
        return cls(lineage, chosen, place, lineage.rows[chosen], lineage.ids[chosen])

    def ends(self) -> I64:
        """Places of the last blocks of all chains of chosen ones. Takes its time as ``of`` does."""
        return np.flatnonzero(self.chosen & self.lineage.is_leaf & self.lineage.begins)

    def alive(self, state: State) -> Bool:
        """Which of the chosen ones still are what they were."""
        return np.asarray(state.blocks.id[self.rows] == self.ids)


class Selection:
    """Finds what a selector means."""

    def __init__(self, parts: Parts, surveyor: Surveyor) -> None:
        self._state = parts.planner.state
        self._namespaces = parts.namespaces
        self._surveyor = surveyor

    def tenant(self, namespace: int) -> str:
        """Whose a namespace is."""
        spec = self._namespaces.spec(namespace)
        return spec.tenant if spec else ""

    def namespaces(self, selector: Selector) -> list[int]:
        """The namespaces that a selector allows. Raises NotFound if it names none that is there."""
        found = list(self._state.namespaces)
        if selector.namespace >= 0:
            found = [one for one in found if one == selector.namespace]
            if not found:
                raise NotFound(
                    f"there is no namespace {selector.namespace}; see `tierkv ls namespaces`"
                )
        if selector.tenant:
            found = [one for one in found if self.tenant(one) == selector.tenant]
            if not found:
                raise NotFound(f"no tenant {selector.tenant!r} has blocks; see `tierkv ls tenants`")
        return found

    async def require_tenants_known(self) -> None:
        """Raise InvalidArgument if there are blocks of which nobody knows whose they are."""
        unknown = [one for one in self._state.namespaces if self._namespaces.spec(one) is None]
        lineage = await self._surveyor.lineage(unknown, fresh=True)
        if len(lineage):
            numbers = sorted(set(self._state.blocks.namespace[lineage.rows].tolist()))
            raise InvalidArgument(
                f"whose the blocks of {len(numbers)} namespaces are is not known since the index "
                "was made anew, until a worker opens them; name what you mean by --namespace, of "
                f"which these are unknown: {', '.join(map(str, numbers[:SHOWN_MAX]))}"
            )

    async def of(self, selector: Selector, reach: Reach, *, fresh: bool = False) -> Selected:
        """What it selects. ``fresh``: see Surveyor. Raises NotFound, InvalidArgument."""
        digits = self._digits(selector)
        lineage = await self._surveyor.lineage(self.namespaces(selector), fresh=fresh)
        if not digits:
            every = np.ones(len(lineage), np.bool_)
            return await asyncio.to_thread(Selected.of, lineage, every)
        places = await asyncio.to_thread(lineage.named, digits)
        return await asyncio.to_thread(
            _around, lineage, self._place(lineage, places, digits), reach
        )

    async def left(self, selector: Selector, gone: U64, before: int) -> Selected:
        """What else is to be deleted: what came behind blocks that are ``gone`` (ids).

        Where whole namespaces are, also what got its name since, if its id is below ``before``.
        """
        lineage = await self._surveyor.lineage(self.namespaces(selector), fresh=True)

        def find() -> Selected:
            chosen = np.isin(lineage.parents, gone)
            if not selector.hash:
                chosen |= lineage.ids < before
            return Selected.of(lineage, lineage.descendants(chosen))

        return await asyncio.to_thread(find)

    def _digits(self, selector: Selector) -> str:
        digits = selector.hash.lower()
        if len(digits) > HASH_DIGITS or digits.strip("0123456789abcdef"):
            raise InvalidArgument(
                f"{selector.hash!r} is no block: give the first hexadecimal digits of its hash"
            )
        return digits

    def _place(self, lineage: Lineage, places: I64, digits: str) -> int:
        """The one block of these whose name begins so. Raises NotFound, InvalidArgument."""
        if len(digits) > HASH_DIGITS // 2 and len(places):
            names = self._state.blocks.names(lineage.rows[places])
            places = places[[name.tobytes().hex().startswith(digits) for name in names]]
        if not len(places):
            raise NotFound(f"no cached block's hash begins with {digits}")
        if len(places) > 1:
            raise InvalidArgument(
                f"{len(places)} blocks' hashes begin with {digits}: give more digits"
            )
        return int(places[0])


def _around(lineage: Lineage, place: int, reach: Reach) -> Selected:
    """What is meant by the name of the block at this place."""
    chosen = np.zeros(len(lineage), np.bool_)
    chosen[place] = True
    if reach != "before":
        chosen = lineage.descendants(chosen)
    if reach != "after":
        chosen[lineage.chain(place)] = True
    return Selected.of(lineage, chosen, place)
