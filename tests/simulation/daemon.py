"""The daemon on a simulated machine: the real core, log, tiers, recovery, engine and sessions.

Not here: sockets, processes, LMDB. They have tests of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

from tests.simulation.ledger import Ledger, Violation
from tests.simulation.loop import Crash
from tests.simulation.machine import STATE_DIR, SimulatedMachine
from tierkv.config import schema
from tierkv.core.counters import Counters
from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.errors import TierFailed, TierFull, TierkvError
from tierkv.obs.slow import Slow
from tierkv.rpc import messages as m
from tierkv.service.assembly import Parts, assemble
from tierkv.service.lifecycle import DaemonState, Lifecycle
from tierkv.service.operations import Operations
from tierkv.service.progress import tell_nobody
from tierkv.service.recovered import Recovered
from tierkv.service.recovery import recover
from tierkv.service.reload import Reloader
from tierkv.service.sessions import Sessions
from tierkv.service.store import StateDirectory
from tierkv.tiers.index import IndexChanges


def open_store(config: schema.Config, machine: SimulatedMachine) -> Recovered:
    """Recover what is on the machine."""
    directory = StateDirectory(STATE_DIR, machine.storage)
    directory.make_folders()
    return recover(config, directory, tell_nobody, machine)


class Wire:
    """The daemon's end of one worker's connection, without a socket."""

    pid = 0
    uid = 0
    received_s = 0.0

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.last_id = 0

    def reply(self, request_id: int, message: m.Message) -> None:
        """See Connection."""
        self.waiting.pop(request_id).set_result(message)

    def fail(self, error: TierkvError, request_id: int) -> None:
        """See Connection."""
        raise AssertionError(f"a reply is too large: {error}")

    def abort(self) -> None:
        """See Connection."""


class SimulatedDaemon:
    """One incarnation. Everything it acknowledges goes into the ledger."""

    def __init__(self, config: schema.Config, machine: SimulatedMachine, ledger: Ledger) -> None:
        self.config = config
        self.ledger = ledger
        self.recovered = open_store(config, machine)
        ledger.incarnation(self.recovered)
        self._note_states(self.recovered)
        self.parts: Parts = assemble(config, self.recovered, Counters(), hooks=self, deaths=self)
        self._note_replies(self.parts)
        lifecycle = Lifecycle()
        for state in (DaemonState.RECOVERING, DaemonState.SERVING):
            lifecycle.enter(state)
        reloader = Reloader(config, lambda: config)
        operations = Operations(self.parts, lifecycle, reloader.run)
        self.sessions = Sessions(
            *(self.parts, lifecycle, dict),
            observer=self,
            slow=Slow(math.inf),
            operations=operations,
        )
        through = config.disk.write == "through"
        self.parts.begin(self.recovered.state.epoch, write_through=through)
        self._behind = asyncio.get_running_loop().create_task(self.parts.engine.write_behind())

    def connect(self) -> Wire:
        """A new connection."""
        wire = Wire()
        self.sessions.connected(wire)
        return wire

    def disconnect(self, wire: Wire) -> None:
        """The worker has gone."""
        self.sessions.disconnected(wire)

    async def ask(self, wire: Wire, message: m.Message) -> Any:
        """Send a request; returns its reply, which may be a Failure."""
        wire.last_id += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        wire.waiting[wire.last_id] = answer
        self.sessions.request(wire, wire.last_id, message)
        return await answer

    async def checkpoint(self) -> None:
        """What the daemon does when a checkpoint is due."""
        with contextlib.suppress(TierFull, TierFailed, OSError):
            await self.parts.checkpointer.run()
            self.ledger.checkpointed()

    async def spare(self) -> None:
        """What the daemon does at every tick."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self.recovered.writer.prepare_spare)
        except OSError:
            return

    # --- hooks and observer -----------------------------------------------------------------------

    def synced(self, lsn: int, seconds: float) -> None: ...

    def written(self, records: int, seconds: float) -> None: ...

    def block_gone(self, lived_s: float) -> None: ...

    def block_left(self, tier: Tier, idle_s: float) -> None: ...

    def block_reused(self, idle_s: float) -> None: ...

    def checkpointed(self, seconds: float) -> None: ...

    def moved(self, move: Move, seconds: float) -> None: ...

    def attended(self, waited_s: list[float]) -> None: ...

    def answered(self, verb: str, code: str, seconds: float) -> None: ...

    def log_died(self, error: Exception) -> None:
        """The real one exits with a code of its own."""
        self.ledger.happened["log died"] += 1
        raise Crash(repr(error))

    def broken(self, error: BaseException) -> None:
        """The real one says so and exits: a fault of the program."""
        self.ledger.violate(Violation.BROKEN, repr(error))
        raise Crash(repr(error))

    # --- what the ledger wants to know ------------------------------------------------------------

    def _note_states(self, recovered: Recovered) -> None:
        writer, state, ledger = recovered.writer, recovered.state, self.ledger
        append = writer.append

        def noting(records: Any, flags: int = 0) -> int:
            lsn = append(records, flags)
            ledger.appended(lsn, state)
            return lsn

        index, commit = recovered.index, recovered.index.commit

        def committing(changes: IndexChanges) -> None:
            ledger.committing(int(changes.meta["checkpoint_lsn"]))
            commit(changes)

        index.commit = committing  # type: ignore[method-assign]  # listens in on one object
        writer.append = noting  # type: ignore[method-assign]  # listens in on one object

    def _note_replies(self, parts: Parts) -> None:
        release, writer, ledger = parts.journal.release, self.recovered.writer, self.ledger

        def noting(reply: Any, *, lasting: bool) -> None:
            lsn = writer.appended_lsn

            def send() -> None:
                ledger.promise(lsn, lasting=lasting)
                reply()

            release(send, lasting=lasting)

        parts.journal.release = noting  # type: ignore[method-assign]  # listens in on one object
