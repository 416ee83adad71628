"""What operators ask of a running daemon, and to whom that is granted."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

from tierkv.config.change import Change
from tierkv.errors import NotPermitted, TierkvError
from tierkv.rpc import messages as m
from tierkv.rpc.connection import Connection
from tierkv.service.assembly import Parts
from tierkv.service.inspection import Inspection
from tierkv.service.lifecycle import DaemonState, Lifecycle
from tierkv.service.selection import Selection
from tierkv.service.survey import Surveyor
from tierkv.service.upkeep import Upkeep


class _Verb(NamedTuple):
    """How a verb is carried out. One that ``changes`` something is not open to everybody."""

    carry_out: Callable[[Any], Awaitable[m.Message]]
    changes: bool


class Operations:
    """Carries out the verbs of operators.

    Whoever may connect may look. Changes are granted to root, to the daemon's own user and to
    ``operator_uids``.
    """

    def __init__(
        self,
        parts: Parts,
        lifecycle: Lifecycle,
        reload: Callable[[], Awaitable[Change]],
        operator_uids: Collection[int] = (),
    ) -> None:
        self.operator_uids = operator_uids
        self._engine = parts.engine
        self._leases = parts.leases
        self._lifecycle = lifecycle
        self._reread = reload
        self._stopping = False
        selection = Selection(parts, Surveyor(parts.planner.state))
        inspection = Inspection(parts, selection)
        upkeep = Upkeep(parts, selection)
        self._verbs: dict[type[m.Message], _Verb] = {
            m.Drain: _Verb(self._drain, changes=True),
            m.Reload: _Verb(self._reload, changes=True),
            m.List: _Verb(inspection.listed, changes=False),
            m.Inspect: _Verb(inspection.inspect, changes=False),
            m.Contents: _Verb(inspection.page, changes=False),
            m.Pin: _Verb(upkeep.pin, changes=True),
            m.Delete: _Verb(upkeep.delete, changes=True),
            m.Warm: _Verb(upkeep.warm, changes=True),
        }

    async def carry_out(self, connection: Connection, message: m.OperatorRequest) -> m.Message:
        """The answer to a request. Raises NotPermitted, and what the verb raises."""
        verb = self._verbs[type(message)]
        if verb.changes:
            self._require_operator(connection.uid, str(message.__struct_config__.tag))
        return await verb.carry_out(message)

    def stop(self) -> None:
        """The daemon is about to end: a drain cannot be undone any more."""
        self._stopping = True

    def _require_operator(self, uid: int, verb: str) -> None:
        if uid not in (0, os.geteuid(), *self.operator_uids):
            raise NotPermitted(
                f"{verb}: user {uid} may not; root, the daemon's user and those that "
                "server.operator_uids lists may"
            )

    async def _drain(self, message: m.Drain) -> m.Draining:
        state, engine = self._lifecycle.state, self._engine
        if message.undo:
            if self._stopping:
                raise TierkvError("drain: the daemon is stopping, which cannot be undone")
            if state is DaemonState.DRAINING:
                self._lifecycle.enter(DaemonState.SERVING)
        elif state is DaemonState.SERVING and not message.look:
            self._lifecycle.enter(DaemonState.DRAINING)
        drains = self._lifecycle.state is DaemonState.DRAINING
        if drains and not engine.writing:
            # Also what was sealed since the last time, if blocks go to disk only when evicted.
            engine.write_all_behind()
        return m.Draining(drains, len(self._leases), engine.unwritten_blocks, engine.writing)

    async def _reload(self, _message: m.Reload) -> m.Reloaded:
        change = await self._reread()
        return m.Reloaded(list(change.changed), list(change.needs_restart))
