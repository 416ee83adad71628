"""Carries out the core's effects on the real tiers. Called from worker threads; blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tierkv.core.effects import Check, Headers, Move, Moved, ReadHeaders
from tierkv.core.ids import U32, Bool, Tier
from tierkv.errors import InvariantViolation
from tierkv.tiers.arena import Arena
from tierkv.tiers.copy import check_entries, copy_blocks, verify_blocks
from tierkv.tiers.disk import DiskTier

BytesEffect = Move | ReadHeaders | Check


class Mover:
    """Copies between the tiers, each copy verified against the block's checksum.

    ``durable_writes``: a copy to disk is synced before it counts (durability "power").
    """

    def __init__(
        self, arenas: Mapping[Tier, Arena], disk: DiskTier | None, *, durable_writes: bool
    ) -> None:
        self._arenas = arenas
        self._disk = disk
        self._durable_writes = durable_writes

    def perform(self, effect: BytesEffect) -> Moved | Headers | Bool:
        """Do it and return what the core expects.

        Raises TierFull or TierFailed if the disk refused some of it: then nothing has arrived.
        """
        if isinstance(effect, Move):
            return self._move(effect)
        if isinstance(effect, ReadHeaders):
            entries, ok = self._need_disk().headers(effect.pool, effect.slots.astype(np.uint32))
            return Headers(ok & (entries["id"] == effect.ids), entries["tokens"], entries["extra"])
        arena = self._arenas[effect.tier]
        return verify_blocks(arena, effect.pool, effect.slots.astype(np.uint32), effect.ids)

    def _move(self, move: Move) -> Moved:
        source, target = move.source_slots.astype(np.uint32), move.target_slots.astype(np.uint32)
        if move.target is Tier.DISK:
            return self._write(move, source, target)
        arena = self._arenas[move.target]
        if move.source is Tier.DISK:
            result = self._need_disk().read(move.pool, source, move.ids, arena, target)
            if result.error is not None:
                # What could not be read may be whole: to call it damaged would cost the block.
                raise result.error
            ok = result.ok
        else:
            ok = copy_blocks(
                self._arenas[move.source], source, arena, target, move.pool, verify=True
            )
            # The source may have been given to another block while we copied.
            ok &= check_entries(arena, move.pool, target, move.ids)
        entries = arena.table(move.pool)[target]
        return Moved(ok, entries["sum_hi"].copy(), entries["sum_lo"].copy())

    def _write(self, move: Move, source: U32, target: U32) -> Moved:
        disk, arena = self._need_disk(), self._arenas[move.source]
        expected = check_entries(arena, move.pool, source, move.ids)
        chosen = np.flatnonzero(expected)
        result = disk.write(move.pool, target[chosen], arena, source[chosen])
        if result.error is not None:
            raise result.error
        if self._durable_writes:
            disk.sync()
        moved = Moved(
            np.zeros(len(source), np.bool_),
            np.zeros(len(source), np.uint64),
            np.zeros(len(source), np.uint64),
        )
        moved.ok[chosen] = result.written
        moved.sum_hi[chosen] = result.sum_hi
        moved.sum_lo[chosen] = result.sum_lo
        return moved

    def _need_disk(self) -> DiskTier:
        if self._disk is None:
            raise InvariantViolation("an effect names the disk tier, but there is none")
        return self._disk
