"""What a RAM slot's entry says beside the payload, and where the core writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierkv.core.ids import I64, U32, U64, Bool, Tier


@dataclass(frozen=True)
class BlockEntries:
    """Identity of sealed blocks, one row each: what a slot's entry holds beside its payload.

    All u64 [n], but ``tokens`` u32 [n, block_tokens] and ``digest``, the 16 bytes of the namespace
    of all of them. ``extras``: digests of the extra keys.
    """

    digest: bytes
    ids: U64
    parents: U64
    hash_hi: U64
    hash_lo: U64
    sum_hi: U64
    sum_lo: U64
    extras: U64
    tokens: U32


class SlotTables(Protocol):
    """The entries beside RAM slots: which block a slot holds, with its tokens."""

    def same(self, tier: Tier, pool: int, slots: U32, tokens: U32, extras: U64) -> Bool:
        """Which blocks in the slots have these token ids and digests of extra keys, shape [n].

        ``tokens``: shape [n, block_tokens], ``extras``: [n].
        """
        ...

    def fill(self, tier: Tier, pool: int, slots: I64, entries: BlockEntries) -> None:
        """Write the entries of sealed blocks; from now on workers may find them there."""
        ...

    def enter(self, tier: Tier, pool: int, slots: I64, hash_lo: U64) -> None:
        """The slots have entries of sealed blocks with these names (low halves, [n]).

        From now on workers may find them there.
        """
        ...

    def open(self, tier: Tier, pool: int, slots: I64, ids: U64) -> None:
        """Write the entries of blocks that are being filled: an id, no checksum yet.

        Workers do not find them.
        """
        ...

    def leave(self, tier: Tier, pool: int, slots: I64) -> None:
        """Workers find nothing in these slots any more, whatever their entries say."""
        ...

    def punch(self, tier: Tier, pool: int, slots: I64) -> None:
        """Give the memory of freed slots back, because another pool needs the budget."""
        ...
