"""Which memory of a RAM tier to take next, and which to give back: decided here, not done.

A pool's *lead* is the memory it has in slots that were never given out. Slots go out in rising
order, so the lead lies right behind them. A single pool may lead by the whole budget. Several share
the budget, and nobody knows which one will want it: each leads by an equal part of what is free,
1 GiB at most, and one such part is left untaken, for a pool that outruns its lead. What one pool
has too much goes back when another needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAD_BYTES = 1 << 30
TAKE_BYTES = 64 << 20
"""Taken at a time, by a thread: a tenth of a second."""

GIVE_BYTES = 2 << 20
"""Given back at a time, by the loop: less than a millisecond."""


class PoolMemory(NamedTuple):
    """One pool in one tier, in slots: how many there are, were given out, and have their memory.

    ``number`` names the pool, ``stride`` is what a slot takes, bytes. Slots below ``given_out``
    may be in use. Nothing from ``taken`` on has memory, unless it was given out.
    """

    number: int
    stride: int
    slots: int
    given_out: int
    taken: int

    @property
    def lead(self) -> int:
        """Slots that have memory and were never given out."""
        return max(0, self.taken - self.given_out)

    def goal(self, lead_bytes: int) -> int:
        """Up to which slot memory is wanted if the pool may lead by so much."""
        return min(self.slots, self.given_out + lead_bytes // self.stride)


class Take(NamedTuple):
    """Take the memory of slots ``first`` to ``stop``."""

    pool: int
    first: int
    stop: int


class GiveBack(NamedTuple):
    """Give the memory of slots ``first`` to ``stop`` back: they were never given out."""

    pool: int
    first: int
    stop: int


class Budget(NamedTuple):
    """Of a tier, bytes: all, what blocks do not use, and what the payload takes in memory now."""

    total: int
    free: int
    in_memory: int


def next_step(
    pools: Sequence[PoolMemory], budget: Budget, *, ahead: bool
) -> Take | GiveBack | None:
    """What to do now; None: nothing is missing. ``ahead``: whether pools may lead at all."""
    if not pools:
        return None
    lead_bytes, ceiling = _allowance(len(pools), budget) if ahead else (0, budget.total)
    poor = min(pools, key=lambda pool: pool.lead * pool.stride)
    rich = max(pools, key=lambda pool: pool.lead * pool.stride)
    first = poor.given_out + poor.lead
    stop = min(poor.goal(lead_bytes), first + max(1, TAKE_BYTES // poor.stride))
    if len(pools) > 1:
        room = ceiling - budget.in_memory
        keep = max(rich.goal(lead_bytes), rich.taken - max(1, GIVE_BYTES // rich.stride))
        if max(0, stop - first) * poor.stride > room and keep < rich.taken:
            return GiveBack(rich.number, keep, rich.taken)
        stop = min(stop, first + max(0, room) // poor.stride)
    return Take(poor.number, first, stop) if stop > first else None


def missing_bytes(pools: Sequence[PoolMemory], budget: Budget) -> int:
    """About how much memory is still to be taken; 0 exactly if nothing is."""
    if next_step(pools, budget, ahead=True) is None:
        return 0
    lead_bytes, _ = _allowance(len(pools), budget)
    missing = [pool.goal(lead_bytes) - pool.given_out - pool.lead for pool in pools]
    return max(
        1,
        sum(max(0, slots) * pool.stride for slots, pool in zip(missing, pools, strict=True)),
    )


def _allowance(pools: int, budget: Budget) -> tuple[int, int]:
    """By how much each pool may lead, and how much memory all may take, bytes."""
    if pools == 1:
        return budget.total, budget.total
    part = min(max(0, budget.free) // (pools + 1), LEAD_BYTES)
    return part, budget.total - part
