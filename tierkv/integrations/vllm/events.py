"""Blocks that tierkv has stored, as the events that vLLM publishes for routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierkv.integrations.vllm.geometry import Geometry
from tierkv.integrations.vllm.messages import Saved

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MEDIUM = "CPU"
EXPECTED_MAX = 16_384
"""Saves whose end is awaited; a worker that died reports none of its."""


class StoredEvents:
    """One ``BlockStored`` for each save that all workers have ended.

    Hashes are vLLM's own, so that a router finds these blocks under the same names as the
    engine's. tierkv says nothing of blocks that leave it.
    """

    def __init__(self, geometry: Geometry, caches: KVCacheConfig) -> None:
        self._block_tokens = geometry.block_tokens
        hashed = getattr(caches, "hash_block_size", None) or geometry.block_tokens
        self._hashes_per_block = geometry.block_tokens // hashed
        self._expected: dict[int, tuple[int, Any]] = {}
        self._reported = Saved()
        self._ready: list[Any] = []

    def expect(self, number: int, request: Request, first: int, full: int) -> None:
        """Save ``number`` stores the request's blocks ``first`` .. ``full`` - 1."""
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        per, size = self._hashes_per_block, self._block_tokens
        if len(request.block_hashes) < full * per:
            return
        names = request.block_hashes[max(first * per - 1, 0) : full * per]
        hashes = [maybe_convert_block_hash(name) for name in names]
        parent = hashes.pop(0) if first else None
        adapter = request.lora_request
        event = BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[first * size : full * size]),
            block_size=size // per,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM,
            lora_name=adapter.name if adapter else None,
        )
        self._expected[number] = (full, event)
        while len(self._expected) > EXPECTED_MAX:
            del self._expected[next(iter(self._expected))]

    def ended(self, report: Saved, workers: int) -> None:
        """Count the workers that have ended a save."""
        waiting = {}
        for number, (count, blocks) in self._reported.aggregate(report).blocks.items():
            if number not in self._expected:
                continue
            if count < workers:
                waiting[number] = (count, blocks)
                continue
            full, event = self._expected.pop(number)
            if blocks >= full:
                self._ready.append(event)
        self._reported = Saved(waiting)

    def take(self) -> list[Any]:
        """The events since the last call."""
        taken, self._ready = self._ready, []
        return taken
