"""The ceiling: numpy copies into a ring of as much memory, and a dict that knows where."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.content import U8
from benchmarks.peers.drivers.base import Driver


class NumpyCopy(Driver):
    """Memory of this process, touched; it overwrites its oldest blocks, and dies with it."""

    def start(self) -> None:
        """Take the memory."""
        rows = self.place.capacity // self.place.block_bytes
        self._ring = np.ones((rows, self.place.block_bytes), np.uint8)
        self._rows: dict[bytes, int] = {}
        self._next = 0

    def put(self, keys: Any, blocks: U8) -> None:
        """One copy a block."""
        ring, rows, at = self._ring, self._rows, self._next
        for key, block in zip(keys, blocks, strict=True):
            np.copyto(ring[at], block)
            rows[key] = at
            at = (at + 1) % len(ring)
        self._next = at

    def get(self, keys: Any, out: U8) -> list[bool]:
        """One copy a block."""
        found = []
        for key, block in zip(keys, out, strict=True):
            row = self._rows.get(key)
            if row is not None:
                np.copyto(block, self._ring[row])
            found.append(row is not None)
        return found

    def exists(self, keys: Any) -> int:
        """Ask the dict."""
        rows = self._rows
        return sum(key in rows for key in keys)

    def forget(self, keys: Any) -> None:
        """The ring goes round."""
        for key in keys:
            self._rows.pop(key, None)

    @property
    def version(self) -> str:
        """numpy's."""
        return np.__version__
