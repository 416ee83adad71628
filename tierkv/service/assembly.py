"""Builds the daemon's object graph, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tierkv_wal import WalWriter

from tierkv.config.schema import Config
from tierkv.core.counters import Counters
from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.core.placement import Placement
from tierkv.core.planner import RECORDS_PER_BLOCK_MAX, Limits, Planner
from tierkv.core.records import Kind, blank
from tierkv.service.attend import Attention
from tierkv.service.checkpoint import Checkpointer
from tierkv.service.deleted import DeletedFile
from tierkv.service.engine import Engine
from tierkv.service.journal import Journal
from tierkv.service.leases import Leases
from tierkv.service.namespaces import Namespaces
from tierkv.service.pinning import Pinning
from tierkv.service.prefault import Prefault
from tierkv.service.recovered import Recovered
from tierkv.service.recovery import unverified_rows
from tierkv.service.watchdog import Pulse
from tierkv.tiers.arena import Arena
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.mover import Mover
from tierkv.tiers.tables import ArenaTables


class Hooks(Protocol):
    """Who wants to know what the parts do. Durations in seconds."""

    def synced(self, lsn: int, seconds: float) -> None:
        """The log was synced, up to there."""

    def checkpointed(self, seconds: float) -> None:
        """A checkpoint was made."""

    def moved(self, move: Move, seconds: float) -> None:
        """A move was carried out."""

    def written(self, records: int, seconds: float) -> None:
        """So many records were written to the log, by one write."""

    def block_gone(self, lived_s: float) -> None:
        """A block of the sample had to leave the last tier that had it."""

    def block_left(self, tier: Tier, idle_s: float) -> None:
        """A block of the sample had to leave a tier, unused for so long."""

    def block_reused(self, idle_s: float) -> None:
        """A request found a block of the sample, unused for so long."""

    def attended(self, waited_s: list[float]) -> None:
        """A round of attention begins, with requests that waited so long."""


class Deaths(Protocol):
    """Who ends the process when its state is in doubt."""

    def log_died(self, error: Exception) -> None:
        """The log failed: the process must end."""

    def broken(self, error: BaseException) -> None:
        """Our own code failed: the process must end."""


@dataclass(frozen=True)
class Parts:
    """What serves requests, ready to run."""

    journal: Journal
    planner: Planner
    engine: Engine
    checkpointer: Checkpointer
    leases: Leases
    namespaces: Namespaces
    attention: Attention
    prefault: Prefault
    pinning: Pinning
    arenas: Mapping[Tier, Arena]
    disk: DiskTier | None
    deleted: DeletedFile

    def begin(self, epoch: int, *, write_through: bool) -> None:
        """The first acts of a new incarnation: log its epoch, wait for workers, save the rest.

        Leases that outlived the last daemon wait for their workers from now on; sealed blocks
        that it did not bring to disk are queued.
        """
        record = blank(1, Kind.EPOCH)
        record["id"] = epoch
        self.journal.commit(record)
        self.journal.flush()
        self.leases.await_workers()
        if write_through:
            self.engine.write_all_behind()

    @property
    def pulses(self) -> Mapping[str, Pulse]:
        """Of the threads without which nothing goes on."""
        return {"the log's writer": self.journal.pulse, "the movers": self.engine.pulse}

    def apply(self, config: Config, writer: WalWriter) -> None:
        """Take over the live settings of a new configuration."""
        self.planner.limits = request_limits(config, writer)
        self.engine.queue_blocks = config.disk.queue_blocks
        self.leases.grace_s = config.server.grace_s

    async def close(self) -> None:
        """End all threads; the log is written and synced."""
        await self.engine.close()
        await self.attention.close()
        self.prefault.close()
        self.pinning.close()
        self.checkpointer.close()
        self.journal.close()


def assemble(
    config: Config, recovered: Recovered, counters: Counters, *, hooks: Hooks, deaths: Deaths
) -> Parts:
    """Build everything on what recovery left. Call on the event loop."""
    state, arenas = recovered.state, recovered.arenas
    power = config.wal.durability == "power"
    journal = Journal(
        state,
        recovered.writer,
        config.wal.durability,
        config.wal.none_flush_s,
        deaths.log_died,
        hooks.synced,
        hooks.written,
    )
    placement = Placement(
        state,
        ArenaTables(arenas, journal.write_freed),
        {tier: state.structures.lru(state.rows_room) for tier in Tier},
        journal.commit,
        counters,
    )
    residency = placement.residency
    residency.on_gone, residency.on_left = hooks.block_gone, hooks.block_left
    residency.on_reused = hooks.block_reused
    placement.doubt.mark(unverified_rows(state))
    placement.list_all()
    planner = Planner(state, placement, request_limits(config, recovered.writer))
    engine = Engine(
        planner,
        journal,
        Mover(arenas, recovered.disk, durable_writes=power),
        write_through=config.disk.write == "through",
        durable_seal=power,
        queue_blocks=config.disk.queue_blocks,
    )
    engine.on_move = hooks.moved
    engine.on_broken = deaths.broken
    checkpointer = Checkpointer(
        state,
        recovered.specs,
        journal,
        recovered.writer,
        recovered.disk,
        recovered.index,
        recovered.checkpoint_lsn,
    )
    checkpointer.on_done = hooks.checkpointed
    checkpointer.on_sync = hooks.synced
    namespaces = Namespaces(planner, arenas, recovered.disk, recovered.specs)
    attention = Attention(planner, namespaces, arenas, config.attend.threads)
    attention.on_round = hooks.attended
    in_ram = {tier: arena for tier, arena in arenas.items() if arena.on_gpu is None}
    prefault = Prefault(state, in_ram, ahead=config.arena.prefault == "on")
    return Parts(
        journal=journal,
        planner=planner,
        engine=engine,
        checkpointer=checkpointer,
        leases=Leases(planner, config.server.grace_s),
        namespaces=namespaces,
        attention=attention,
        prefault=prefault,
        pinning=Pinning(arenas, lambda: prefault.state(Tier.HOST) == "done"),
        arenas=arenas,
        disk=recovered.disk,
        deleted=recovered.deleted,
    )


def request_limits(config: Config, writer: WalWriter) -> Limits:
    """What the configuration grants, and one request's records fit one frame of the log."""
    blocks_max = writer.append_records_max // RECORDS_PER_BLOCK_MAX
    return Limits(
        config.server.sequences_max, min(config.server.blocks_per_request_max, blocks_max)
    )
