"""What the daemon does beside requests: checkpoints, room for what comes, and a last writing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from tierkv_wal import WalWriter

from tierkv.config.schema import Wal
from tierkv.core.placement import Placement
from tierkv.errors import TierFailed, TierFull, TierkvError
from tierkv.service.ballast import Ballast
from tierkv.service.checkpoint import Checkpointer
from tierkv.service.engine import Engine
from tierkv.service.room import Room
from tierkv.service.runtime import take_memory

log = logging.getLogger(__name__)

TICK_S = 0.1
STOP_S = 30.0
"""How long a stop may write what is only in RAM."""


class Housekeeping:
    """Looks ten times a second at what is due."""

    def __init__(
        self,
        writer: WalWriter,
        ballast: Ballast,
        checkpointer: Checkpointer,
        placement: Placement,
        room: Room,
    ) -> None:
        self._writer = writer
        self._ballast = ballast
        self._checkpointer = checkpointer
        self._placement = placement
        self._room = room

    async def run(self, wal: Callable[[], Wal], note_status: Callable[[], Awaitable[None]]) -> None:
        """Go on for ever. ``wal``: the settings of now; ``note_status`` follows checkpoints."""
        loop = asyncio.get_running_loop()
        while True:
            expected = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._placement.counters.event_loop_lag_s = max(0.0, loop.time() - expected)
            self._placement.residency.look(loop.time())
            if self._checkpointer.due(wal().checkpoint_bytes, wal().checkpoint_s):
                await self._checkpoint(note_status)
            await loop.run_in_executor(None, _prepare_spare, self._writer)
            await loop.run_in_executor(None, self._room.look)
            await loop.run_in_executor(None, take_memory, self._placement.ahead())

    async def _checkpoint(self, note_status: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._checkpointer.run()
        except (TierFull, TierFailed, OSError) as error:
            extra = {"lsn": self._writer.appended_lsn, "last_lsn": self._checkpointer.last_lsn}
            log.error("checkpoint failed, the log keeps everything: %s", error, extra=extra)
            await asyncio.sleep(1.0)
            return
        await asyncio.get_running_loop().run_in_executor(
            None, keep_room, self._writer, self._ballast
        )
        await note_status()


def keep_room(writer: WalWriter, ballast: Ballast) -> None:
    """For the next segment first: it serves this daemon and a recovery alike. Blocks."""
    _prepare_spare(writer)
    try:
        held_back = ballast.fill()
    except OSError as error:
        log.warning("cannot make the ballast, so a start on a full disk may fail: %s", error)
        return
    if held_back < ballast.size_bytes:
        log.warning(
            "the disk is nearly full: %d bytes are held back for the next start instead of %d",
            held_back,
            ballast.size_bytes,
        )


def _prepare_spare(writer: WalWriter) -> None:
    with contextlib.suppress(OSError):
        # Without a spare the next rotation makes its segment itself.
        writer.prepare_spare()


async def write_what_is_in_ram(engine: Engine, checkpointer: Checkpointer) -> None:
    """Write what is only in RAM to disk and make a last checkpoint, as far as time allows."""
    try:
        async with asyncio.timeout(STOP_S):
            behind = asyncio.ensure_future(engine.write_behind())
            try:
                await engine.everything_written()
            except TierFailed as error:
                log.warning("stopping with blocks that are only in RAM: %s", error)
            behind.cancel()
            await checkpointer.run(last=True)
    except (TimeoutError, TierkvError, OSError) as error:
        log.warning("stopping without a last checkpoint; the log has everything: %s", error)
