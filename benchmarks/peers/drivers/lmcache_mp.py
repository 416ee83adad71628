"""LMCache's multiprocess server, engine-driven: it names slots in shared memory, we copy."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    RegisterEngineDrivenContextPayload,
)
from lmcache.v1.multiprocess.transfer_context.base import EngineDrivenContextMetadata
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from benchmarks.peers.content import U8, key_of
from benchmarks.peers.drivers.base import Driver, free_ports, knock

BLOCK_TOKENS = 16
MODEL = "peers"
TIMEOUT_S = 30.0


class LmcacheMp(Driver):
    """The calls that LMCache's own engine connectors make; a chunk is one block."""

    def start(self) -> None:
        """Start the server, register a context for blocks of this size."""
        port, http, prometheus = free_ports(3)
        self._requests = itertools.count()
        self._instance = os.getpid()
        self._shared = Path("/dev/shm") / f"lmcache_l1_pool_{self._instance}"
        self.spawn(
            [
                str(Path(sys.executable).parent / "lmcache"),
                "server",
                f"--port={port}",
                f"--http-port={http}",
                f"--prometheus-port={prometheus}",
                f"--chunk-size={BLOCK_TOKENS}",
                f"--l1-size-gb={2 * self.place.capacity / (1 << 30)}",
                "--no-l1-use-lazy",
                "--eviction-policy=LRU",
                "--supported-transfer-mode=engine_driven",
                f"--shm-name={self._shared.name}",
                "--disable-observability",
            ]
        )
        self.await_server(lambda: knock(port), OSError)
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        hidden = self.place.block_bytes // BLOCK_TOKENS
        registered = self._client.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=self._instance,
                model_name=MODEL,
                world_size=1,
                block_size=BLOCK_TOKENS,
                num_layers=1,
                hidden_dim_size=hidden,
                dtype_str="uint8",
                use_mla=True,
                num_physical_slots=BLOCK_TOKENS,
            )
        ).result(timeout=TIMEOUT_S)
        if not registered.pool_size:
            raise RuntimeError("the server offers no shared memory")
        shape = torch.Size([1, BLOCK_TOKENS, hidden])
        self._context = EngineDrivenContextShm(
            EngineDrivenContextMetadata(
                MemoryLayoutDesc(shapes=[shape], dtypes=[torch.uint8]), BLOCK_TOKENS, True
            ),
            self._client,
            TIMEOUT_S,
            registered.shm_name,
            registered.pool_size,
        )

    def keys(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Token ids that lead to these blocks and no others."""
        names = np.frombuffer(b"".join(key_of(number) for number in numbers), "<u4")
        tokens = np.tile(names.reshape(-1, 4) & 0x7FFFFFFF, (1, BLOCK_TOKENS // 4))
        return tuple(tokens.reshape(-1).tolist())

    def put(self, keys: tuple[int, ...], blocks: U8) -> None:
        """Prepare, copy into the slots, commit."""
        key = self._key(keys)
        prepared = self._context.prepare_store(key, self._instance)
        slots, chunks = prepared if prepared is not None else ([], [])
        if len(chunks) != len(blocks):
            raise RuntimeError(f"{len(chunks)} slots for {len(blocks)} blocks")
        for chunk, slot in zip(chunks, slots, strict=True):
            np.copyto(slot.numpy().reshape(-1), blocks[chunk])
        if not self._context.commit_store(key, self._instance, slots):
            raise RuntimeError("the store was not committed")

    def get(self, keys: tuple[int, ...], out: U8) -> list[bool]:
        """Look up, prepare, copy out of the slots, commit, end the session."""
        found = self._look_up(key := self._key(keys))
        if found:
            part = self._key(keys[: found * BLOCK_TOKENS], key.request_id)
            slots = self._context.prepare_retrieve(part, self._instance) or []
            found = len(slots)
            for slot, block in zip(slots, out[:found], strict=True):
                np.copyto(block, slot.numpy().reshape(-1))
            self._context.commit_retrieve(part, self._instance)
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)
        return [at < found for at in range(len(out))]

    def exists(self, keys: tuple[int, ...]) -> int:
        """Look up, and let go of the locks that this takes."""
        found = self._look_up(key := self._key(keys))
        self._client.free_lookup_locks(key, 1).result(timeout=TIMEOUT_S)
        self._client.end_session(key.request_id).result(timeout=TIMEOUT_S)
        return found

    @property
    def version(self) -> str:
        """The wheel's."""
        return version("lmcache")

    def kill(self) -> None:
        """It leaves its pool behind, and does not use it again."""
        super().kill()
        self._shared.unlink(missing_ok=True)

    def _look_up(self, key: IPCCacheServerKey) -> int:
        self._client.lookup(key, 1).result(timeout=TIMEOUT_S)
        status = self._client.wait_prefetch_status(key.request_id, TIMEOUT_S)
        return int(status.result(timeout=TIMEOUT_S) or 0)

    def _key(self, tokens: tuple[int, ...], request: str = "") -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=request or f"request-{next(self._requests)}",
            num_kv_readers=1,
        )
