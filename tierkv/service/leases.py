"""Who holds what: leases of connected workers, and those that wait for a worker to come back."""

from __future__ import annotations

import asyncio
import logging
import os

from tierkv.core.pins import is_pins
from tierkv.core.planner import Planner
from tierkv.core.state import Lease
from tierkv.rpc.connection import Connection
from tierkv.service.process import is_alive, open_pidfd, start_time

log = logging.getLogger(__name__)

TOKEN_BYTES = 16


class Leases:
    """Opens, resumes and ends leases.

    The lease of a connection ends with it, at once. A lease that outlived the daemon waits for its
    worker to come back: until the grace period is over, or the worker's process ends. It makes no
    difference to a worker whether the daemon was killed or stopped.

    A worker that lives but was not told that its lease is over may be stopped in the midst of
    writing a block, and go on any time. So its sequences end, but the blocks that it may write into
    stay fenced, until it has come back and released them or its process has ended.
    """

    def __init__(self, planner: Planner, grace_s: float) -> None:
        self._planner = planner
        self.grace_s = grace_s
        self.names: dict[int, str] = {}
        """What the workers that are connected call themselves, by lease."""
        self._holders: dict[int, Connection] = {}
        self._waiting: dict[int, tuple[asyncio.TimerHandle, int | None]] = {}
        self._closed = False

    def __len__(self) -> int:
        return sum(not is_pins(lease) for lease in self._planner.state.leases.values())

    def await_workers(self) -> None:
        """Start the grace period of all leases; call once, after recovery."""
        for lease in self._planner.state.leases.values():
            if not is_pins(lease):
                self._await(lease)

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
            if lease.token == token and lease.uid == connection.uid and not is_pins(lease):
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
        if self._holders.get(lease) is not connection or self._closed:
            return
        del self._holders[lease]
        self.names.pop(lease, None)
        if not connection.refused:
            self._planner.close_lease(lease)
        elif self._planner.fence_lease(lease):
            # We closed it: its worker may hear of that at its next request only.
            self._await(self._planner.state.leases[lease])

    def close(self) -> None:
        """Stop: leases that stand now are left for the next daemon."""
        self._closed = True
        for lease in list(self._waiting):
            self._stop_waiting(lease)

    def _await(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.grace_s, self._grace_over, lease)
        pidfd = open_pidfd(lease.pid) if lease.pid else None
        if pidfd is not None:
            loop.add_reader(pidfd, self._worker_ended, lease.id)
        self._waiting[lease.id] = (timer, pidfd)
        if not is_alive(lease.pid, lease.start_time):
            # Asked after the descriptor was opened: it may be of another process by now.
            loop.call_soon(self._worker_ended, lease.id)

    def _worker_ended(self, lease: int) -> None:
        if lease in self._waiting:
            self._stop_waiting(lease)
            log.info("lease closed: worker ended", extra={"lease": lease})
            self._planner.close_lease(lease)

    def _grace_over(self, lease: Lease) -> None:
        """The worker did not come back in time. Called again and again while it lives.

        (Its end may pass unseen otherwise: there need not be a descriptor of its process.)
        """
        if not is_alive(lease.pid, lease.start_time):
            self._worker_ended(lease.id)
            return
        before = len(self._planner.sequences_of(lease.id))
        if not self._planner.fence_lease(lease.id):
            self._stop_waiting(lease.id)
            log.info("lease closed: grace period over", extra={"lease": lease.id})
            return
        if before:
            log.warning(
                "grace period over: a worker that lives did not come back; blocks that it may "
                "still write into are kept from use until it does, or ends",
                extra={"lease": lease.id, "pid": lease.pid},
            )
        _, pidfd = self._waiting[lease.id]
        timer = asyncio.get_running_loop().call_later(self.grace_s, self._grace_over, lease)
        self._waiting[lease.id] = (timer, pidfd)

    def _stop_waiting(self, lease: int) -> None:
        timer, pidfd = self._waiting.pop(lease, (None, None))
        if timer is not None:
            timer.cancel()
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)
