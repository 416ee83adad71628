"""Pins: chains that never leave the last tier, because a lease that belongs to nobody holds them.

A pin is a suspended sequence over a chain of sealed blocks. So the log, the checkpoints, eviction
and recovery treat it like any that a worker has left, and need know nothing of pins but this: their
lease neither ends with a process nor waits for one, and nobody can take it up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import distinct, every
from tierkv.core.ids import I64, U64, Bool, Tier, sequence_id
from tierkv.core.planner import Planner
from tierkv.core.records import Kind, blank, join, push
from tierkv.core.sequences import LOCAL_MAX
from tierkv.core.state import Lease, Sequence, State
from tierkv.errors import LimitExceeded

PINS_TOKEN = b"tierkv operators"
"""Of the lease that holds all pins. Those of workers are random."""

PINNED_SHARE = 0.5
"""Of the last tier: the rest must do for everything else."""

PINNED_BLOCKS_MAX = 1 << 18
"""Who counts what may leave a tier looks at every block that is held."""


Chained = tuple[I64, U64]
"""Rows and ids of a chain, from its first block on."""


@dataclass(frozen=True)
class Pinned:
    """``blocks`` are held by pins now, of which ``fresh`` were by none before."""

    pins: int
    blocks: int
    fresh: int


def is_pins(lease: Lease) -> bool:
    """Whether this is the lease that holds the pins."""
    return lease.token == PINS_TOKEN


def pins_lease(state: State) -> Lease | None:
    """The lease that holds the pins, if there were any."""
    return next((lease for lease in state.leases.values() if is_pins(lease)), None)


def pins_of(state: State) -> list[Sequence]:
    """All pins, the oldest first."""
    lease = pins_lease(state)
    return [state.sequences[one] for one in state.lease_sequences[lease.id]] if lease else []


def pinned_rows(state: State) -> I64:
    """Rows of the blocks that pins hold, ascending, each once."""
    return distinct(np.concatenate([np.zeros(0, np.int64), *(pin.rows for pin in pins_of(state))]))


def pinned_mask(state: State) -> Bool:
    """Which rows pins hold, for all rows there are now: shape [rows]."""
    held = np.zeros(len(state.blocks), np.bool_)
    for pin in pins_of(state):
        held[pin.rows] = True
    return held


class Pins:
    """The verbs."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._state = planner.state

    def require_room(self, chains: list[Chained]) -> None:
        """Raise LimitExceeded if pins would hold too much with these chains."""
        rows = [pinned_rows(self._state), *(rows for rows, _ in chains)]
        self._check_room(distinct(np.concatenate(rows)), len(chains))

    def pin(self, chains: list[Chained]) -> Pinned:
        """Hold chains of sealed blocks, all that still stand. Mutates.

        Those that a pin holds already, and no more than those, are passed over.
        """
        state = self._state
        before, ends = len(pinned_rows(state)), {int(pin.rows[-1]) for pin in pins_of(state) if pin}
        made = 0
        for rows, ids in chains:
            if len(rows) and int(rows[-1]) not in ends and self._stands(rows, ids):
                lease = pins_lease(state) or self._planner.open_lease(PINS_TOKEN, 0, 0, 0)
                held = state.lease_sequences[lease.id]
                local = next(reversed(held)) % LOCAL_MAX if held else 0
                self._hold(lease, local + 1, rows)
                made += 1
        blocks = len(pinned_rows(state))
        return Pinned(made, blocks, blocks - before)

    def unpin(self, pins: list[Sequence]) -> Pinned:
        """Let go of pins; what they held may leave like all else. Mutates."""
        lease = pins_lease(self._state)
        before = len(pinned_rows(self._state))
        if lease is not None and pins:
            self._planner.release(lease.id, [pin.id % LOCAL_MAX for pin in pins])
        left = len(pinned_rows(self._state))
        return Pinned(len(pins), left, left - before)

    def _stands(self, rows: I64, ids: U64) -> bool:
        blocks = self._state.blocks
        return every((blocks.id[rows] == ids) & blocks.is_indexed(rows))

    def _check_room(self, rows: I64, chains: int) -> None:
        """Raise LimitExceeded if these blocks are more than pins may hold."""
        state = self._state
        last = max(tier for tier in Tier if state.budgets[tier])
        size = int(state.slot_bytes_of(last, rows).sum())
        limit = int(state.budgets[last] * PINNED_SHARE)
        if size > limit:
            raise LimitExceeded(
                f"pins would hold {len(rows)} blocks, {size} bytes of the {last.label} tier; they "
                f"may hold {limit}, {PINNED_SHARE:.0%} of it: unpin others, or raise "
                f"{last.label}.bytes",
                limit=limit,
                asked=size,
            )
        if len(rows) > PINNED_BLOCKS_MAX:
            raise LimitExceeded(
                f"pins would hold {len(rows)} blocks; they may hold {PINNED_BLOCKS_MAX}: unpin "
                "others",
                limit=PINNED_BLOCKS_MAX,
                asked=len(rows),
            )
        pins = chains + len(pins_of(state))
        if pins > self._planner.limits.sequences:
            raise LimitExceeded(
                f"there would be {pins} pins; there may be {self._planner.limits.sequences} "
                "(server.sequences_max): unpin some first",
                limit=self._planner.limits.sequences,
                asked=pins,
            )

    def _hold(self, lease: Lease, local: int, rows: I64) -> None:
        """Log a suspended sequence on these rows."""
        identity = sequence_id(lease.id, local)
        opened, suspended = blank(1, Kind.SEQ_OPEN), blank(1, Kind.SEQ_SUSPEND)
        opened["id"] = suspended["id"] = identity
        opened["key"] = self._state.blocks.namespace[rows[:1]]
        pushed = push(identity, rows.astype(np.uint32))
        self._planner.placement.commit(join([opened, pushed, suspended]))
