"""LMDB in the user's process: what a library can do on the same files."""

from __future__ import annotations

from typing import Any

import lmdb
import numpy as np

from benchmarks.peers.content import U8
from benchmarks.peers.drivers.base import Driver

ROOM = 4
"""Address space in multiples of what it is to hold; free pages are found only after a commit."""


class Lmdb(Driver):
    """One transaction a batch. Options: ``sync`` and ``writemap`` of ``lmdb.open``."""

    def start(self) -> None:
        """Open the file."""
        self._environment = lmdb.open(
            str(self.place.folder / "lmdb"),
            map_size=ROOM * self.place.capacity,
            sync=self.place.options["sync"],
            writemap=self.place.options["writemap"],
        )

    def put(self, keys: Any, blocks: U8) -> None:
        """Committed when it returns."""
        with self._environment.begin(write=True) as transaction:
            for key, block in zip(keys, blocks, strict=True):
                transaction.put(key, block.data)

    def get(self, keys: Any, out: U8) -> list[bool]:
        """Values are views of the mapped file: copied once."""
        found = []
        with self._environment.begin(buffers=True) as transaction:
            for key, block in zip(keys, out, strict=True):
                value = transaction.get(key)
                if value is not None:
                    np.copyto(block, np.frombuffer(value, np.uint8))
                found.append(value is not None)
        return found

    def exists(self, keys: Any) -> int:
        """A cursor that is set to each key: the value is not touched."""
        with self._environment.begin(buffers=True) as transaction:
            at = transaction.cursor().set_key
            return sum(at(key) for key in keys)

    def forget(self, keys: Any) -> None:
        """It evicts nothing by itself."""
        with self._environment.begin(write=True) as transaction:
            for key in keys:
                transaction.delete(key)

    @property
    def version(self) -> str:
        """The binding's, and the library's."""
        library = ".".join(str(part) for part in lmdb.version())
        return f"{lmdb.__version__} (LMDB {library})"

    def stop(self) -> None:
        """Close the file."""
        self._environment.close()
