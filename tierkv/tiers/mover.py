"""Carries out the core's effects on the real tiers. Called from worker threads; blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tierkv.core.effects import Check, Headers, Move, Moved, ReadHeaders
from tierkv.core.ids import I64, RAM_TIERS, U32, U64, Bool, Tier
from tierkv.errors import InvariantViolation
from tierkv.tiers.arena import Arena
from tierkv.tiers.blocks import Blocks
from tierkv.tiers.copy import check_entries, checked_entries, copy_blocks, verify_blocks
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.window import Windows

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
        self._windows = Windows()

    def in_host_memory(self, move: Move) -> bool:
        """Whether it copies from host memory to host memory."""
        return all(
            tier in RAM_TIERS and not self._on_gpu(tier, move.pool)
            for tier in (move.source, move.target)
        )

    def perform(self, effect: BytesEffect) -> Moved | Headers | Bool:
        """Do it and return what the core expects.

        Raises TierFull or TierFailed if the disk refused some of it: then nothing has arrived.
        Raises GpuFailed if the GPU did: then its contents are in doubt.
        """
        if isinstance(effect, Move):
            return self._move(effect)
        if isinstance(effect, ReadHeaders):
            entries, ok = self._need_disk().headers(effect.pool, effect.slots.astype(np.uint32))
            return Headers(ok & (entries["id"] == effect.ids), entries["tokens"], entries["extra"])
        return self._check(effect)

    def _check(self, check: Check) -> Bool:
        arena, slots = self._arenas[check.tier], check.slots.astype(np.uint32)
        if not self._on_gpu(check.tier, check.pool):
            return verify_blocks(arena, check.pool, slots, check.ids)
        sound = np.zeros(len(slots), np.bool_)
        for window, part in self._windows.onto(arena, check.pool, len(slots)):
            window.fetch(slots[part])
            sound[part] = verify_blocks(window, check.pool, window.numbers, check.ids[part])
        return sound

    def _move(self, move: Move) -> Moved:
        source, target = move.source_slots.astype(np.uint32), move.target_slots.astype(np.uint32)
        if move.target is Tier.DISK:
            return self._write(move, source, target)
        arena, pool = self._arenas[move.target], move.pool
        if move.source is Tier.DISK:
            ok = self._read(pool, source, move.ids, arena, target)
        else:
            ok = self._copy(pool, self._arenas[move.source], source, arena, target)
            # The source may have been given to another block while we copied.
            ok &= check_entries(arena, pool, target, move.ids)
        entries = arena.table(pool)[target]
        return Moved(ok, entries["sum_hi"].copy(), entries["sum_lo"].copy())

    def _copy(self, pool: int, src: Arena, source: U32, dst: Arena, target: U32) -> Bool:
        """Copy blocks in RAM; which are whole."""
        if src.gpu(pool) is None or dst.gpu(pool) is None:
            return copy_blocks(src, source, dst, target, pool, verify=True)
        ok = np.zeros(len(source), np.bool_)
        dst.empty(pool, target)
        for window, part in self._windows.onto(src, pool, len(source)):
            window.fetch(source[part])
            window.table(pool)[:], ok[part] = checked_entries(window, pool, window.numbers)
            window.store(target[part], ok[part])
        return ok

    def _read(self, pool: int, source: U32, ids: U64, arena: Arena, target: U32) -> Bool:
        """Read blocks from disk; which are whole. Raises TierFailed."""
        if arena.gpu(pool) is None:
            return self._read_here(pool, source, ids, arena, target)
        ok = np.zeros(len(source), np.bool_)
        arena.empty(pool, target)
        for window, part in self._windows.onto(arena, pool, len(source)):
            ok[part] = self._read_here(pool, source[part], ids[part], window, window.numbers)
            window.store(target[part], ok[part])
        return ok

    def _read_here(self, pool: int, source: U32, ids: U64, blocks: Blocks, target: U32) -> Bool:
        result = self._need_disk().read(pool, source, ids, blocks, target)
        if result.error is not None:
            # What could not be read may be whole: to call it damaged would cost the block.
            raise result.error
        return result.ok

    def _write(self, move: Move, source: U32, target: U32) -> Moved:
        arena, pool = self._arenas[move.source], move.pool
        chosen = np.flatnonzero(check_entries(arena, pool, source, move.ids))
        moved = Moved(
            np.zeros(len(source), np.bool_),
            np.zeros(len(source), np.uint64),
            np.zeros(len(source), np.uint64),
        )
        if arena.gpu(pool) is None:
            self._write_here(pool, arena, source[chosen], target, moved, chosen)
        else:
            for window, part in self._windows.onto(arena, pool, len(chosen)):
                window.fetch(source[chosen[part]])
                self._write_here(pool, window, window.numbers, target, moved, chosen[part])
        if self._durable_writes:
            self._need_disk().sync()
        return moved

    def _write_here(
        self, pool: int, blocks: Blocks, source: U32, target: U32, moved: Moved, chosen: I64
    ) -> None:
        """Write ``source`` [n] to those of the targets that are ``chosen`` [n], noted in ``moved``.

        Raises TierFull, TierFailed.
        """
        result = self._need_disk().write(pool, target[chosen], blocks, source)
        if result.error is not None:
            raise result.error
        moved.ok[chosen] = result.written
        moved.sum_hi[chosen] = result.sum_hi
        moved.sum_lo[chosen] = result.sum_lo

    def _on_gpu(self, tier: Tier, pool: int) -> bool:
        return self._arenas[tier].gpu(pool) is not None

    def _need_disk(self) -> DiskTier:
        if self._disk is None:
            raise InvariantViolation("an effect names the disk tier, but there is none")
        return self._disk
