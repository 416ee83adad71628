"""Who holds what: leases of connected workers, and those that wait for a worker to come back."""

from __future__ import annotations

import asyncio
import logging
import os

from tierkv.core.planner import Planner
from tierkv.rpc.connection import Connection
from tierkv.service.process import is_alive, open_pidfd, start_time

log = logging.getLogger(__name__)

TOKEN_BYTES = 16


class Leases:
    """Opens, resumes and ends leases.

    The lease of a connection ends with it, at once. A lease that outlived the daemon waits for its
    worker to come back: until the grace period is over, or the worker's process ends. It makes no
    difference to a worker whether the daemon was killed or stopped.
    """

    def __init__(self, planner: Planner, grace_s: float) -> None:
        self._planner = planner
        self._grace_s = grace_s
        self._holders: dict[int, Connection] = {}
        self._waiting: dict[int, tuple[asyncio.TimerHandle, int | None]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._planner.state.leases)

    def await_workers(self) -> None:
        """Start the grace period of all leases; call once, after recovery."""
        loop = asyncio.get_running_loop()
        for lease in self._planner.state.leases.values():
            timer = loop.call_later(self._grace_s, self._give_up, lease.id, "grace period over")
            pidfd = open_pidfd(lease.pid) if lease.pid else None
            if pidfd is not None:
                loop.add_reader(pidfd, self._give_up, lease.id, "worker ended")
            self._waiting[lease.id] = (timer, pidfd)
            if not is_alive(lease.pid, lease.start_time):
                # Asked after the descriptor was opened: it may be of another process by now.
                loop.call_soon(self._give_up, lease.id, "worker ended")

    def open(self, connection: Connection) -> int:
        """A new lease for a connection."""
        started = start_time(connection.pid) if connection.pid else 0
        token = os.urandom(TOKEN_BYTES)
        lease = self._planner.open_lease(token, connection.pid, started, connection.uid)
        self._holders[lease.id] = connection
        return lease.id

    def resume(self, connection: Connection, token: bytes) -> int | None:
        """The lease with this token, if it still stands and belongs to the same user."""
        for lease in self._planner.state.leases.values():
            if lease.token == token and lease.uid == connection.uid:
                self._stop_waiting(lease.id)
                before = self._holders.get(lease.id)
                self._holders[lease.id] = connection
                if before is not None and before is not connection:
                    # Its worker has connected anew; the old connection is dead but not yet seen so.
                    before.abort()
                return lease.id
        return None

    def end(self, lease: int, connection: Connection) -> None:
        """The connection is gone: so is its lease, unless another connection has taken it up."""
        if self._holders.get(lease) is connection and not self._closed:
            del self._holders[lease]
            self._planner.close_lease(lease)

    def close(self) -> None:
        """Stop: leases that stand now are left for the next daemon."""
        self._closed = True
        for lease in list(self._waiting):
            self._stop_waiting(lease)

    def _give_up(self, lease: int, why: str) -> None:
        if lease not in self._waiting:
            return
        self._stop_waiting(lease)
        log.info("lease closed: %s", why, extra={"lease": lease})
        self._planner.close_lease(lease)

    def _stop_waiting(self, lease: int) -> None:
        timer, pidfd = self._waiting.pop(lease, (None, None))
        if timer is not None:
            timer.cancel()
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
