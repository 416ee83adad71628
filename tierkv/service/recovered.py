"""What a recovery gives to the daemon, and what it reports of its work."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv_wal import WalWriter

from tierkv.core.ids import Tier
from tierkv.core.state import State
from tierkv.service.deleted import DeletedFile
from tierkv.service.machine import CheckpointIndex
from tierkv.tiers.arena import Arena
from tierkv.tiers.disk import DiskTier


@dataclass
class TierReport:
    """Copies of one tier that outlived the daemon, and those that did not."""

    kept: int = 0
    dropped: int = 0


@dataclass
class RecoveryReport:
    """What a start found. ``blocks``: in the state now; ``dropped_blocks``: no copy was left.

    ``truncated_bytes`` at the log's end were given up. ``rebuilt`` says why the index had to be
    made anew from slot entries, if it had to.
    """

    duration_s: float = 0.0
    records: int = 0
    blocks: int = 0
    dropped_blocks: int = 0
    leases_kept: int = 0
    leases_closed: int = 0
    wal_end: str = "clean"
    truncated_bytes: int = 0
    rebuilt: str = ""
    quarantined: list[str] = field(default_factory=list)
    tiers: dict[Tier, TierReport] = field(
        default_factory=lambda: {tier: TierReport() for tier in Tier}
    )


@dataclass
class Recovered:
    """Everything the daemon is built on."""

    state: State
    specs: dict[int, bytes]
    index: CheckpointIndex
    writer: WalWriter
    arenas: dict[Tier, Arena]
    disk: DiskTier | None
    checkpoint_lsn: int
    report: RecoveryReport
    deleted: DeletedFile

    def close(self) -> None:
        """Close all files; the last call."""
        self.writer.close()
        if self.disk is not None:
            self.disk.close()
        self.index.close()
        for arena in self.arenas.values():
            arena.close()
