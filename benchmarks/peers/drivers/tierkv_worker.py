"""tierkv by its worker API: one call a batch, read and written by copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import tierkv
from benchmarks.peers.content import U8, key_of
from benchmarks.peers.drivers.base import Driver
from tierkv.core.ids import U32
from tierkv.core.prefix import chain_hashes
from tierkv.core.spec import KVSpec
from tierkv.errors import TierkvError

BLOCK_TOKENS = 16
ABSENT = 255
"""What ``exists`` says of a block that is in no tier."""


class Prompt(NamedTuple):
    """What leads to these blocks and to no others, as an engine holds it.

    ``tokens``: u32 [blocks x 16]; ``hashes``: the blocks' chain hashes, u8 [blocks, 16].
    """

    tokens: U32
    hashes: U8


class Tierkv(Driver):
    """``tierkv serve`` with a device tier alone. Option ``durability``; "power" has a disk tier."""

    def start(self) -> None:
        """Start the daemon, recover what it had, open a namespace."""
        power = self.place.options["durability"] == "power"
        socket = self.place.memory / "tierkv.sock"
        settings = {
            "server.socket": socket,
            "server.state_dir": self.place.folder / "state",
            "arena.dir": self.place.memory / "arena",
            "device.bytes": self.place.capacity,
            "host.bytes": 0,
            "disk.bytes": 2 * self.place.capacity if power else 0,
            "wal.durability": self.place.options["durability"],
            "metrics.tcp": "",
            "metrics.socket": "",
        }
        command = [sys.executable, "-m", "tierkv", "serve"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        socket.unlink(missing_ok=True)
        self.spawn(command)
        self._client = self.await_server(lambda: tierkv.connect(socket), TierkvError)
        self._spec = KVSpec(
            model="peers",
            layers=1,
            kv_heads=1,
            head_dim=self.place.block_bytes // (2 * BLOCK_TOKENS),
            dtype="uint8",
            block_tokens=BLOCK_TOKENS,
        )
        self._namespace = self._client.namespace(self._spec)

    def keys(self, numbers: Sequence[int]) -> Prompt:
        """A prompt: its blocks are a chain, as they are in an engine."""
        names = np.frombuffer(b"".join(key_of(number) for number in numbers), "<u4")
        tiled = np.tile(names.reshape(-1, 4) & 0x7FFFFFFF, (1, BLOCK_TOKENS // 4))
        tokens = np.ascontiguousarray(tiled, np.uint32).reshape(-1)
        nothing = np.zeros(len(numbers), np.uint64)
        return Prompt(tokens, chain_hashes(self._spec.digest, tokens, BLOCK_TOKENS, nothing))

    def put(self, keys: Prompt, blocks: U8) -> None:
        """One call, which waits until all of it is acknowledged."""
        written = self._namespace.write(keys.tokens, blocks)
        if written != len(blocks):
            raise RuntimeError(f"only {written} of {len(blocks)} blocks were cached")

    def get(self, keys: Prompt, out: U8) -> list[bool]:
        """One call, which checks what it copies."""
        found = self._namespace.read(keys.tokens, out)
        return [at < found for at in range(len(out))]

    def exists(self, keys: Prompt) -> int:
        """One call."""
        return int(np.count_nonzero(self._namespace.exists(keys.hashes) != ABSENT))

    @property
    def version(self) -> str:
        """This checkout's."""
        return tierkv.__version__

    def stop(self) -> None:
        """End the lease, and the daemon."""
        self._client.close()
        super().stop()
