"""Mooncake Store on one host: master, a client that owns the memory, and we, who share it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore

from benchmarks.peers.content import U8, key_of
from benchmarks.peers.drivers.base import Driver, free_ports, knock

BUFFERS_BYTES = 320 << 20
"""Memory shared with the client, for what is put and got."""


class MooncakeShm(Driver):
    """Blocks are put from and got into memory that it knows: one copy each, by its client."""

    def start(self) -> None:
        """Start both servers, attach to the shared memory."""
        folder = Path(mooncake.__path__[0])
        rpc, http, client, metrics = free_ports(4)
        self.spawn(
            [
                str(folder / "mooncake_master"),
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={http}",
                "--rpc_address=127.0.0.1",
                f"--rpc_port={rpc}",
                f"--metrics_port={metrics}",
            ]
        )
        self.await_server(lambda: knock(rpc), OSError)
        self.await_server(lambda: knock(http), OSError)
        self.spawn(
            [
                str(folder / "mooncake_client"),
                "--host=127.0.0.1",
                f"--port={client}",
                f"--global_segment_size={2 * self.place.capacity >> 20} MB",
                f"--master_server_address=127.0.0.1:{rpc}",
                f"--metadata_server=http://127.0.0.1:{http}/metadata",
                "--protocol=tcp",
            ]
        )
        self.await_server(lambda: knock(client), OSError)
        self._store = MooncakeDistributedStore()
        status = self._store.setup_dummy(BUFFERS_BYTES, 0, f"127.0.0.1:{client}")
        if status:
            raise RuntimeError(f"setup_dummy: {status}; {self.last_words()}")
        self._sizes = [self.place.block_bytes] * 1024

    def keys(self, numbers: Sequence[int]) -> Any:
        """Hexadecimal."""
        return [key_of(number).hex() for number in numbers]

    def memory(self, rows: int, columns: int) -> U8:
        """From the pool that both sides map."""
        address = self._store.alloc_from_mem_pool(rows * columns)
        if not address:
            raise RuntimeError(f"no {rows * columns} bytes in the pool")
        if status := self._store.register_buffer(address, rows * columns):
            raise RuntimeError(f"register_buffer: {status}")
        plain = (ctypes.c_uint8 * (rows * columns)).from_address(address)
        return np.frombuffer(plain, np.uint8).reshape(rows, columns)

    def put(self, keys: Any, blocks: U8) -> None:
        """One call."""
        sizes = self._sizes[: len(keys)]
        results = self._store.batch_put_from(keys, _addresses(blocks), sizes)
        if any(results):
            raise RuntimeError(f"batch_put_from: {[code for code in results if code][:3]}")

    def get(self, keys: Any, out: U8) -> list[bool]:
        """One call."""
        sizes = self._sizes[: len(keys)]
        results = self._store.batch_get_into(keys, _addresses(out), sizes)
        return [result == self.place.block_bytes for result in results]

    def exists(self, keys: Any) -> int:
        """One call."""
        return sum(found == 1 for found in self._store.batch_is_exist(keys))

    def forget(self, keys: Any) -> None:
        """It evicts in the background, and refuses what does not fit until it has. By force:

        it leases for ten seconds what was read.
        """
        self._store.batch_remove(keys, True)

    @property
    def version(self) -> str:
        """The wheel's."""
        return version("mooncake-transfer-engine-non-cuda")


def _addresses(blocks: U8) -> list[int]:
    first, stride = blocks.ctypes.data, blocks.strides[0]
    return [first + row * stride for row in range(len(blocks))]
