"""Fills the status document from the daemon's parts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from tierkv_wal import SLOT_BYTES, WalWriter

from tierkv import __version__
from tierkv.config.schema import Config
from tierkv.core.arrays import distinct
from tierkv.core.counters import REASONS, Counters
from tierkv.core.ids import Tier
from tierkv.core.pins import pins_of
from tierkv.core.state import State
from tierkv.native.loops import loops
from tierkv.obs.status import (
    CheckpointStatus,
    EvictionStatus,
    HeldStatus,
    MemoryStatus,
    NamespaceStatus,
    PrefixStatus,
    RecoveredTier,
    RecoveryStatus,
    StatusDocument,
    TierStatus,
    TopPrefixStatus,
    WalStatus,
)
from tierkv.service.assembly import Parts
from tierkv.service.census import Census
from tierkv.service.lifecycle import Lifecycle
from tierkv.service.recovered import RecoveryReport
from tierkv.service.room import Room
from tierkv.service.sessions import Sessions
from tierkv.tiers.arena import Arena
from tierkv.units import about_bytes, format_ratio

TOP_PREFIXES = 10
"""How many the status document names."""


@dataclass
class StatusReader:
    """Reads all parts when somebody asks."""

    config: Config
    lifecycle: Lifecycle
    writer: WalWriter
    report: RecoveryReport
    parts: Parts
    started: float
    room: Room
    sessions: Sessions | None = None
    census: Census = field(init=False)

    def __post_init__(self) -> None:
        self.census = Census(self.parts.planner.state)

    def document(self) -> StatusDocument:
        """The daemon as it is now."""
        state = self.parts.planner.state
        counters = self.parts.planner.placement.counters
        pins = len(pins_of(state))
        return StatusDocument(
            version=__version__,
            state=self.lifecycle.state.value,
            epoch=state.epoch,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self.started,
            durability=self.config.wal.durability,
            socket=self.config.server.socket,
            native=not loops().missing,
            native_missing=loops().missing,
            tiers={tier.label: self._tier(tier) for tier in Tier},
            memory={tier.label: self._memory(tier) for tier in self.parts.arenas},
            blocks=state.row_set.used_count,
            only_in_ram_blocks=state.row_set.used_count - state.copies(Tier.DISK),
            sequences=sum(not one.fenced for one in state.sequences.values()) - pins,
            leases=len(self.parts.leases),
            pins=pins,
            fenced_blocks=_fenced_blocks(state),
            connections=len(self.sessions) if self.sessions is not None else 0,
            in_flight=self.sessions.in_flight if self.sessions is not None else 0,
            behind_blocks=self.parts.engine.behind_blocks,
            workers=self.sessions.workers() if self.sessions is not None else [],
            namespaces=self._namespaces(),
            prefix=PrefixStatus(
                lookup_tokens=counters.lookup_tokens,
                hit_tokens=sum(counters.hit_tokens.values()),
                hit_ratio=counters.hit_window.ratio,
                hit_tokens_by_tier=dict(counters.hit_tokens),
            ),
            evictions=counters.evictions_status(),
            top_prefixes=_top_prefixes(counters),
            evicted=_evicted(counters),
            wal=WalStatus(
                appended_lsn=self.writer.appended_lsn,
                written_lsn=self.writer.written_lsn,
                durable_lsn=self.writer.durable_lsn,
                unsynced_bytes=SLOT_BYTES * (self.writer.appended_lsn - self.writer.durable_lsn),
                since_checkpoint_bytes=self.parts.checkpointer.bytes_since,
                bytes=self.writer.bytes_written,
                segments=self.writer.segment_count,
            ),
            recovery=_recovery(self.report, self.parts.arenas),
            checkpoint=CheckpointStatus(
                lsn=self.parts.checkpointer.last_lsn, age_s=self.parts.checkpointer.age_s
            ),
            room=self.room.status,
        )

    def in_short(self) -> str:
        """One line for whoever asks the service manager: no more than a look at some numbers."""
        state, counters = self.parts.planner.state, self.parts.planner.placement.counters
        tiers = ", ".join(
            f"{tier.label} {about_bytes(state.used_bytes(tier))} of {about_bytes(budget)}"
            for tier, budget in state.budgets.items()
            if budget
        )
        out_of_service = ", disk OUT OF SERVICE" if self.parts.engine.breaker.open else ""
        leases = "1 lease" if len(state.leases) == 1 else f"{len(state.leases)} leases"
        hits = f", {format_ratio(counters.hit_window.ratio)} hits" if counters.lookup_tokens else ""
        return f"{self.lifecycle.state.value}: {leases}, {tiers}{hits}{out_of_service}"

    def _tier(self, tier: Tier) -> TierStatus:
        state = self.parts.planner.state
        capacity = state.budgets[tier]
        used = state.used_bytes(tier)
        disk = self.parts.disk if tier is Tier.DISK else None
        paused = tier is Tier.DISK and self.parts.planner.placement.disk_paused
        return TierStatus(
            capacity_bytes=capacity,
            used_bytes=used,
            blocks=state.copies(tier),
            free_ratio=(capacity - used) / capacity if capacity else 0.0,
            evictable_blocks=self.parts.planner.placement.evictable(tier),
            state="failed" if paused else "ok" if capacity else "off",
            io=disk.io if disk is not None else "",
        )

    def _memory(self, tier: Tier) -> MemoryStatus:
        arena, prefault = self.parts.arenas[tier], self.parts.prefault
        return MemoryStatus(
            memory_bytes=arena.memory_bytes,
            prefault=prefault.state(tier),
            missing_bytes=prefault.missing_bytes(tier),
            huge_bytes=prefault.huge_bytes(tier),
            numa=str(arena.numa or ""),
        )

    def _namespaces(self) -> list[NamespaceStatus]:
        state = self.parts.planner.state
        tokens = self.parts.planner.placement.counters.namespace_tokens
        found = []
        counts = self.census.counts()
        for namespace, entry in state.namespaces.items():
            pool, shape = entry.pool, state.pools[entry.pool]
            blocks, *copies = counts[namespace].tolist()
            spec = self.parts.namespaces.spec(namespace)
            lookup_tokens, hit_tokens = tokens.get(namespace, (0, 0))
            found.append(
                NamespaceStatus(
                    id=namespace,
                    model=spec.model if spec else "",
                    dtype=spec.dtype if spec else "",
                    block_tokens=shape.block_tokens,
                    block_bytes=shape.block_bytes,
                    tenant=spec.tenant if spec else "",
                    digest=entry.digest.hex(),
                    blocks=blocks,
                    tiers={
                        tier.label: HeldStatus(
                            blocks=copies[tier], bytes=copies[tier] * state.slot_bytes(tier, pool)
                        )
                        for tier in Tier
                    },
                    lookup_tokens=lookup_tokens,
                    hit_tokens=hit_tokens,
                )
            )
        return found


def _top_prefixes(counters: Counters) -> list[TopPrefixStatus]:
    return [
        TopPrefixStatus(
            hash=f"{root.hash_hi:016x}{root.hash_lo:016x}",
            namespace=root.namespace,
            hits=found.times,
            hit_tokens=found.tokens,
            error_tokens=found.error_tokens,
        )
        for root, found in counters.top_prefixes.largest(TOP_PREFIXES)
    ]


def _evicted(counters: Counters) -> list[EvictionStatus]:
    return [
        EvictionStatus(
            from_tier=from_tier,
            to_tier=to_tier,
            reason=reason,
            blocks=blocks,
            why=REASONS.get(reason, ""),
        )
        for (from_tier, to_tier, reason), blocks in sorted(counters.evictions.items())
    ]


def _fenced_blocks(state: State) -> int:
    tables = [one.rows for one in state.sequences.values() if one.fenced]
    return len(distinct(np.concatenate(tables))) if tables else 0


def _recovery(report: RecoveryReport, arenas: Mapping[Tier, Arena]) -> RecoveryStatus:
    tiers: Mapping[str, RecoveredTier] = {
        tier.label: RecoveredTier(kept=found.kept, dropped=found.dropped)
        for tier, found in report.tiers.items()
    }
    return RecoveryStatus(
        duration_s=report.duration_s,
        truncated_bytes=report.truncated_bytes,
        rebuilt=report.rebuilt,
        records=report.records,
        blocks=report.blocks,
        dropped_blocks=report.dropped_blocks,
        tiers=dict(tiers),
        adopted_bytes={tier.label: arena.adopted_bytes for tier, arena in arenas.items()},
    )


def short_facts(document: StatusDocument) -> dict[str, object]:
    """What one line of the log tells of the daemon's state."""
    return {
        "epoch": document.epoch,
        "uptime_s": round(document.uptime_s),
        "blocks": document.blocks,
        "leases": document.leases,
        "sequences": document.sequences,
        "connections": document.connections,
        "used_bytes": ",".join(f"{name}:{one.used_bytes}" for name, one in document.tiers.items()),
        "hit_ratio": document.prefix.hit_ratio,
        "wal_lsn": document.wal.appended_lsn,
        "wal_durable_lsn": document.wal.durable_lsn,
        "checkpoint_age_s": document.checkpoint.age_s,
        "loop_turn_max_s": document.loop.turn_max_s,
    }
