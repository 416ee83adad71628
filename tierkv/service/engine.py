"""Drives the core's flows from the event loop: moves bytes on threads, writes behind.

A flow that needs nothing from outside ends within the call that started it; any other goes on as a
task. Threads run bulk copies and system calls only, which free the GIL.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from tierkv.core.arrays import distinct
from tierkv.core.effects import Check, Effect, Flow, Move, ReadHeaders, Signal, Wait
from tierkv.core.ids import I64, RAM_TIERS, U64, Tier
from tierkv.core.placement import MOVE_BLOCKS
from tierkv.core.planner import Planner
from tierkv.core.state import Sequence
from tierkv.errors import InvariantViolation, TierFailed, TierFull, TierkvError
from tierkv.service.journal import Journal
from tierkv.service.speeds import Speeds
from tierkv.service.watchdog import Pulse
from tierkv.threads import step_back
from tierkv.tiers.mover import BytesEffect, Mover

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""A copy in host memory up to this size is made on the loop: cheaper than waking a thread."""

JOBS_IN_FLIGHT = 4
"""Jobs given to one lane at a time; flows beyond that wait their turn."""

BEHIND_BYTES = 32 << 20
"""Sealed blocks that are written behind together: to evict and to log is done for all at once."""

BEHIND_AT_ONCE = 2
"""Such batches under way: the device works on one while the other is logged and the next begins."""

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0


class Note(Protocol):
    """Hears that something ended: what, since when (monotonic), and about how many blocks."""

    def __call__(self, name: str, began_s: float, blocks: int = 0) -> None: ...


def _unheard(name: str, began_s: float, blocks: int = 0) -> None:
    """Nobody wants to know."""


class Lane:
    """A bounded queue in front of a few threads, whose ``pulse`` tells how long they take."""

    def __init__(
        self, name: str, threads: int, pulse: Pulse, begin: Callable[[], None] | None = None
    ) -> None:
        self._pulse = pulse
        self._pool = ThreadPoolExecutor(threads, name, begin)
        self._places = asyncio.Semaphore(JOBS_IN_FLIGHT * threads)

    async def run(self, job: Callable[[], T]) -> T:
        """Run the job on a thread of the lane."""
        async with self._places:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, self._pulse.watched(job)
            )

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown()


class Breaker:
    """Takes the disk out of service after an error and tries again, ever more slowly."""

    def __init__(self, planner: Planner) -> None:
        self._placement = planner.placement
        self._delay_s = RETRY_FIRST_S
        self._failing = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def open(self) -> bool:
        """Whether the disk takes no copies now."""
        return self._placement.disk_paused

    def failed(self, error: TierFull | TierFailed) -> None:
        """The disk refused a write."""
        if self._placement.disk_paused:
            return
        if not self._failing:
            self._placement.counters.breaker_trips[Tier.DISK.label] += 1
            log.error("disk tier out of service: %s", error, extra={"tier": "disk"})
        log.debug("disk tier: next try in %.0f s", self._delay_s, extra={"tier": "disk"})
        self._failing = True
        self._placement.disk_paused = True
        asyncio.get_running_loop().call_later(self._delay_s, self._try_again)
        self._delay_s = min(self._delay_s * 2, RETRY_MAX_S)
        self.on_change()

    def succeeded(self) -> None:
        """The disk took a write: the next failure waits briefly again."""
        self._delay_s = RETRY_FIRST_S
        if self._failing:
            self._failing = False
            log.info("disk tier in service again", extra={"tier": "disk"})

    def _try_again(self) -> None:
        self._placement.disk_paused = False
        self.on_change()


class Engine:
    """Runs flows over one planner."""

    def __init__(
        self,
        planner: Planner,
        journal: Journal,
        mover: Mover,
        *,
        write_through: bool,
        durable_seal: bool,
        queue_blocks: int,
    ) -> None:
        self.planner = planner
        self.journal = journal
        self._mover = mover
        self._write_through = write_through
        self._durable_seal = durable_seal
        self.queue_blocks = queue_blocks
        self.pulse = Pulse()
        """Of the threads of all lanes."""
        self._lanes = {
            "copy": Lane("tierkv-copy", 1, self.pulse),
            "read": Lane("tierkv-read", 2, self.pulse),
            # One brings the next blocks while the other's are logged. Nobody waits for them, unless
            # seals are to be durable.
            "write": Lane("tierkv-write", 2, self.pulse, None if durable_seal else step_back),
        }
        self._behind: deque[tuple[I64, U64, int]] = deque()
        """Rows, ids and payload bytes of batches of blocks."""
        self._under_way: list[U64] = []
        """Ids of the batches that are being written."""
        self._behind_blocks = 0
        self._behind_more = asyncio.Event()
        self._behind_rest = asyncio.Event()
        """Set while the queue is empty or the disk out of service."""
        self._behind_rest.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.speeds = Speeds()
        self.breaker = Breaker(planner)
        self.breaker.on_change = self._disk_changed
        planner.placement.disk_failed = self.breaker.failed
        self.on_move: Callable[[Move, float], None] = lambda _move, _seconds: None
        self.on_broken: Callable[[BaseException], None] = lambda _error: None

    # --- flows ------------------------------------------------------------------------------------

    def start(
        self, flow: Flow[T], done: Callable[[T | TierkvError], None], note: Note = _unheard
    ) -> None:
        """Run a flow; ``done`` gets its result or its error, now or later.

        ``note`` hears of what it waited for, each time at the end.
        """
        try:
            effect = flow.send(None)
        except StopIteration as stop:
            self._after_step()
            done(stop.value)
            return
        except InvariantViolation as error:
            self.on_broken(error)
            raise
        except TierkvError as error:
            done(error)
            return
        except Exception as error:
            self.on_broken(error)
            raise
        task = asyncio.get_running_loop().create_task(self._finish(flow, effect, done, note))
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end. Raises what it raises."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T | TierkvError) -> None:
            if future.done():
                return
            if isinstance(result, TierkvError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.start(flow, done)
        return await future

    async def _finish(
        self, flow: Flow[T], effect: Effect, done: Callable[[T | TierkvError], None], note: Note
    ) -> None:
        while True:
            result: Any = None
            error: TierkvError | None = None
            try:
                result = await self._perform(effect, note)
            except InvariantViolation:
                raise
            except TierkvError as failed:
                error = failed
            try:
                effect = flow.send(result) if error is None else flow.throw(error)
            except StopIteration as stop:
                self._after_step()
                done(stop.value)
                return
            except InvariantViolation:
                raise
            except TierkvError as failed:
                self._after_step()
                done(failed)
                return

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_broken(error)

    async def _perform(self, effect: Effect, note: Note) -> Any:
        started = time.monotonic()
        if isinstance(effect, Wait):
            await _wait(effect.signal)
            note("wait", started)
            return None
        if isinstance(effect, Move):
            # A slot freed by records of this turn must not be overwritten before they are logged.
            await self.journal.settle()
            note("settle", started)
            started = time.monotonic()
        try:
            result = await self._carry_out(effect)
        finally:
            note(_name_of(effect), started, len(effect.ids))
        if isinstance(effect, Move):
            seconds = time.monotonic() - started
            self.speeds.note(effect, self.planner.state.pools[effect.pool].block_bytes, seconds)
            self.on_move(effect, seconds)
            if effect.target is Tier.DISK:
                self.breaker.succeeded()
        return result

    async def _carry_out(self, effect: BytesEffect) -> Any:
        if isinstance(effect, ReadHeaders):
            return await self._lanes["read"].run(lambda: self._mover.perform(effect))
        if isinstance(effect, Check):
            return await self._lanes["copy"].run(lambda: self._mover.perform(effect))
        in_ram = effect.source in RAM_TIERS and effect.target in RAM_TIERS
        shape = self.planner.state.pools[effect.pool]
        quick = len(effect.ids) * shape.block_bytes <= INLINE_BYTES
        if quick and self._mover.in_host_memory(effect):
            return self._mover.perform(effect)
        lane = "copy" if in_ram else "write" if effect.target is Tier.DISK else "read"
        return await self._lanes[lane].run(lambda: self._mover.perform(effect))

    # --- write-behind -----------------------------------------------------------------------------

    def _after_step(self) -> None:
        """Blocks were sealed: they want a copy on disk."""
        sealed = self.planner.take_sealed()
        if not sealed or not self._write_through or not self.planner.placement.enabled(Tier.DISK):
            return
        for rows, ids in sealed:
            if self._behind_blocks + len(rows) > self.queue_blocks:
                self.planner.placement.counters.optional_copies_dropped += len(rows)
                continue
            self._put_behind(rows, ids)

    def sealing(self, sequence: Sequence, flow: Flow[T]) -> Flow[T]:
        """A seal that, with durability "power", ends only when its blocks are on disk.

        So are all blocks before them, whoever sealed those: without one of them the ones behind
        it could not be found. Raises TierFailed; see ``on_disk``.
        """
        result = yield from flow
        if self._durable_seal:
            rows = self.planner.sealed_rows(sequence)
            yield from self.on_disk(rows, self.planner.state.blocks.id[rows])
        return result

    def on_disk(self, rows: I64, ids: U64) -> Flow[None]:
        """With durability "power", return when these sealed blocks are on disk.

        ``ids`` name the blocks that ``rows`` held. Nobody need hold them: meanwhile they stay.
        Raises TierFailed if the disk did not take them: they are sealed and survive the daemon's
        death, but not the machine's. The worker may ask again.
        """
        if not self._durable_seal:
            return
        self.planner.take_sealed()
        placement, blocks = self.planner.placement, self.planner.state.blocks
        with placement.kept(rows):
            yield from placement.clean_down(rows, ids)
        if not ((blocks.id[rows] == ids) & blocks.has_copy(rows, Tier.DISK)).all():
            raise TierFailed(
                "the blocks are sealed but the disk tier did not take them; see the "
                "daemon's log for why",
                tier=Tier.DISK.label,
            )

    @property
    def behind_blocks(self) -> int:
        """Sealed blocks that wait to be written behind."""
        return self._behind_blocks

    def write_all_behind(self) -> None:
        """Queue every sealed block that has no copy on disk, nor gets one now, however many."""
        blocks = self.planner.state.blocks
        if not self.planner.placement.enabled(Tier.DISK):
            return
        self._behind.clear()
        self._behind_blocks = 0
        rows = self._unwritten_rows()
        if self._under_way:
            rows = rows[~np.isin(blocks.id[rows], np.concatenate(self._under_way))]
        self._put_behind(rows, blocks.id[rows].copy())

    @property
    def unwritten_blocks(self) -> int:
        """Sealed blocks without a copy on disk; 0 without a disk tier."""
        return len(self._unwritten_rows()) if self.planner.placement.enabled(Tier.DISK) else 0

    @property
    def writing(self) -> bool:
        """Whether blocks are on their way to disk."""
        return bool(self._under_way) or (bool(self._behind) and not self.breaker.open)

    def _unwritten_rows(self) -> I64:
        state, blocks = self.planner.state, self.planner.state.blocks
        rows = distinct(np.concatenate([state.rows_in(tier) for tier in RAM_TIERS]))
        return rows[blocks.is_sealed(rows) & ~blocks.has_copy(rows, Tier.DISK)]

    def _put_behind(self, rows: I64, ids: U64) -> None:
        state = self.planner.state
        ends = np.cumsum(np.array([p.block_bytes for p in state.pools])[state.pool_of(rows)])
        cuts = np.flatnonzero(np.diff((ends - 1) // BEHIND_BYTES)) + 1
        start_bytes = 0
        for part, part_ids, part_ends in zip(
            np.split(rows, cuts), np.split(ids, cuts), np.split(ends, cuts), strict=True
        ):
            if len(part):
                self._behind.append((part, part_ids, int(part_ends[-1]) - start_bytes))
                start_bytes = int(part_ends[-1])
        self._behind_blocks += len(rows)
        self._behind_rest.clear()
        self._behind_more.set()

    async def write_behind(self) -> None:
        """Copy sealed blocks to disk in the background, for ever."""
        while True:
            await self._behind_more.wait()
            self._behind_more.clear()
            await asyncio.gather(*[self._drain_behind() for _ in range(BEHIND_AT_ONCE)])
            self._behind_rest.set()

    async def _drain_behind(self) -> None:
        while self._behind and not self.breaker.open:
            rows, ids = self._take_behind()
            self._under_way.append(ids)
            try:
                await self.run(self.planner.placement.clean_down(rows, ids))
            finally:
                self._under_way = [batch for batch in self._under_way if batch is not ids]

    def _take_behind(self) -> tuple[I64, U64]:
        """The oldest sealed blocks, as many as are written together."""
        rows: list[I64] = []
        ids: list[U64] = []
        blocks = size = 0
        while self._behind:
            more_rows, more_ids, more_bytes = self._behind[0]
            fits = size + more_bytes <= BEHIND_BYTES and blocks + len(more_rows) <= MOVE_BLOCKS
            if rows and not fits:
                break
            self._behind.popleft()
            rows.append(more_rows)
            ids.append(more_ids)
            blocks += len(more_rows)
            size += more_bytes
        self._behind_blocks -= blocks
        return np.concatenate(rows), np.concatenate(ids)

    async def everything_written(self) -> None:
        """Return when every sealed block has a copy on disk, as far as the tier has room.

        Raises TierFailed if the disk is out of service.
        """
        self.write_all_behind()
        self._behind_rest.clear()
        self._behind_more.set()
        await self._behind_rest.wait()
        if self.breaker.open:
            raise TierFailed(
                "the disk tier is out of service; see the daemon's log for why",
                tier=Tier.DISK.label,
            )

    def _disk_changed(self) -> None:
        """The disk went out of service, or is to be tried again with what it has missed."""
        if self._write_through and not self.breaker.open:
            self.write_all_behind()
        self._behind_more.set()

    async def close(self) -> None:
        """Wait for the flows that run; then no more may be started."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        for lane in self._lanes.values():
            lane.close()


def _name_of(effect: BytesEffect) -> str:
    if isinstance(effect, Move):
        return f"{effect.source.label}_to_{effect.target.label}"
    return "read_headers" if isinstance(effect, ReadHeaders) else "check"


async def _wait(signal: Signal) -> None:
    if signal.done:
        return
    future = asyncio.get_running_loop().create_future()
    signal.callbacks.append(lambda: _resolve(future))
    await future


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
