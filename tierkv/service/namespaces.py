"""Opens namespaces: checks what a worker says of its model, and gets the tiers ready for it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tierkv.core.ids import Tier
from tierkv.core.planner import Planner
from tierkv.core.spec import KVSpec, slot_stride
from tierkv.core.state import PoolShape
from tierkv.errors import InvalidArgument, LimitExceeded, NamespaceMismatch
from tierkv.rpc.messages import NamespaceOpened
from tierkv.tiers.arena import POOLS_MAX, Arena
from tierkv.tiers.disk import DiskTier


class Namespaces:
    """The namespaces the daemon knows, with their specs.

    ``specs`` maps a namespace's number to its spec as JSON, for checkpoints and status.
    """

    def __init__(
        self,
        planner: Planner,
        arenas: Mapping[Tier, Arena],
        disk: DiskTier | None,
        specs: dict[int, bytes],
    ) -> None:
        self._planner = planner
        self._arenas = arenas
        self._disk = disk
        self.specs = specs

    def open(self, spec: KVSpec, digest: bytes) -> NamespaceOpened:
        """Enter a namespace, or find it.

        Raises InvalidArgument, NamespaceMismatch, LimitExceeded, TierFull, TierFailed; then
        nothing has changed.
        """
        spec.check()
        if spec.digest != digest:
            raise NamespaceMismatch(
                f"the worker's digest of {spec.model!r} is not what this daemon computes: both "
                "must run the same tierkv version",
                ours=spec.digest.hex(),
                theirs=digest.hex(),
            )
        self._check_known(spec, digest)
        shape = PoolShape(spec.block_bytes, spec.block_tokens)
        arena = self._arenas[Tier.DEVICE]
        stride = slot_stride(shape.block_bytes)
        if stride > arena.budget_bytes:
            raise InvalidArgument(
                f"a block of {spec.model!r} takes {stride} bytes, the device tier has only "
                f"{arena.budget_bytes}; raise device.bytes or lower block_tokens"
            )
        pool = self._ready_pool(shape)
        namespace = self._planner.open_namespace(digest, shape)
        self.specs[namespace] = msgspec.json.encode(spec, order="sorted")
        self._planner.state.touch_namespace(namespace)
        return NamespaceOpened(
            namespace=namespace,
            slot_offset=pool * arena.region_bytes,
            slot_stride=stride,
            slots=arena.budget_bytes // stride,
            **arena.table_place(pool)._asdict(),
        )

    def spec(self, namespace: int) -> KVSpec | None:
        """What is known of a namespace's model; None if only its digest survived a crash."""
        encoded = self.specs.get(namespace)
        return msgspec.json.decode(encoded, type=KVSpec) if encoded else None

    def _check_known(self, spec: KVSpec, digest: bytes) -> None:
        for namespace, entry in self._planner.state.namespaces.items():
            known = self.spec(namespace)
            if entry.digest != digest or known is None or known == spec:
                continue
            raise NamespaceMismatch(
                f"{spec.model!r} has the digest of another namespace, {known.model!r}; change "
                "its fingerprint"
            )

    def _ready_pool(self, shape: PoolShape) -> int:
        """Map the pool in every tier before the log says that it exists."""
        pools = self._planner.state.pools
        pool = pools.index(shape) if shape in pools else len(pools)
        if pool >= POOLS_MAX:
            raise LimitExceeded(
                f"the daemon holds blocks of {POOLS_MAX} different sizes, its limit",
                limit=POOLS_MAX,
            )
        for arena in self._arenas.values():
            arena.add_pool(pool, shape.block_bytes, shape.block_tokens)
        if self._disk is not None:
            self._disk.add_pool(pool, shape.block_bytes, shape.block_tokens)
        return pool
