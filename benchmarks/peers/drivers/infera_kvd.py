"""Infera's kvd from the user's checkout: leases in its shared arena, or inline puts that last."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import numpy as np
from infera.kvd.client import KvdClient

from benchmarks.peers.content import U8
from benchmarks.peers.drivers.base import Driver


class InferaKvd(Driver):
    """Option ``long``: puts of retention long, the only ones that it writes to disk."""

    def start(self) -> None:
        """Start the daemon and attach to its arena."""
        path = self.place.memory / "kvd.sock"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "infera.kvd", "--socket", str(path)]
        command += ["--max-bytes", str(2 * self.place.capacity)]
        if self.place.options["long"]:
            command += ["--long-path", str(self.place.folder / "long")]
            command += ["--long-bytes", str(4 * self.place.capacity), "--use-tablespace"]
            command += ["--tablespace-slot-bytes", str(2 * self.place.block_bytes)]
        self.spawn(command)
        self._loop = asyncio.new_event_loop()
        self._client = self.await_server(lambda: self._run(_connected(str(path))), OSError)
        if not self._client.shared_arena_negotiated:
            raise RuntimeError("the daemon shares no arena")

    def put(self, keys: Any, blocks: U8) -> None:
        """A lease, a copy and a commit each; or one call with all the bytes."""
        self._run(
            self._put_long(keys, blocks) if self.place.options["long"] else self._put(keys, blocks)
        )

    def get(self, keys: Any, out: U8) -> list[bool]:
        """One call; its views are copied out."""
        found = []
        views = self._run(self._client.batch_get_view(keys))
        for view, block in zip(views, out, strict=True):
            if view is not None:
                np.copyto(block, np.frombuffer(view, np.uint8))
            found.append(view is not None)
        return found

    def exists(self, keys: Any) -> int:
        """One call."""
        return sum(self._run(self._client.exists(keys)))

    @property
    def version(self) -> str:
        """It has none that says what a checkout holds."""
        return "checkout"

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(call)

    async def _put(self, keys: Any, blocks: U8) -> None:
        client, size = self._client, self.place.block_bytes
        for key, block in zip(keys, blocks, strict=True):
            lease = await client.set_lease(size)
            if lease is None:
                raise RuntimeError("no lease")
            token, view = lease
            np.copyto(np.frombuffer(view, np.uint8)[:size], block)
            accepted, reason = await client.commit_set(token, key, size, retention="short")
            if not accepted:
                raise RuntimeError(f"not committed: {reason}")

    async def _put_long(self, keys: Any, blocks: U8) -> None:
        items = [(key, bytes(block), "long", None) for key, block in zip(keys, blocks, strict=True)]
        for accepted, reason in await self._client.batch_set(items):
            if not accepted:
                raise RuntimeError(f"not accepted: {reason}")


async def _connected(path: str) -> KvdClient:
    client = KvdClient(path)
    await client.connect()
    return client
