"""Says which requests took long, and with what."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tierkv.obs.timeline import Timeline

log = logging.getLogger(__name__)


def _nobody(_timeline: Timeline) -> None:
    """Nobody traces requests."""


class Slow:
    """Logs requests that took ``slow_s`` or longer, and hands them to ``trace``.

    As warnings, but for patient ones, whose time is no news. Of the others it hands one in
    ``sample_every`` to ``trace``; 0 = none. The log's own limit on repeats holds here, too.
    """

    def __init__(
        self,
        slow_s: float,
        trace: Callable[[Timeline], None] = _nobody,
        sample_every: int = 0,
    ) -> None:
        self.slow_s = slow_s
        self._trace = trace
        self._sample_every = sample_every
        self._until_sample = sample_every

    def wants(self, seconds: float) -> bool:
        """Whether ``tell`` wants to hear of the request that took so long. Ask once. Mutates."""
        if self._sample_every:
            self._until_sample -= 1
            if not self._until_sample:
                self._until_sample = self._sample_every
                return True
        return seconds >= self.slow_s

    def tell(self, timeline: Timeline) -> None:
        """A request was answered."""
        self._trace(timeline)
        if timeline.seconds < self.slow_s:
            return
        fields = {name: round(value, 6) for name, value in timeline.totals().items()}
        log.log(
            logging.INFO if timeline.patient else logging.WARNING,
            "slow request: %s",
            timeline.verb,
            extra={
                "code": timeline.code,
                "took_s": round(timeline.seconds, 6),
                **fields,
                **timeline.ids,
            },
        )
