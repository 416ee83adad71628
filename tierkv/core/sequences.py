"""Block tables: finding them, what may be said of them, and the small changes verbs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.core.arrays import every, leading
from tierkv.core.ids import I64, NO_BLOCK, U32, U64, Tier, lease_of, sequence_id
from tierkv.core.placement import Placement
from tierkv.core.records import Kind, blank
from tierkv.core.state import Sequence
from tierkv.errors import (
    InvalidArgument,
    LeaseLost,
    LimitExceeded,
    NotOwner,
    UnknownNamespace,
    UnknownSequence,
)

LOCAL_MAX = 2**32


@dataclass(frozen=True)
class TableView:
    """A sequence's block table: device slots (u32 [n]) and how many leading blocks are sealed.

    ``by_tier``: for ``acquire``, how many of the blocks came from each tier. ``ready``: while it
    comes up, how many leading blocks may be used; None when all may.
    """

    slots: U32
    sealed: int
    by_tier: tuple[int, int, int] = (0, 0, 0)
    ready: int | None = None


class Sequences:
    """The sequences of one state."""

    def __init__(self, placement: Placement, sequences_max: Callable[[], int]) -> None:
        """``sequences_max``: how many a lease may hold by now."""
        self.state = placement.state
        self.placement = placement
        self._sequences_max = sequences_max

    def find(self, lease: int, local: int) -> Sequence:
        """A lease's own sequence. Raises UnknownSequence, NotOwner."""
        found = self.find_any(lease, local)
        if found.fenced:
            raise UnknownSequence(f"sequence {local} ended while its worker was away")
        return found

    def find_any(self, lease: int, local: int) -> Sequence:
        """The same, but a fenced one, too: it can be released, and nothing else."""
        if local >= LOCAL_MAX:
            if lease_of(local) != lease:
                raise NotOwner(f"sequence {local:#x} belongs to another lease")
            local &= LOCAL_MAX - 1
        found = self.state.sequences.get(sequence_id(lease, local))
        if found is None:
            raise UnknownSequence(f"there is no sequence {local}; it ended or was never begun")
        return found

    def active(self, lease: int, local: int) -> Sequence:
        sequence = self.find(lease, local)
        if sequence.suspended:
            raise InvalidArgument(f"sequence {local} is suspended; resume it first")
        if not self.is_up(sequence):
            raise InvalidArgument(
                f"sequence {local} is still coming up; wait for the answer to the last request"
            )
        return sequence

    def identity(self, lease: int, local: int) -> int:
        if not 1 <= local < LOCAL_MAX:
            raise InvalidArgument(f"sequence number {local}: it must be 1 to {LOCAL_MAX - 1}")
        if lease not in self.state.leases:
            raise LeaseLost(f"lease {lease} has ended, and its sequences with it")
        return sequence_id(lease, local)

    def check_limit(self, lease: int) -> None:
        limit = self._sequences_max()
        if len(self.state.lease_sequences[lease]) >= limit:
            raise LimitExceeded(
                f"a lease may hold {limit} sequences; end some first",
                limit=limit,
            )

    def view(self, sequence: Sequence) -> TableView:
        """The block table of a sequence as it is now."""
        rows = sequence.rows
        return TableView(self.state.blocks.slot[Tier.DEVICE][rows], self.sealed_count(rows))

    def pool(self, namespace: int) -> int:
        entry = self.state.namespaces.get(namespace)
        if entry is None:
            raise UnknownNamespace(f"there is no namespace {namespace}; open it first")
        return entry.pool

    def block_tokens(self, sequence: Sequence) -> int:
        return self.state.pools[self.pool(sequence.namespace)].block_tokens

    def sealed_count(self, rows: I64) -> int:
        return leading(self.state.blocks.is_sealed(rows))

    def parent_id(self, sequence: Sequence, at: int) -> int:
        return int(self.state.blocks.id[sequence.rows[at - 1]]) if at else NO_BLOCK

    def is_up(self, sequence: Sequence) -> bool:
        """Whether all of an active sequence's blocks have arrived in the device tier."""
        return every(self.state.blocks.has_copy(sequence.rows, Tier.DEVICE))

    def unchanged(self, sequence: Sequence, ids: U64) -> bool:
        """Whether the sequence still stands, is active, and holds these blocks."""
        return (
            self.state.sequences.get(sequence.id) is sequence
            and not sequence.suspended
            and not sequence.fenced
            and len(sequence) == len(ids)
            and every(self.state.blocks.id[sequence.rows] == ids)
        )

    def steady(self, sequence: Sequence, ids: U64) -> bool:
        """The same, and all of its blocks are in the device tier."""
        return self.unchanged(sequence, ids) and self.is_up(sequence)

    def log(self, kind: Kind, sequence: Sequence) -> None:
        records = blank(1, kind)
        records["id"] = sequence.id
        self.placement.commit(records)

    def truncate(self, sequence: Sequence, keep: int) -> None:
        cut_off = sequence.rows[keep:]
        records = blank(1, Kind.SEQ_TRUNCATE)
        records["id"] = sequence.id
        records["loc"] = keep
        self.placement.commit(records)
        self.touch_released(cut_off)

    def touch_released(self, rows: I64) -> None:
        """The last commit let go of these blocks (in chain order).

        Those that stay cached are the most recent now, leaf to root.
        """
        if len(rows):
            rows = rows[self.state.blocks.id[rows] != 0]
            self.placement.touch(rows[::-1])
