"""The descriptor store at every step at which daemon or manager may fail."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.supervisor import ARENAS, Supervisor
from tierkv.errors import TierFailed
from tierkv.service.fd_store import FdStore
from tierkv.service.systemd import Inherited, Notifier
from tierkv.tiers.arena import Arena

STORE = bytes(range(16))
BUDGET_BYTES = 1 << 20
MESSAGES = 6
"""To put a new arena in an old one's place: two removals, a barrier, two storings, a barrier."""


@contextmanager
def started(supervisor: Supervisor) -> Iterator[FdStore]:
    """The store as the next daemon sees it."""
    inherited = [Inherited(name, os.dup(fd)) for name, fd in supervisor.passed_on()]
    store = FdStore(Notifier(supervisor.path), inherited)
    yield store
    store.close()


def open_arena(store: FdStore, name: str = "device", budget_bytes: int = BUDGET_BYTES) -> Arena:
    return Arena.open(store, name, budget_bytes, STORE, "boot")


def held(supervisor: Supervisor) -> set[int]:
    """Which memories are stored."""
    return {os.fstat(fd).st_ino for _, fd in supervisor.passed_on()}


@pytest.mark.parametrize("obeyed", range(MESSAGES + 1))
def test_whatever_of_a_replacement_gets_lost_the_next_daemon_takes_over_one_arena_or_none(
    tmp_path: Path, obeyed: int
) -> None:
    with Supervisor(tmp_path / "notify") as supervisor:
        with started(supervisor) as store:
            open_arena(store).close()
        first = held(supervisor)
        supervisor.deaf_after = obeyed
        with started(supervisor) as store:
            store.drop("device")
            second = open_arena(store)
            identity = second.identity
            second.close()
        supervisor.deaf_after = None
        left = held(supervisor)
        with started(supervisor) as store:
            third = open_arena(store)
            # Of the old arena nothing is ever seen again; the new one is whole or was not stored.
            assert third.adopted == (third.identity == identity)
            assert third.adopted == (len(left - first) == 2 and not left & first)
            third.close()
        assert [name for name, _ in supervisor.passed_on()] == ARENAS[:2]


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_an_arena_that_the_manager_was_not_told_of_is_not_found(
    tmp_path: Path, heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of payload, table and barrier only so many are sent."""
    left = heard

    def hand_over(notifier: Notifier, *lines: str, fds: Sequence[int] = ()) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ECONNREFUSED, "gone")
        notifier._send(lines, fds, 1.0)

    def gone(_notifier: Notifier) -> None:
        raise OSError(errno.ETIMEDOUT, "silent")

    with Supervisor(tmp_path / "notify") as supervisor, started(supervisor) as store:
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(Notifier, "hand_over", hand_over)
            patch.setattr(Notifier, "wait_until_done", gone)
            with pytest.raises(TierFailed):
                store.make("device", BUDGET_BYTES, b"table")
        assert store.find("device") is None
        # The manager is a part of this process, and holds what it has heard of.
        assert len(os.listdir("/proc/self/fd")) <= before + heard
        # Tried again, it is one arena.
        open_arena(store).close()
        assert store.find("device") is not None


def test_replacing_an_arena_takes_as_many_messages_as_the_test_above_thinks(
    tmp_path: Path,
) -> None:
    with Supervisor(tmp_path / "notify") as supervisor, started(supervisor) as store:
        supervisor.deaf_after = 100
        open_arena(store).close()
        assert supervisor.deaf_after == 100 - MESSAGES


def test_a_store_that_is_used_again_in_the_same_process_finds_what_it_made(tmp_path: Path) -> None:
    """Recovery begins again with a store of another identity if the old one was damaged."""
    with Supervisor(tmp_path / "notify") as supervisor, started(supervisor) as store:
        first = open_arena(store)
        again = open_arena(store)
        assert again.adopted
        assert again.identity == first.identity
        other = Arena.open(store, "device", BUDGET_BYTES, bytes(16), "boot")
        assert not other.adopted
        assert len(held(supervisor)) == 2
        for arena in (first, again, other):
            arena.close()


def test_nobody_who_holds_the_payload_can_change_its_size(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "notify") as supervisor, started(supervisor) as store:
        arena = open_arena(store)
        for size_bytes in (0, arena.size_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size_bytes)
        assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE == 0
        arena.close()


def test_a_table_that_is_given_up_is_blank_but_as_long_as_before(tmp_path: Path) -> None:
    """Workers may be looking into it: behind its end they would die of it."""
    with Supervisor(tmp_path / "notify") as supervisor, started(supervisor) as store:
        arena = open_arena(store)
        arena.add_pool(0, 4096, 16)
        size_bytes = os.fstat(arena.shown_table_fd).st_size
        store.drop("device")
        assert os.pread(arena.shown_table_fd, size_bytes + 1, 0) == bytes(size_bytes)
        arena.close()


def test_a_manager_that_is_gone_is_a_typed_error(tmp_path: Path) -> None:
    store = FdStore(Notifier(str(tmp_path / "nobody")), [])
    with pytest.raises(TierFailed, match=r"arena\.keep"):
        open_arena(store)
    store.close()
