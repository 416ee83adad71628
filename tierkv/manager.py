"""The cache in one process: no daemon, no socket, no log; the same core on the same tiers.

For tests, notebooks and simulation. Sequences that are not being used may spill when the device
tier is full, and come back when they are used again, so more of them can be open than fit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from tierkv_wal import RealStorage

from tierkv.core.counters import Counters
from tierkv.core.effects import Flow
from tierkv.core.ids import RAM_TIERS, U8, U32, Tier
from tierkv.core.inline import run_inline
from tierkv.core.matching import Chain
from tierkv.core.placement import Placement
from tierkv.core.planner import Limits, Planner
from tierkv.core.spec import TOKEN_ID_MAX, KVSpec
from tierkv.core.state import PoolShape, State
from tierkv.errors import CorruptionError, InvalidArgument, PoolExhausted
from tierkv.native.loops import loops
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.entry import payload_sums, split_hashes
from tierkv.tiers.mover import Mover
from tierkv.tiers.sizes import slot_bytes
from tierkv.tiers.tables import ArenaTables

T = TypeVar("T")

Fill = Callable[[U8, int, int], None]
"""``fill(payload, first_token, tokens)``: write KV of these tokens (counted within the sequence)
into the block's payload (uint8 [block_bytes])."""


class KVCacheManager:
    """Prefix-sharing block cache over device, host and disk tiers, in this process.

    ``device_blocks``, ``host_blocks`` and ``disk_blocks`` are capacities; 0 leaves a tier out.
    Files lie in a private temporary directory (``directory`` chooses where) until ``close``.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        device_blocks: int,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        spec.check()
        self.spec = spec
        shape = PoolShape(spec.block_bytes, spec.block_tokens)
        blocks = {Tier.DEVICE: device_blocks, Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
        budgets = {tier: count * slot_bytes(tier, shape) for tier, count in blocks.items()}
        self._directory = Path(tempfile.mkdtemp(prefix="tierkv-", dir=directory))
        home = ArenaFiles(self._directory)
        self._arenas = {
            tier: Arena.open(home, tier.label, budgets[tier], bytes(16), "")
            for tier in RAM_TIERS
            if budgets[tier]
        }
        self._disk: DiskTier | None = None
        if disk_blocks:
            path = str(self._directory / "disk")
            budget = budgets[Tier.DISK]
            self._disk = DiskTier(path, budget, budget, bytes(16), RealStorage())
            self._disk.add_pool(0, shape.block_bytes, shape.block_tokens)
        for arena in self._arenas.values():
            arena.add_pool(0, shape.block_bytes, shape.block_tokens)
        self.counters = Counters()
        self.state = State(budgets, slot_bytes, loops().structures())
        placement = Placement(
            self.state,
            ArenaTables(self._arenas),
            {tier: self.state.structures.lru(self.state.rows_room) for tier in Tier},
            self.state.commit,
            self.counters,
        )
        self._planner = Planner(self.state, placement, Limits())
        self._mover = Mover(self._arenas, self._disk, durable_writes=False)
        self._lease = self._planner.open_lease(bytes(16), os.getpid(), 0, os.getuid()).id
        self._namespace = self._planner.open_namespace(spec.digest, shape)
        self._tokens: OrderedDict[int, list[int]] = OrderedDict()
        """Token ids of the open sequences, least recently used first."""
        self._next = 1

    # --- the surface ------------------------------------------------------------------------------

    def begin_sequence(self, token_ids: Sequence[int], fill: Fill | None = None) -> int:
        """Open a sequence on these tokens; full blocks that are cached are shared, not filled.

        ``fill`` is called for the blocks that are not. Raises InvalidArgument for a token id out
        of range, PoolExhausted if the tokens do not fit even with all other sequences spilled.
        """
        tokens = self._checked(token_ids)
        sequence, self._next = self._next, self._next + 1
        chain = self._chain(tokens, 0, len(tokens) // self.spec.block_tokens)
        acquire = self._planner.acquire(self._lease, self._namespace, sequence, chain)
        view = self._run(acquire)
        cached = len(view.slots) * self.spec.block_tokens
        self._tokens[sequence] = tokens[:cached]
        try:
            self._append(sequence, tokens[cached:], fill)
        except PoolExhausted:
            self.end_sequence(sequence)
            raise
        return sequence

    def append_tokens(
        self, sequence: int, token_ids: Sequence[int], fill: Fill | None = None
    ) -> None:
        """Add tokens at the end. Raises as ``begin_sequence``; the sequence is then as before."""
        tokens = self._checked(token_ids)
        self._use(sequence)
        self._append(sequence, tokens, fill)

    def end_sequence(self, sequence: int) -> None:
        """Close a sequence. Its full blocks stay cached; its partial tail is gone."""
        self._known(sequence)
        self._planner.release(self._lease, [sequence])
        del self._tokens[sequence]

    def block_table(self, sequence: int) -> U32:
        """Device slots of the sequence's blocks, shape [n]; valid until another sequence is used.

        Raises PoolExhausted if they cannot all be brought into the device tier, CorruptionError if
        one is lost: the sequence then has the ``tokens`` before it, and may be used again.
        """
        return self._use(sequence)

    def payload(self, sequence: int, block: int) -> U8:
        """The bytes of one block of the sequence, a view of the device tier [block_bytes]."""
        slots = self._use(sequence)
        payload: U8 = self._arenas[Tier.DEVICE].payload(0)[slots[block]]
        return payload

    def tokens(self, sequence: int) -> list[int]:
        """The sequence's token ids."""
        self._known(sequence)
        return list(self._tokens[sequence])

    def stats(self) -> dict[str, Any]:
        """Blocks by tier, sharing and eviction counts since the manager was made."""
        refs = self.state.blocks.refs[self.state.live_rows()]
        return {
            "sequences": len(self._tokens),
            "blocks": int(self.state.row_set.used_count),
            "blocks_by_tier": {tier.label: self.state.slots[tier, 0].used_count for tier in Tier},
            "free_blocks": {tier.label: self.state.slots[tier, 0].free_count for tier in Tier},
            "shared_blocks": int(np.count_nonzero(refs > 1)),
            "cached_blocks": int(np.count_nonzero(refs == 0)),
            "lookup_tokens": self.counters.lookup_tokens,
            "hit_tokens": dict(self.counters.hit_tokens),
            "evictions": self.counters.evictions_status(),
        }

    def close(self) -> None:
        """Give everything back; the manager is of no more use."""
        for arena in self._arenas.values():
            arena.close()
        if self._disk is not None:
            self._disk.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- parts ------------------------------------------------------------------------------------

    def _append(self, sequence: int, fresh: list[int], fill: Fill | None) -> None:
        tokens, size = self._tokens[sequence], self.spec.block_tokens
        total = len(tokens) + len(fresh)
        planner = self._planner
        view = self._with_room(
            sequence, lambda: planner.reserve(self._lease, sequence, len(tokens), total)
        )
        payload = self._arenas[Tier.DEVICE].payload(0)
        at = len(tokens)
        while fill is not None and at < total:
            count = min(size - at % size, total - at)
            fill(payload[view.slots[at // size]], at, count)
            at += count
        first, full = len(tokens) // size, total // size
        tokens += fresh
        if full > first:
            hi, lo = payload_sums(payload, view.slots[first:full])
            chain = self._chain(tokens, first, full)
            self._run(planner.seal(self._lease, sequence, first, chain, hi, lo))

    def _use(self, sequence: int) -> U32:
        """Bring a sequence back if it was spilled; it is now the most recently used one."""
        self._known(sequence)
        self._tokens.move_to_end(sequence)
        planner = self._planner
        try:
            view = self._with_room(sequence, lambda: planner.resume(self._lease, sequence))
        except CorruptionError as error:
            del self._tokens[sequence][error.details["blocks"] * self.spec.block_tokens :]
            raise
        return view.slots

    def _with_room(self, sequence: int, flow: Callable[[], Flow[T]]) -> T:
        """Run a flow, letting other sequences spill one by one as long as it wants for room."""
        others = [other for other in self._tokens if other != sequence]
        while True:
            try:
                return self._run(flow())
            except PoolExhausted:
                if not others:
                    raise
                self._planner.suspend(self._lease, others.pop(0))

    def _run(self, flow: Flow[T]) -> T:
        return run_inline(flow, self._mover.perform)  # type: ignore[arg-type]  # Wait never gets there

    def _known(self, sequence: int) -> None:
        if sequence not in self._tokens:
            raise InvalidArgument(f"there is no sequence {sequence}; it ended or never began")

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        limit = self.spec.vocab_size or TOKEN_ID_MAX + 1
        tokens = [int(token) for token in token_ids]
        for at, token in enumerate(tokens):
            if not 0 <= token < limit:
                raise InvalidArgument(
                    f"token id {token} at position {at} is out of range: it must be 0 to "
                    f"{limit - 1}"
                )
        return tokens

    def _chain(self, tokens: list[int], first: int, stop: int) -> Chain:
        size = self.spec.block_tokens
        ids = np.array(tokens[: stop * size], np.uint32)
        hashes = loops().chain_hashes(self.spec.digest, ids, size)[first:]
        hi, lo = split_hashes(hashes.tobytes())
        return Chain(
            hi, lo, ids[first * size :].reshape(-1, size), np.zeros(stop - first, np.uint64)
        )
