"""Arenas as memory without a name, kept by the service manager while no daemon runs.

systemd holds descriptors for a service (sd_notify(3), FDSTORE=1) and passes them to its next
process. An arena is two of them, ``tierkv-NAME.arena`` and ``tierkv-NAME.table``. No file system
bounds the memory, nobody finds it by a path, and it is free again when systemd lets go.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Mapping, Sequence

from tierkv.config.ram import available_ram_bytes
from tierkv.config.resolve import ARENA_FDS
from tierkv.core.ids import RAM_TIERS
from tierkv.errors import ConfigError, TierFailed
from tierkv.service.systemd import Inherited, Notifier
from tierkv.tiers.arena import ArenaFds
from tierkv.tiers.linux import punch_hole

log = logging.getLogger(__name__)

_PARTS = ("arena", "table")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FdStore:
    """The service manager's descriptor store as an ArenaHome.

    ``inherited`` are the descriptors it passed on, now owned by the store. Those that no daemon
    of ours would have stored are given back at once.

    Crash: what is stored is whole, since it is stored when it is made. Of an arena that was being
    stored or dropped the manager may hold one part; then ``find`` finds nothing.
    """

    def __init__(self, manager: Notifier, inherited: Iterable[Inherited]) -> None:
        self._manager = manager
        self._held: dict[str, list[int]] = {}
        for name, fd in inherited:
            self._held.setdefault(name, []).append(fd)
        for stored in self._held.keys() - ARENA_FDS:
            log.warning("the service manager passed on %r, which is not ours: dropped", stored)
            self._let_go(stored)

    def __str__(self) -> str:
        return "the memory that the service manager keeps"

    @staticmethod
    def require_service(environment: Mapping[str, str]) -> None:
        """Raise ConfigError if there is no service manager, or it says that it keeps too few."""
        if not environment.get("NOTIFY_SOCKET"):
            raise ConfigError(
                'arena.keep is "manager", but no service manager listens ($NOTIFY_SOCKET is not '
                'set); let a unit of Type=notify run the daemon, or write "files"'
            )
        granted = environment.get("FDSTORE", "")  # systemd 254 or later says it
        if granted.isdecimal() and int(granted) < len(ARENA_FDS):
            raise ConfigError(
                f'arena.keep is "manager", but it keeps {granted} descriptors; set '
                f'FileDescriptorStoreMax={len(ARENA_FDS)} in the unit, or write "files"'
            )

    def find(self, name: str) -> ArenaFds | None:
        """See ArenaHome."""
        payloads, tables = (self._held.get(_stored_name(name, part), []) for part in _PARTS)
        if len(payloads) != 1 or len(tables) != 1:
            return None
        return ArenaFds(os.dup(payloads[0]), os.dup(tables[0]))

    def free_bytes(self) -> int:
        """See ArenaHome: what the machine's memory has free."""
        return available_ram_bytes()

    def make(self, name: str, payload_bytes: int, table: bytes) -> ArenaFds:
        """See ArenaHome. Returns when the manager holds both parts."""
        payload, stored_table = (_stored_name(name, part) for part in _PARTS)
        try:
            payload_fd = self._hold(payload, _memory(payload, payload_bytes, _SEALS))
            table_fd = self._hold(stored_table, _memory(stored_table, len(table), 0))
            os.pwrite(table_fd, table, 0)
            # In this order, and not on after a failure: a table never comes to lie beside another
            # arena's payload.
            for stored, fd in ((payload, payload_fd), (stored_table, table_fd)):
                self._tell("FDSTORE=1", f"FDNAME={stored}", "FDPOLL=0", fds=[fd])
            self._wait()
        except (OSError, TierFailed):
            # What the manager may hold of it must never be taken over, nor what it does not hold.
            self._empty(name)
            for stored in (payload, stored_table):
                self._close(stored)
            raise
        return ArenaFds(os.dup(payload_fd), os.dup(table_fd))

    def drop(self, name: str) -> None:
        """See ArenaHome. Workers keep the memory that they still map."""
        self._empty(name)
        for part in reversed(_PARTS):
            stored = _stored_name(name, part)
            self._tell("FDSTOREREMOVE=1", f"FDNAME={stored}")
            self._close(stored)
        # Only then its memory is free.
        self._wait()

    def give_back(self) -> None:
        """Drop every arena that was inherited: another home is in use now."""
        for tier in RAM_TIERS:
            self._empty(tier.label)
        for stored in list(self._held):
            self._let_go(stored)

    def close(self) -> None:
        """Close all descriptors. Those of arenas in use, and the manager's, stay open."""
        for stored in list(self._held):
            self._close(stored)

    def _hold(self, stored: str, fd: int) -> int:
        self._held.setdefault(stored, []).append(fd)
        return fd

    def _empty(self, name: str) -> None:
        """So that the arena is never taken over, even if the manager should go on holding it."""
        for fd in self._held.get(_stored_name(name, "table"), []):
            # Not shorter: workers may be looking into it.
            punch_hole(fd, 0, os.fstat(fd).st_size)

    def _tell(self, *lines: str, fds: Sequence[int] = ()) -> None:
        try:
            self._manager.hand_over(*lines, fds=fds)
        except OSError as error:
            raise _unheard(error) from error

    def _wait(self) -> None:
        try:
            self._manager.wait_until_done()
        except OSError as error:
            raise _unheard(error) from error

    def _let_go(self, stored: str) -> None:
        if stored:
            self._manager.send("FDSTOREREMOVE=1", f"FDNAME={stored}")
        self._close(stored)

    def _close(self, stored: str) -> None:
        for fd in self._held.pop(stored, []):
            os.close(fd)


def _unheard(error: OSError) -> TierFailed:
    return TierFailed(
        f"the service manager, which is to keep the RAM tiers, cannot be told: {error}; mend that"
        ' or set arena.keep = "files"'
    )


def _stored_name(name: str, part: str) -> str:
    return f"tierkv-{name}.{part}"


def _memory(name: str, size_bytes: int, seals: int) -> int:
    """Sparse memory of its own. ``seals``: what nobody who holds it may do to it any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # who was given it for reading shall not open it again for writing
        os.ftruncate(fd, size_bytes)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd
