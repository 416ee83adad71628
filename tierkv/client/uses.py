"""Blocks that were read without asking the daemon, which hears of many of them at once."""

from __future__ import annotations

import time

from tierkv.core.ids import U8
from tierkv.core.prefix import HASH_BYTES

TOLD_BLOCKS = 1024
"""So many are told in one request, at the latest when there are so many."""

TOLD_S = 0.25
"""Or when so much time has passed."""

KEPT_BYTES = 4 * TOLD_BLOCKS * HASH_BYTES
"""While the daemon hears nothing, only the latest are kept."""


class Uses:
    """What was read of one namespace, and how many blocks were missed. Threads may share it."""

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._missed = 0
        self._told_s = time.monotonic()

    def add(self, hashes: U8, missed: int = 0) -> None:
        """The blocks of a chain that were read (chain hashes, u8 [n, 16]), the first one first."""
        # A chain's beginning is its most valuable part, hence comes last.
        self._hashes += hashes[::-1].tobytes()
        self._missed += missed
        if len(self._hashes) > KEPT_BYTES:
            del self._hashes[:-KEPT_BYTES]

    @property
    def due(self) -> bool:
        """Whether it is time to tell."""
        if len(self._hashes) >= TOLD_BLOCKS * HASH_BYTES:
            return True
        return time.monotonic() - self._told_s >= TOLD_S and self.any

    @property
    def any(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._hashes or self._missed)

    def take(self) -> tuple[bytes, int]:
        """What to tell next: chain hashes, least valuable first, and how many were missed."""
        size = TOLD_BLOCKS * HASH_BYTES
        taken = bytes(self._hashes[:size]), self._missed
        del self._hashes[:size]
        self._missed = 0
        self._told_s = time.monotonic()
        return taken
