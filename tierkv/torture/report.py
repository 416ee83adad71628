"""What a torture showed: the counts, and the verdict."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from tierkv.torture.promises import Block, Found

LOSES = "none"
"""The durability that may lose what it acknowledged."""


@dataclass
class Report:
    """Counts are of blocks, but for ``ended_sequences``. Of blocks, each counts once.

    acknowledged: a worker was told that the block is sealed, and it was looked for after a kill.
    lost: it was not found. wrong: it was found with another's bytes. survived: all others.
    resurrected: what was deleted was found again: blocks of a deleted store, and sequences that
    their worker had ended.
    """

    seed: int
    durability: str
    kills: int = 0
    stores: int = 0
    recovery_s: list[float] = field(default_factory=list)
    checksum_failures: int = 0
    ended_sequences: int = 0
    seen_wrong: int = 0
    failure: str = ""
    _acknowledged: set[Block] = field(default_factory=set)
    _lost: set[Block] = field(default_factory=set)
    _wrong: set[Block] = field(default_factory=set)
    _returned: set[Block] = field(default_factory=set)

    @property
    def acknowledged(self) -> int:
        return len(self._acknowledged)

    @property
    def lost(self) -> int:
        return len(self._lost)

    @property
    def wrong(self) -> int:
        """Wrong blocks found, and times that a worker saw wrong bytes at work."""
        return len(self._wrong) + self.seen_wrong

    @property
    def survived(self) -> int:
        return len(self._acknowledged - self._lost - self._wrong)

    @property
    def resurrected(self) -> int:
        return len(self._returned) + self.ended_sequences

    @property
    def recoveries(self) -> int:
        return len(self.recovery_s)

    @property
    def broken_promises(self) -> str:
        """What was counted that must not be; "" if nothing was."""
        counts = {"wrong": self.wrong, "resurrected": self.resurrected}
        if self.durability != LOSES:
            counts["lost"] = self.lost
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept and nothing failed."""
        return not self.failure and not self.broken_promises

    def promised(self, found: Found) -> None:
        """Count the blocks of a chain that must be there. Mutates the report."""
        self._acknowledged.update(found.blocks)
        self._lost.update(found.lost)
        self._wrong.update(found.wrong)

    def deleted(self, found: Found) -> None:
        """Count the blocks of a chain that must not be there. Mutates the report."""
        self._returned.update(set(found.blocks) - set(found.lost))

    def to_plain(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        times = sorted(self.recovery_s)
        return {
            "ok": self.ok,
            "seed": self.seed,
            "durability": self.durability,
            "acknowledged": self.acknowledged,
            "survived": self.survived,
            "lost": self.lost,
            "wrong": self.wrong,
            "resurrected": self.resurrected,
            "checksum_failures": self.checksum_failures,
            "kills": self.kills,
            "recoveries": self.recoveries,
            "recovery_median_s": statistics.median(times) if times else 0.0,
            "recovery_max_s": max(times, default=0.0),
            "stores": self.stores,
            "failure": self.failure,
        }
