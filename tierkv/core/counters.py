"""What the core counts: plain numbers on the hot path, published at scrape time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierkv.core.ids import Tier

GONE = "none"
"""``to_tier`` of an eviction after which no copy is left."""


@dataclass
class Counters:
    """Totals since the daemon started."""

    lookup_tokens: int = 0
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    evictions: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By (from tier, fastest tier that still holds the block, reason)."""
    checksum_failures: Counter[Tier] = field(default_factory=Counter)
    moved_blocks: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    moved_bytes: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    copies_dropped: int = 0
    """Optional copies (write-behind) given up because a queue was full or a tier failed."""
    deduplicated_blocks: int = 0
    mismatched_blocks: int = 0
    """Blocks found under a hash whose tokens or parent differ: misses, never content."""
