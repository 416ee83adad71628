"""What reads and writes blocks asks of where they lie: ``Arena`` is one such place."""

from __future__ import annotations

from typing import Protocol

from tierkv.core.ids import U8, U32
from tierkv.tiers.entry import Entries


class Blocks(Protocol):
    """Slots in host memory with a slot table beside, by pool."""

    def slots(self, pool: int) -> U8:
        """The pool's slots, shape [count, stride]."""
        ...

    def payload(self, pool: int) -> U8:
        """The pool's slots without their padding, shape [count, block_bytes]."""
        ...

    def table(self, pool: int) -> Entries:
        """The pool's slot table, shape [count]."""
        ...

    def block_bytes(self, pool: int) -> int:
        """Payload bytes of the pool's blocks."""
        ...

    def empty(self, pool: int, slots: U32) -> None:
        """Say in the slot table that the slots (shape [n]) hold nothing."""
