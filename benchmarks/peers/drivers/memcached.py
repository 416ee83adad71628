"""memcached on a Unix socket, by pymemcache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pymemcache

from benchmarks.peers.content import U8, key_of
from benchmarks.peers.drivers.base import Driver

BATCH = 16
"""Of more values in one call, pymemcache sends all before it reads: both sides would block."""


class Memcached(Driver):
    """``memcached`` with items of up to 4 MiB."""

    def start(self) -> None:
        """Start the server."""
        path = self.place.memory / "memcached.sock"
        path.unlink(missing_ok=True)
        megabytes = str(2 * self.place.capacity >> 20)
        self.spawn(["memcached", "-u", "root", "-s", str(path), "-m", megabytes, "-I", "4m"])
        self._client = pymemcache.Client(str(path), default_noreply=False)
        self._server_version = self.await_server(self._client.version, OSError).decode()

    def keys(self, numbers: Sequence[int]) -> Any:
        """Hexadecimal."""
        return [key_of(number).hex() for number in numbers]

    def put(self, keys: Any, blocks: U8) -> None:
        """set_many, as large as it can take."""
        for at in range(0, len(keys), BATCH):
            part = slice(at, at + BATCH)
            values = dict(zip(keys[part], map(bytes, blocks[part]), strict=True))
            if refused := self._client.set_many(values):
                raise RuntimeError(f"memcached refused {len(refused)} blocks")

    def get(self, keys: Any, out: U8) -> list[bool]:
        """One get_many."""
        values = self._client.get_many(keys)
        found = []
        for key, block in zip(keys, out, strict=True):
            value = values.get(key)
            if value is not None:
                np.copyto(block, np.frombuffer(value, np.uint8))
            found.append(value is not None)
        return found

    def exists(self, keys: Any) -> int:
        """There is no such verb: touch, a round trip each."""
        return sum(bool(self._client.touch(key)) for key in keys)

    def forget(self, keys: Any) -> None:
        """Delete."""
        self._client.delete_many(keys, noreply=False)

    @property
    def version(self) -> str:
        """The server's and the client's."""
        return f"{self._server_version} (pymemcache {pymemcache.__version__})"
