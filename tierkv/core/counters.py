"""Plain numbers that the daemon counts with on its hot path; read only when somebody scrapes.

Adding to an int in a slot costs some tens of nanoseconds, a Prometheus counter a microsecond. All
of it belongs to the event loop: other threads hand their results to the loop, which counts them.
"""

from __future__ import annotations

from collections import deque

from tierkv.core.ids import Tier
from tierkv.core.top_prefixes import TopPrefixes

TIERS = tuple(tier.label for tier in Tier)

NEW_BLOCKS = "new_blocks"
PROMOTION = "promotion"
SPILL = "spill"
WRITE_BEHIND = "write_behind"
OTHER_MODEL = "other_model"
CORRUPT = "corrupt"
STALE = "stale"
DELETED = "deleted"

REASONS = {
    NEW_BLOCKS: "workers asked for room for blocks that they compute",
    PROMOTION: "blocks came up from a slower tier, because a prompt has them",
    SPILL: "blocks that had to leave a faster tier came down",
    WRITE_BEHIND: "sealed blocks were written to disk while they are in RAM as well",
    OTHER_MODEL: "any of that, but for blocks of another size: another model's",
    CORRUPT: "the copy did not match its checksum",
    STALE: "a worker wrote on in the block, so its copies further down were out of date",
    DELETED: "an operator deleted the block",
}
"""Why a copy leaves a tier: for the first five, what its room was needed for."""

GONE = "none"
"""``to_tier`` of an eviction after which no copy is left."""

WINDOW_TOKENS = 1_000_000
"""The hit ratio looks back over about this many tokens looked up."""

_WINDOW_PARTS = 50


class HitWindow:
    """Hit ratio over the last ``window_tokens`` looked up, in constant space.

    Tokens are gathered in parts of a fiftieth of the window, so the window's length is exact to
    two percent (and one lookup).
    """

    __slots__ = ("_hit_tokens", "_lookup_tokens", "_part_tokens", "_parts", "_window_tokens")

    def __init__(self, window_tokens: int = WINDOW_TOKENS) -> None:
        self._window_tokens = window_tokens
        self._part_tokens = max(1, window_tokens // _WINDOW_PARTS)
        self._parts: deque[list[int]] = deque()  # [looked up, hit], oldest first
        self._lookup_tokens = 0
        self._hit_tokens = 0

    def add(self, lookup_tokens: int, hit_tokens: int) -> None:
        """Count one lookup. Forgets whole parts that lie beyond the window."""
        parts = self._parts
        if not parts or parts[-1][0] >= self._part_tokens:
            parts.append([0, 0])
        parts[-1][0] += lookup_tokens
        parts[-1][1] += hit_tokens
        self._lookup_tokens += lookup_tokens
        self._hit_tokens += hit_tokens
        while len(parts) > 1 and self._lookup_tokens - parts[0][0] >= self._window_tokens:
            lookup_gone, hit_gone = parts.popleft()
            self._lookup_tokens -= lookup_gone
            self._hit_tokens -= hit_gone

    @property
    def ratio(self) -> float:
        """Share of the window's tokens that were found; 0 before the first lookup."""
        return self._hit_tokens / self._lookup_tokens if self._lookup_tokens else 0.0


class Counters:
    """Everything that is counted, since the daemon's start. Times in seconds, sizes in bytes.

    ``evictions`` is keyed by (from tier, to tier or "none", reason), ``transfer_bytes`` by (from
    tier, to tier), ``rpc_requests`` by (verb, code or "ok"), tiers are named as in ``TIERS``.
    ``namespace_tokens`` has [looked up, found] for each namespace. ``promotions``: blocks that came
    up into the device tier, by where from. ``breaker_trips``: how often a tier went out of service.
    ``mismatched_blocks`` were found under a hash, but with other tokens or another parent.
    ``checkpoint_timestamp_s`` is Unix time, 0 before the first checkpoint.
    """

    __slots__ = (
        "breaker_trips",
        "checkpoint_timestamp_s",
        "checksum_failures",
        "deduplicated_blocks",
        "disk_read_errors",
        "event_loop_lag_s",
        "evictions",
        "hit_tokens",
        "hit_window",
        "lookup_tokens",
        "mismatched_blocks",
        "namespace_tokens",
        "optional_copies_dropped",
        "promotions",
        "rpc_requests",
        "top_prefixes",
        "transfer_bytes",
        "wal_bytes",
        "wal_frames",
    )

    def __init__(self, window_tokens: int = WINDOW_TOKENS) -> None:
        self.lookup_tokens = 0
        self.hit_tokens = dict.fromkeys(TIERS, 0)
        self.hit_window = HitWindow(window_tokens)
        self.namespace_tokens: dict[int, list[int]] = {}
        self.top_prefixes = TopPrefixes()
        self.evictions: dict[tuple[str, str, str], int] = {}
        self.promotions = {tier: 0 for tier in TIERS if tier != TIERS[Tier.DEVICE]}
        self.breaker_trips = {TIERS[Tier.DISK]: 0}
        self.transfer_bytes: dict[tuple[str, str], int] = {}
        self.checksum_failures = dict.fromkeys(TIERS, 0)
        self.optional_copies_dropped = 0
        self.deduplicated_blocks = 0
        self.mismatched_blocks = 0
        self.disk_read_errors = 0
        self.wal_bytes = 0
        self.wal_frames = 0
        self.rpc_requests: dict[tuple[str, str], int] = {}
        self.event_loop_lag_s = 0.0
        self.checkpoint_timestamp_s = 0.0

    def looked_up(
        self, namespace: int, tokens: int, *, device: int = 0, host: int = 0, disk: int = 0
    ) -> None:
        """Count one prefix lookup, and how many of its tokens were found in which best tier."""
        of_namespace = self.namespace_tokens.get(namespace)
        if of_namespace is None:
            of_namespace = self.namespace_tokens[namespace] = [0, 0]
        of_namespace[0] += tokens
        of_namespace[1] += device + host + disk
        self.lookup_tokens += tokens
        self.hit_tokens["device"] += device
        self.hit_tokens["host"] += host
        self.hit_tokens["disk"] += disk
        self.hit_window.add(tokens, device + host + disk)

    def evicted(self, from_tier: str, to_tier: str, reason: str, blocks: int = 1) -> None:
        """Count blocks that left a tier; ``to_tier`` "none" means that no copy is left below."""
        key = (from_tier, to_tier, reason)
        self.evictions[key] = self.evictions.get(key, 0) + blocks

    def transferred(self, from_tier: str, to_tier: str, size_bytes: int) -> None:
        """Count payload copied between tiers."""
        key = (from_tier, to_tier)
        self.transfer_bytes[key] = self.transfer_bytes.get(key, 0) + size_bytes

    def answered(self, verb: str, code: str = "ok") -> None:
        """Count one request that was answered, well or by an error's code."""
        key = (verb, code)
        self.rpc_requests[key] = self.rpc_requests.get(key, 0) + 1

    def evictions_status(self) -> dict[str, int]:
        """Evicted blocks by way ("device>host"), for the status document."""
        ways: dict[str, int] = {}
        for (from_tier, to_tier, _), blocks in sorted(self.evictions.items()):
            way = f"{from_tier}>{to_tier}"
            ways[way] = ways.get(way, 0) + blocks
        return ways
