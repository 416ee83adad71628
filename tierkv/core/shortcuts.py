"""What the planner does most, decided and done at once where the case is the simple one.

A shortcut does what the planner's own way does, in one go, and hands back the records that say so:
applied to the state as it was they lead to the state as it is. Where a case is not the simple one
it changes nothing and returns None, and the planner goes its own way. So shortcuts may be left
out, and what they did is checked by replaying its records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierkv.core.ids import I64, U64, Tier
from tierkv.core.records import Records

if TYPE_CHECKING:
    from tierkv.core.matching import Chain
    from tierkv.core.policy import EvictionPolicy
    from tierkv.core.state import State


class Evicted(NamedTuple):
    """Blocks that left a tier: their DROP records, and for how many which tier is the best left.

    The last of ``gone_to`` counts those that are in none.
    """

    records: Records
    gone_to: list[int]


class Sealed(NamedTuple):
    """Blocks that have their names now: SEAL records, ids, ids of their parents; shape [n] each."""

    records: Records
    ids: U64
    parents: U64


class Shortcuts(Protocol):
    """All of them mutate the state, and the order of eviction, unless they return None."""

    def evict(
        self, state: State, order: EvictionPolicy, tier: Tier, count: int, below: list[Tier]
    ) -> Evicted | None:
        """``count`` blocks leave a RAM tier, and none of them must be copied for that.

        ``below``: slower tiers that take copies now. Nobody reads copies in ``tier`` meanwhile.
        """
        ...

    def extend(
        self,
        state: State,
        sequence: int,
        namespace: int,
        rows: I64,
        slots: I64,
        before: list[Records],
    ) -> Records | None:
        """Fresh blocks behind an active sequence's, in rows and device slots that are held.

        Shape [n] each; their ids are the next ones. ``before``: records that come first.
        """
        ...

    def seal(
        self, state: State, rows: I64, parent: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> Sealed | None:
        """Open blocks become the links of ``chain`` behind the block ``parent``; shape [n] each.

        None of the names is in the hash table.
        """
        ...


class NoShortcuts:
    """The planner always goes its own way."""

    def evict(
        self, state: State, order: EvictionPolicy, tier: Tier, count: int, below: list[Tier]
    ) -> Evicted | None:
        """See Shortcuts."""
        return None

    def extend(
        self,
        state: State,
        sequence: int,
        namespace: int,
        rows: I64,
        slots: I64,
        before: list[Records],
    ) -> Records | None:
        """See Shortcuts."""
        return None

    def seal(
        self, state: State, rows: I64, parent: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> Sealed | None:
        """See Shortcuts."""
        return None
