"""Takes over a new configuration without a restart: all of it or nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tierkv.config.change import Change, take_over
from tierkv.config.schema import Config
from tierkv.errors import ConfigError
from tierkv.obs.status import ConfigStatus

log = logging.getLogger(__name__)


class Reloader:
    """Holds the configuration that the daemon runs with.

    ``read`` reads it anew from where it came from; it raises ConfigError if anything is wrong.
    ``apply`` hands the live settings to whoever uses them. It cannot fail: all is checked before.
    """

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        self.config = config
        self.status = ConfigStatus(read_unix_s=time.time())
        self.apply: Callable[[Config], None] = lambda _config: None
        self._read = read
        self._turn = asyncio.Lock()

    async def run(self) -> Change:
        """Read, check and take over. Raises ConfigError, having changed nothing."""
        async with self._turn:
            try:
                wanted = await asyncio.to_thread(self._read)
            except ConfigError as error:
                self._note(ok=False, error=error.message)
                log.error("the configuration was not reloaded, nothing is changed: %s", error)
                raise
            change = take_over(self.config, wanted)
            self.config = change.config
            self.apply(change.config)
            self._note(ok=True)
            self.status.needs_restart = list(change.needs_restart)
            log.info(
                "configuration reloaded",
                extra={
                    "changed": ",".join(change.changed) or "nothing",
                    "needs_restart": ",".join(change.needs_restart) or "nothing",
                },
            )
            return change

    def _note(self, *, ok: bool, error: str = "") -> None:
        self.status.ok = ok
        self.status.error = error
        self.status.read_unix_s = time.time()
