"""Runs a plan: lives of a daemon, the crashes that end them, and images of every other crash.

At every call that changes something on the device the run may look at what a power loss at that
very moment would leave: any legal part of what is not synced. Each such image is recovered and
compared with the ledger; some recoveries crash, too, and are recovered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest import mock

from tests.simulation.daemon import SimulatedDaemon, open_store
from tests.simulation.inspect_image import Expected, Inspector
from tests.simulation.ledger import Ledger, Promise, Violation, digest
from tests.simulation.loop import Crash, SimulatedLoop, Stuck
from tests.simulation.machine import STATE_DIR, CrashKind, SimulatedMachine
from tests.simulation.plan import WORKERS, Fault, Life, Plan, Step
from tests.simulation.worker import SIZE, SPEC, Worker
from tierkv.config import schema
from tierkv.core.ids import U8, U32, Tier
from tierkv.core.state import PoolShape
from tierkv.errors import InvariantViolation, TierkvError
from tierkv.rpc import messages as m
from tierkv.service.recovered import Recovered
from tierkv.tiers import copy
from tierkv.tiers.arena import Arena
from tierkv.tiers.entry import Sums, payload_sums
from tierkv.tiers.sizes import slot_bytes

SHAPE = PoolShape(SPEC.block_bytes, SPEC.block_tokens)
WAL_SEGMENT_BYTES = 8 << 10
"""The smallest there is: runs shall rotate the log often."""

SLOTS_PER_SEGMENT = 4

CHANGES = frozenset(
    (
        "open",
        "pwrite",
        "pwritev",
        "fdatasync",
        "fallocate",
        "rename",
        "unlink",
        "mkdir",
        "fsync_dir",
    )
)
"""Calls before which a crash can leave something new."""


@dataclass(frozen=True)
class Looks:
    """How closely to look.

    ``images``: for each change; every ``double``th recovery crashes; on a ``lived_on`` part of
    the images, and no more than ``lived_on_max`` of a life, a daemon goes on to work.
    """

    images: float = 0.5
    double: int = 5
    lived_on: float = 0.02
    lived_on_max: int = 2


@dataclass
class Result:
    """What a run has seen."""

    ledger: Ledger
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def kinds(self) -> frozenset[Violation]:
        """The kinds of violations."""
        return frozenset(kind for kind, _ in self.ledger.violations)


def config_of(plan: Plan) -> schema.Config:
    """The daemon's configuration."""
    sizes = {Tier.DEVICE: plan.device, Tier.HOST: plan.host, Tier.DISK: plan.disk}
    in_bytes = {tier: blocks * slot_bytes(tier, SHAPE) for tier, blocks in sizes.items()}
    return schema.Config(
        server=schema.Server(socket="/socket", state_dir=str(STATE_DIR)),
        device=schema.Device(in_bytes[Tier.DEVICE]),
        host=schema.Host(in_bytes[Tier.HOST]),
        arena=schema.Arena("/arena"),
        disk=schema.Disk(
            dir=str(STATE_DIR / "data"),
            bytes=in_bytes[Tier.DISK],
            segment_bytes=SLOTS_PER_SEGMENT * slot_bytes(Tier.DISK, SHAPE),
            write=plan.write,
        ),
        wal=schema.Wal(durability=plan.durability, segment_bytes=WAL_SEGMENT_BYTES),
        index=schema.Index(map_bytes=1 << 20),
    )


def run(plan: Plan, looks: Looks | None = None) -> Result:
    """Carry out a plan. Nothing of it depends on anything but the plan and ``looks``."""
    with _quiet():
        one = _Run(plan, looks or Looks())
        try:
            one.run()
        finally:
            one.close()
    return Result(one.ledger, one.calls)


class _Run:
    def __init__(self, plan: Plan, looks: Looks) -> None:
        self.plan = plan
        self.ledger = Ledger()
        self.calls: list[tuple[str, str]] = []
        self._looks = looks
        self._config = config_of(plan)
        self._machine = SimulatedMachine()
        self._inspector = Inspector(self._config, SHAPE)
        self._workers = [Worker(number, self.ledger) for number in range(WORKERS)]
        self._sync_failed = False
        self._disk_refused = False
        self._must_resume = False
        self._ended_by: CrashKind = "kill"

    def run(self) -> None:
        for life in self.plan.lives:
            self._live(life)
            if self.ledger.violations:
                return
        self._live(Life((), dies_at=0, dies_by="kill"))

    def close(self) -> None:
        self._inspector.close()
        self._machine.close()

    # --- one life ---------------------------------------------------------------------------------

    def _live(self, life: Life) -> None:
        rng = Random(life.seed)
        self._life, self._rng = life, rng
        self._left = life.dies_at
        self._after: SimulatedMachine | None = None
        self._live_on: list[SimulatedMachine] = []
        self._recovering = True
        self._looking = False
        self._images = 0
        machine = self._machine
        for fault in life.faults:
            self._plant(fault)
        machine.storage.before_call = self._before_call
        loop = SimulatedLoop(rng)
        loop.thread_step = self._step
        loop.set_exception_handler(self._unexpected)
        jump_s = life.clock_jump_s
        with _ram_steps(self._step), _clock(jump_s):
            _complete(loop, self._serve(life))
        machine.storage.before_call = lambda _call, _path: None
        self.calls += machine.storage.history
        if self._after is None:
            self._after = machine.crash("kill", rng)
        self.ledger.happened["faults"] += machine.storage.struck
        machine.close()
        self._machine, kind = self._after, life.dies_by if self._left <= 0 else "kill"
        self._machine.storage.clear_faults()
        self._settle(kind)
        for at in range(life.rot):
            self._rot(rng, at)
        for image in self._live_on:
            self._work_on(image)

    async def _serve(self, life: Life) -> None:
        try:
            daemon = SimulatedDaemon(self._config, self._machine, self.ledger)
        except (TierkvError, OSError) as error:
            self._failed_to_start(error)
            return
        self._recovering = False
        self._looking = True
        expected = self._expected(self._ended_by)
        if any(fault.call == "preadv" for fault in life.faults):
            # The device refuses to read: what is there cannot be seen now.
            expected = replace(expected, promise=Promise())
        self.ledger.unreadable = self._inspector.check(daemon.recovered, self.ledger, expected)
        self._looking = False
        for worker in self._workers:
            await worker.connect(daemon, must_resume=self._must_resume)
        lots = [[one for one in life.steps if one.worker == n] for n in range(WORKERS)]
        works = [self._work(daemon, self._workers[n], lot) for n, lot in enumerate(lots)]
        await asyncio.gather(*works)

    async def _work(self, daemon: SimulatedDaemon, worker: Worker, steps: list[Step]) -> None:
        for step in steps:
            if self.ledger.violations:
                raise Crash("there is a violation to look at")
            self.ledger.happened[step.verb] += 1
            if step.verb == "checkpoint":
                await daemon.checkpoint()
            elif step.verb == "spare":
                await daemon.spare()
            elif step.verb == "sleep":
                await asyncio.sleep(step.b % 3)
            elif step.verb == "flush":
                await worker._ask(m.Flush())
            else:
                await worker.do(step.verb, step.a, step.b)

    def _unexpected(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As the daemon has it: an error of our own that nobody handled is a fault."""
        error = context.get("exception")
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self.ledger.violate(Violation.BROKEN, repr(error))

    def _failed_to_start(self, error: Exception) -> None:
        """Refusing is right if the device is at fault; it must not be for good."""
        if not self._life.faults and not self.ledger.device_lies:
            self.ledger.violate(Violation.BROKEN, f"the daemon does not start: {error!r}")
        self.ledger.happened["refused to start"] += 1

    # --- crashes ----------------------------------------------------------------------------------

    def _before_call(self, call: str, path: str) -> None:
        if call not in CHANGES or self._after is not None or self._looking:
            return
        self._looking = True
        self._look()
        self._looking = False
        self._step()

    def _step(self) -> None:
        """A moment at which the daemon may die."""
        if self._after is not None or self._looking:
            return
        self._left -= 1
        if self._left == 0:
            self._after = self._machine.crash(self._life.dies_by, self._rng)
            raise Crash("the planned one")

    def _look(self) -> None:
        """What a power loss right now would leave."""
        images = int(self._looks.images) + (self._rng.random() < self._looks.images % 1)
        for _ in range(images):
            if self.ledger.violations:
                return
            image = self._machine.crash("power", self._rng)
            self.ledger.happened["images"] += 1
            self._images += 1
            exact = not self._recovering
            if self._images % self._looks.double == 0:
                image = self._crash_in_recovery(image)
                exact = False
            try:
                recovered = self._inspect(image, exact=exact)
                if recovered is not None and self._images % 7 == 0:
                    self._recover_again(image, recovered)
            finally:
                has_room = len(self._live_on) < self._looks.lived_on_max
                if has_room and self._rng.random() < self._looks.lived_on:
                    self._live_on.append(image)
                else:
                    image.close()

    def _expected(self, kind: CrashKind, *, exact: bool = False) -> Expected:
        return Expected(
            promise=self.ledger.promise_now,
            durability=self.plan.durability,
            kind=kind,
            keeps_all=self.plan.keeps_all and not self._disk_refused,
            exact=exact,
            lies=self.ledger.device_lies,
            sync_failed=self._sync_failed,
        )

    def _inspect(self, image: SimulatedMachine, *, exact: bool) -> Recovered | None:
        try:
            return self._inspector.inspect(image, self.ledger, self._expected("power", exact=exact))
        except InvariantViolation as error:
            self.ledger.violate(Violation.BROKEN, repr(error))
        except (TierkvError, OSError) as error:
            if not self.ledger.device_lies:
                self.ledger.violate(Violation.BROKEN, f"an image is refused: {error!r}")
        return None

    def _crash_in_recovery(self, image: SimulatedMachine) -> SimulatedMachine:
        """Recovering the image dies by power loss at one of its calls."""
        rng = Random(self._rng.getrandbits(32))
        left = rng.randint(1, 30)

        def before_call(call: str, _path: str) -> None:
            nonlocal left
            left -= call in CHANGES
            if left <= 0:
                raise Crash("in recovery")

        image.storage.before_call = before_call
        try:
            open_store(self._config, image)
        except Crash:
            self.ledger.happened["double crashes"] += 1
        except (TierkvError, OSError):
            pass
        image.storage.before_call = lambda _call, _path: None
        again = image.crash("power", rng)
        image.close()
        return again

    def _recover_again(self, image: SimulatedMachine, recovered: Recovered) -> None:
        """I8: a second recovery finds what the first one left."""
        before = digest_of_kept(recovered)
        again = image.crash("kill", self._rng)
        try:
            second = open_store(self._config, again)
            if digest_of_kept(second) != before:
                self.ledger.violate(Violation.NOT_TWICE, "a second recovery differs")
        finally:
            again.close()

    def _settle(self, kind: CrashKind) -> None:
        """What the promises are worth after this crash."""
        durability = self.plan.durability
        promise = self.ledger.promise_now
        kept = durability == "power" or (durability == "kill" and kind == "kill")
        damaged = self.ledger.device_lies or (self._sync_failed and durability != "power")
        if not kept or damaged:
            promise.lsn, promise.lasting_lsn, promise.sealed = 0, 0, frozenset()
        elif kind == "power" or self._sync_failed:
            promise.lsn = promise.lasting_lsn
        if damaged or self._sync_failed:
            promise.on_disk = frozenset()
        self.ledger.happened[f"ended by {kind}"] += 1
        self._ended_by = kind
        unharmed = not damaged and not self._sync_failed
        self._must_resume = kind == "kill" and kept and unharmed
        if not self._must_resume:
            self._end_leases()

    def _end_leases(self) -> None:
        """The workers' leases may be gone; they begin anew."""
        for worker in self._workers:
            worker.forget()

    def _plant(self, fault: Fault) -> None:
        errors = {
            "eio": OSError(errno.EIO, os.strerror(errno.EIO)),
            "enospc": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "lie": None,
            "torn": None,
        }
        if fault.kind == "torn":
            self._machine.storage.inject(
                Crash("torn"), fault.call, path=fault.path, nth=fault.nth, written_bytes=700
            )
            return
        self.ledger.device_lies |= fault.kind == "lie"
        syncs = fault.kind == "eio" and fault.call in ("fdatasync", "fsync_dir")
        self._sync_failed = self._sync_failed or syncs
        # While the disk tier is out of service, what leaves memory is gone: it was a cache. (With
        # "power" nothing is acknowledged that is in memory only.)
        on_disk_tier = fault.kind in ("eio", "enospc") and fault.path in ("", ".seg")
        self._disk_refused |= on_disk_tier and self.plan.durability != "power"
        self._machine.storage.inject(
            errors[fault.kind], fault.call, path=fault.path, nth=fault.nth, times=fault.times
        )

    def _rot(self, rng: Random, _at: int) -> None:
        """One bit of log or payload is no longer what was written."""
        storage = self._machine.storage
        paths = [
            f"{folder}/{name}"
            for folder in (f"{STATE_DIR}/wal", f"{STATE_DIR}/data")
            if folder.removeprefix(f"{STATE_DIR}/") in storage.listdir(str(STATE_DIR))
            for name in storage.listdir(folder)
        ]
        if paths:
            path = rng.choice(paths)
            storage.flip_bit(path, rng.randrange(8 * max(1, storage.size(path))))
            self.ledger.device_lies = True
            promise = self.ledger.promise_now
            promise.lsn, promise.lasting_lsn = 0, 0
            promise.sealed, promise.on_disk = frozenset(), frozenset()
            self._must_resume = False
            self._end_leases()

    # --- life goes on (I13) -----------------------------------------------------------------------

    def _work_on(self, image: SimulatedMachine) -> None:
        """After a recovery whatever is found is right, and a block can be put, found and read."""
        self.ledger.happened["images lived on"] += 1
        ledger = Ledger(payloads=dict(self.ledger.payloads), parents=dict(self.ledger.parents))
        paths = list(self.ledger.tokens.values())

        async def get_and_put() -> None:
            daemon = SimulatedDaemon(self._config, image, ledger)
            writer, reader = Worker(8, ledger), Worker(9, ledger)
            for worker in (writer, reader):
                await worker.connect(daemon, must_resume=False)
            for tokens in paths:
                local = await reader.acquire(list(tokens))
                if local is not None:
                    await reader.release(local)
            path = [100 + token for token in range(2 * SIZE)]
            await writer.begin(path)
            local = await reader.begin(path)
            if local is None or reader.sequences[local].sealed < 2:
                ledger.violate(Violation.UNUSABLE, "what was put is not found")

        try:
            _complete(SimulatedLoop(Random(1)), get_and_put())
        except (TierkvError, OSError) as error:
            if not self.ledger.device_lies:
                ledger.violate(Violation.UNUSABLE, repr(error))
        finally:
            image.close()
        self.ledger.violations += ledger.violations


def digest_of_kept(recovered: Recovered) -> str:
    """The state without what every restart moves on."""
    state = recovered.state
    moved = state.next_block, state.epoch
    state.next_block = state.epoch = 0
    try:
        return digest(state)
    finally:
        state.next_block, state.epoch = moved


def _complete(loop: SimulatedLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or to the crash; leaves nothing that could complain later."""
    try:
        loop.run_until_complete(work)
    except Crash:
        pass
    finally:
        loop.forsake()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _clock(jump_s: int) -> Iterator[None]:
    """The wall clock stands elsewhere: nothing may depend on it."""
    now, now_ns = time.time, time.time_ns

    def jumped() -> float:
        return now() + jump_s

    def jumped_ns() -> int:
        return now_ns() + jump_s * 10**9

    with mock.patch("time.time", jumped), mock.patch("time.time_ns", jumped_ns):
        yield


@contextlib.contextmanager
def _ram_steps(step: Callable[[], None]) -> Iterator[None]:
    """The daemon may die between its changes in RAM, too: they outlive it."""
    empty, copy_payload = Arena.empty, copy.copy_payload

    def stepping_empty(arena: Arena, pool: int, slots: object) -> None:
        step()
        empty(arena, pool, slots)  # type: ignore[arg-type]
        step()

    def stepping_copy(target: U8, to: U32, source: U8, at: U32) -> Sums:
        for one in range(len(to)):
            step()
            copy_payload(target, to[one : one + 1], source, at[one : one + 1])
        step()
        return payload_sums(target, to)

    with (
        mock.patch.object(Arena, "empty", stepping_empty),
        mock.patch.object(copy, "copy_payload", stepping_copy),
    ):
        yield


__all__ = ["Looks", "Result", "Stuck", "config_of", "run"]
