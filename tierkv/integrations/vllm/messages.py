"""What the connector's two sides tell each other, carried by vLLM with each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierkv.core.ids import I32
from tierkv.core.spec import KVSpec
from tierkv.integrations.vllm.chain import Chain


@dataclass
class WorkerSpec(KVConnectorHandshakeMetadata):
    """A worker's word on what its blocks are; the scheduler looks them up under it."""

    spec: KVSpec


@dataclass
class Load:
    """Bring the blocks of ``chain`` from ``first`` on into the engine's: i32 [blocks, columns]."""

    request_id: str
    chain: Chain
    first: int
    rows: I32


@dataclass
class Save:
    """Store the blocks of ``chain``, which lie in ``rows`` (i32 [all its blocks, columns]).

    An earlier save had those before ``first``; what became of them is not known here.
    """

    number: int
    chain: Chain
    rows: I32
    first: int = 0


@dataclass
class Step(KVConnectorMetadata):
    """A step's work for the workers. ``written``: ids of the blocks that it writes into.

    ``idle``: nothing is computed, so there is time to wait for loads.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    idle: bool = False


@dataclass
class Saved(KVConnectorWorkerMetadata):
    """For each save that is over: how many workers said so, and the least blocks any has stored."""

    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Saved:
        """Of several workers."""
        if not isinstance(other, Saved):
            raise TypeError(f"a report of {type(other).__name__} among tierkv's")
        merged = dict(self.blocks)
        for number, (workers, blocks) in other.blocks.items():
            already, least = merged.get(number, (0, blocks))
            merged[number] = (already + workers, min(least, blocks))
        return Saved(merged)
