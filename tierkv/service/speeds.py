"""How fast blocks came up lately, and so how long others will take."""

from __future__ import annotations

from tierkv.core.effects import Move
from tierkv.core.ids import Tier

FIRST_BYTES_PER_S = {Tier.HOST: 4e9, Tier.DISK: 1e9}
"""Taken for true until blocks have moved."""

MEMORY_BYTES = 256 << 20
"""After so many bytes what was measured before counts for a third."""


class Speeds:
    """Bytes a second at which blocks came up from each lower tier; recent moves count most."""

    def __init__(self) -> None:
        self._bytes_per_s = dict(FIRST_BYTES_PER_S)

    def note(self, move: Move, block_bytes: int, seconds: float) -> None:
        """A move took so long."""
        if move.target is not Tier.DEVICE or move.source is Tier.DEVICE or seconds <= 0:
            return
        moved_bytes = len(move.ids) * block_bytes
        weight = min(1.0, moved_bytes / MEMORY_BYTES)
        speed = self._bytes_per_s[move.source]
        self._bytes_per_s[move.source] = speed + weight * (moved_bytes / seconds - speed)

    def load_s(self, blocks: tuple[int, int, int], block_bytes: int) -> float:
        """How long so many blocks (by the tier they are in) should take to come up."""
        return sum(
            blocks[tier] * block_bytes / bytes_per_s
            for tier, bytes_per_s in self._bytes_per_s.items()
        )
