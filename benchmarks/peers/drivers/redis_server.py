"""Redis on a Unix socket, by redis-py with hiredis; one pipeline a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis

from benchmarks.peers.content import U8, key_of
from benchmarks.peers.drivers.base import Driver


class Redis(Driver):
    """``redis-server`` with no snapshots. Option ``appendfsync``: its AOF, or "" for none."""

    def start(self) -> None:
        """Start the server, wait until it has loaded what it had."""
        path = self.place.memory / "redis.sock"
        fsync = self.place.options["appendfsync"]
        settings = {
            "port": "0",
            "unixsocket": str(path),
            "dir": str(self.place.folder),
            "save": "",
            "maxmemory": str(2 * self.place.capacity),
            "maxmemory-policy": "allkeys-lru",
            "appendonly": "yes" if fsync else "no",
            "appendfsync": fsync or "no",
            "auto-aof-rewrite-percentage": "0",
        }
        command = ["redis-server"]
        for key, value in settings.items():
            command += [f"--{key}", value]
        self.spawn(command)
        self._client = redis.Redis(unix_socket_path=str(path))
        self.await_server(self._client.ping, redis.ConnectionError, redis.BusyLoadingError)

    def keys(self, numbers: Sequence[int]) -> Any:
        """Hexadecimal."""
        return [key_of(number).hex() for number in numbers]

    def put(self, keys: Any, blocks: U8) -> None:
        """SET each, in one pipeline: MSET would be one command of all the bytes."""
        pipeline = self._client.pipeline(transaction=False)
        for key, block in zip(keys, blocks, strict=True):
            pipeline.set(key, block.data)
        pipeline.execute()

    def get(self, keys: Any, out: U8) -> list[bool]:
        """One MGET."""
        found = []
        for value, block in zip(self._client.mget(keys), out, strict=True):
            if value is not None:
                np.copyto(block, np.frombuffer(value, np.uint8))
            found.append(value is not None)
        return found

    def exists(self, keys: Any) -> int:
        """One EXISTS."""
        return int(self._client.exists(*keys))

    def forget(self, keys: Any) -> None:
        """DEL: its memory is free when it returns."""
        self._client.delete(*keys)

    @property
    def version(self) -> str:
        """The server's and the client's."""
        server = self._client.info("server")["redis_version"]
        return f"{server} (redis-py {redis.__version__})"
