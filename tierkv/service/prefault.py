"""Takes the memory of the RAM tiers ahead of need, in the background.

A page that nobody has written yet takes ten times longer to write. So a thread takes them in the
order in which slots are given out, device tier first, and maps what outlived the last daemon. What
lies on a GPU is left out: that was taken at once.
Before there is a pool, it takes those where the first one will lie. The loop decides (``leads``)
and gives back what another pool needs, since it gives out slots as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tierkv.config.ram import available_ram_bytes
from tierkv.core.ids import Tier
from tierkv.core.state import State
from tierkv.errors import TierFull
from tierkv.service.leads import TAKE_BYTES, Budget, GiveBack, PoolMemory, missing_bytes, next_step
from tierkv.threads import step_back
from tierkv.tiers.arena import Arena

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often the tiers are looked at when there is nothing to do."""

RETRY_S = 30.0
"""When it is tried again after there was no memory."""

SPARE_BYTES = 512 << 20
"""Memory of the machine that is left alone."""


FIRST_BYTES = 2 << 20
"""What stands for a slot as long as there is no pool."""


@dataclass
class _Progress:
    """Of one tier. ``taken``: by pool, the slot from which on nothing has memory.

    ``first``: the same before there is a pool, in pieces of ``FIRST_BYTES``. ``huge_bytes`` were
    found when memory was taken or mapped.
    """

    taken: dict[int, int] = field(default_factory=dict)
    first: int = 0
    huge_bytes: int = 0
    short: bool = False
    retry_s: float = 0.0


class Prefault:
    """Runs beside the requests until ``close``.

    ``ahead``: whether to take memory; without it only what another pool needs is given back.
    ``ram_free_bytes`` says how much memory is left for this process.
    """

    def __init__(
        self,
        state: State,
        arenas: Mapping[Tier, Arena],
        *,
        ahead: bool,
        ram_free_bytes: Callable[[], int] = available_ram_bytes,
    ) -> None:
        self._state = state
        self._arenas = arenas
        self._ahead = ahead
        self._ram_free_bytes = ram_free_bytes
        self._progress = {tier: _Progress() for tier in arenas}
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, "tierkv-prefault", step_back)

    async def run(self) -> None:
        """Work for ever; cancel to stop, then ``close``."""
        while True:
            busy = False
            for tier in self._arenas:
                busy = busy or await self._advance(tier)
            await asyncio.sleep(0 if busy else LOOK_S)

    def close(self) -> None:
        """End the thread, within some milliseconds. The arenas are not used after this."""
        self._stopped.set()
        self._thread.shutdown()

    def missing_bytes(self, tier: Tier) -> int:
        """Memory that is still to be taken for a RAM tier."""
        if not self._ahead or tier not in self._arenas:
            return 0
        return missing_bytes(self._pools(tier), self._budget(tier))

    def state(self, tier: Tier) -> str:
        """What goes on in a RAM tier: "off", "running", "done" or "short of memory"."""
        if not self._ahead or tier not in self._arenas:
            return "off"
        if self._progress[tier].short:
            return "short of memory"
        surveyed = len(self._progress[tier].taken) == len(self._known_pools(tier))
        return "done" if surveyed and not self.missing_bytes(tier) else "running"

    def huge_bytes(self, tier: Tier) -> int:
        """About how much of a RAM tier's memory is in huge pages; 0 if that is not known."""
        if tier not in self._arenas:
            return 0
        return min(self._progress[tier].huge_bytes, self._arenas[tier].memory_bytes)

    # --- one step ---------------------------------------------------------------------------------

    async def _advance(self, tier: Tier) -> bool:
        """Do the next thing for a tier; whether there may be more to do."""
        progress = self._progress[tier]
        if time.monotonic() < progress.retry_s:
            return False
        try:
            return await self._step(tier)
        except (OSError, TierFull) as error:
            if not progress.short:
                log.warning("cannot take all memory yet: %s", error, extra={"tier": tier.label})
            progress.short = True
            progress.retry_s = time.monotonic() + RETRY_S
            return False

    async def _step(self, tier: Tier) -> bool:
        arena, progress = self._arenas[tier], self._progress[tier]
        loop = asyncio.get_running_loop()
        for pool in self._known_pools(tier):
            if pool not in progress.taken:
                job = loop.run_in_executor(self._thread, self._survey, arena, pool)
                progress.taken[pool], huge_bytes = await job
                progress.huge_bytes += huge_bytes
                return True
        # Nothing may come between deciding and giving back.
        step = next_step(self._pools(tier), self._budget(tier), ahead=self._ahead)
        if step is None:
            return False
        if isinstance(step, GiveBack):
            arena.give_back(*step)
            progress.taken[step.pool] = step.first
        elif not progress.taken:
            await loop.run_in_executor(self._thread, self._take_first, arena, step.first, step.stop)
            progress.first = step.stop
            progress.short = False
        else:
            taking = loop.run_in_executor(self._thread, self._take, arena, *step)
            progress.huge_bytes += await taking
            progress.taken[step.pool] = step.stop
            progress.short = False
        return True

    def _survey(self, arena: Arena, pool: int) -> tuple[int, int]:
        """The slot from which on nothing has memory, and bytes in huge pages before it."""
        if self._ahead:
            arena.map_backed(pool, self._stopped.is_set)
        last = arena.last_backed(pool)
        if not self._ahead:
            return last, 0
        arena.populate_entries(pool, 0, last, self._stopped.is_set)
        return last, arena.huge_bytes(pool, 0, last)

    def _take(self, arena: Arena, pool: int, first: int, stop: int) -> int:
        """Take the memory of some slots; returns how much of it is in huge pages."""
        self._require_ram()
        arena.populate(pool, first, stop, self._stopped.is_set)
        return arena.huge_bytes(pool, first, stop)

    def _take_first(self, arena: Arena, first: int, stop: int) -> None:
        self._require_ram()
        arena.populate_first(first * FIRST_BYTES, stop * FIRST_BYTES, self._stopped.is_set)

    def _require_ram(self) -> None:
        free_bytes = self._ram_free_bytes()
        if free_bytes < SPARE_BYTES + TAKE_BYTES:
            raise TierFull(f"{free_bytes} bytes of RAM are left for this process", free=free_bytes)

    def _known_pools(self, tier: Tier) -> list[int]:
        return [pool for of, pool in self._state.slots if of is tier]

    def _pools(self, tier: Tier) -> list[PoolMemory]:
        """The pools that were surveyed; before there are any, what stands for the first."""
        taken = self._progress[tier].taken
        if not self._known_pools(tier):
            arena = self._arenas[tier]
            pieces = 0 if arena.had_first else arena.budget_bytes // FIRST_BYTES
            return [PoolMemory(0, FIRST_BYTES, pieces, 0, self._progress[tier].first)]
        found = []
        for pool in self._known_pools(tier):
            if pool in taken:
                slots = self._state.slots[tier, pool]
                stride = self._state.slot_bytes(tier, pool)
                found.append(PoolMemory(pool, stride, slots.capacity, slots.given_out, taken[pool]))
        return found

    def _budget(self, tier: Tier) -> Budget:
        state = self._state
        in_memory = self._arenas[tier].memory_bytes
        return Budget(state.budgets[tier], state.free_bytes(tier), in_memory)
