"""What the counters were in the last hour and the last day, for a page that is opened later."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tierkv.obs.status import StatusDocument

EVERY_S = 10.0
"""How often a sample is taken."""

_SAMPLES = 360
_RANGES_S = {"hour": EVERY_S, "day": 240.0}
"""Spans by name, and the seconds between two samples of each: 360 of them make it up."""

_COUNTERS: dict[str, Callable[[StatusDocument], float]] = {
    "lookup_tokens": lambda now: now.prefix.lookup_tokens,
    "device_hit_tokens": lambda now: now.prefix.hit_tokens_by_tier.get("device", 0),
    "host_hit_tokens": lambda now: now.prefix.hit_tokens_by_tier.get("host", 0),
    "disk_hit_tokens": lambda now: now.prefix.hit_tokens_by_tier.get("disk", 0),
    "moved_blocks": lambda now: _evicted_blocks(now, gone=False),
    "dropped_blocks": lambda now: _evicted_blocks(now, gone=True),
}
"""All of them count from zero since the start, so that a sample may be missing."""

COLUMNS = ("uptime_s", *_COUNTERS)


class History:
    """A bounded memory of samples: one row of ``COLUMNS`` each, from the daemon's start on."""

    def __init__(self) -> None:
        first = (0.0,) * len(COLUMNS)
        self._rows = {name: deque([first], _SAMPLES + 1) for name in _RANGES_S}

    def keep(self, now: StatusDocument) -> None:
        """Add a sample to those spans that are due for one."""
        row = (now.uptime_s, *(read(now) for read in _COUNTERS.values()))
        for name, every_s in _RANGES_S.items():
            rows = self._rows[name]
            # Half a sample early rather than a whole one late: the caller's clock is not exact.
            if now.uptime_s - rows[-1][0] >= every_s - EVERY_S / 2:
                rows.append(row)

    def plain(self) -> dict[str, dict[str, list[float]]]:
        """By span and column, oldest first; for JSON."""
        return {
            name: {column: [row[k] for row in rows] for k, column in enumerate(COLUMNS)}
            for name, rows in self._rows.items()
        }

    async def record(self, read: Callable[[], StatusDocument]) -> None:
        """Take samples for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.keep(read())


def _evicted_blocks(now: StatusDocument, *, gone: bool) -> int:
    return sum(one.blocks for one in now.evicted if (one.to_tier == "none") is gone)
