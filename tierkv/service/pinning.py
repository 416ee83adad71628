"""Pins the host tier's memory, so that copies to and from a GPU are direct; in the background.

It takes a second for some GiB, so it begins when the daemon serves, piece by piece, on what
``prefault`` has taken. Until a piece is pinned, and where none may be, the driver copies twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from tierkv_kernels.errors import DriverError

from tierkv.core.ids import U8, Tier
from tierkv.core.spec import PAGE
from tierkv.gpu import Gpu
from tierkv.threads import step_back
from tierkv.tiers.arena import Arena

log = logging.getLogger(__name__)

LOOK_S = 0.1
PIECE_BYTES = 64 << 20
"""Meanwhile no copy is given to the GPU: some milliseconds."""


class Pinning:
    """Runs beside the requests until ``close``.

    ``is_taken`` says whether all memory of the host tier has been taken.
    """

    def __init__(self, arenas: Mapping[Tier, Arena], is_taken: Callable[[], bool]) -> None:
        self._gpu = arenas[Tier.DEVICE].on_gpu
        self._host = arenas.get(Tier.HOST)
        self._is_taken = is_taken
        self._pinned: list[U8] = []
        self._thread = ThreadPoolExecutor(1, "tierkv-pin", step_back)

    @property
    def pinned_bytes(self) -> int:
        """How much is pinned."""
        return sum(piece.nbytes for piece in self._pinned)

    async def run(self) -> None:
        """Pin all there is, once, and never end; cancel to stop, then ``close``."""
        gpu, host = self._gpu, self._host
        if gpu is not None and host is not None:
            while not (host.has(0) and self._is_taken()):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(LOOK_S)
            await self._pin_all(gpu, host.slots(0))
        await asyncio.Event().wait()

    async def _pin_all(self, gpu: Gpu, slots: U8) -> None:
        try:
            await self._pin(gpu, slots)
        except DriverError as error:
            log.warning(
                "the host tier is not pinned, copies take longer: %s", error, extra={"tier": "host"}
            )
        else:
            log.info("the host tier is pinned", extra={"pinned_bytes": self.pinned_bytes})

    async def _pin(self, gpu: Gpu, slots: U8) -> None:
        stride = slots.shape[1]
        if stride % PAGE:
            return  # such blocks are smaller than a page: to start a copy takes longer than it
        step = max(1, PIECE_BYTES // stride)
        for first in range(0, len(slots), step):
            piece = slots[first : first + step]
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._pin_piece, gpu, piece
            )

    def _pin_piece(self, gpu: Gpu, piece: U8) -> None:
        # Noted in the thread: who cancels does not wait for it.
        gpu.pin(piece)
        self._pinned.append(piece)

    def close(self) -> None:
        """Undo it. No copy runs any more."""
        self._thread.shutdown()
        if self._gpu is not None:
            # A driver that has failed unpins nothing; the process ends anyway.
            with contextlib.suppress(DriverError):
                while self._pinned:
                    self._gpu.unpin(self._pinned[-1])
                    self._pinned.pop()
