"""Whose sequences outlive a daemon, and until when."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from recovery_harness import SIZE, Daemon, Machine

from tierkv.core.ids import Tier
from tierkv.core.pins import PINS_TOKEN, Pins, is_pins, pins_of
from tierkv.service import process
from tierkv.service.leases import Leases
from tierkv.service.process import is_alive, start_time

A = list(range(100, 100 + 2 * SIZE))
TOKEN = b"sixteen bytes :)"
Start = Callable[..., Daemon]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, to be a worker."""
    worker = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield worker
    worker.kill()
    worker.communicate()


@dataclass(eq=False)
class FakeConnection:
    """As much of a connection as leases look at."""

    pid: int = field(default_factory=os.getpid)
    uid: int = field(default_factory=os.getuid)
    aborted: bool = False
    refused: bool = False

    def abort(self) -> None:
        self.aborted = True


# --- at recovery ------------------------------------------------------------------------------


def _with_lease(daemon: Daemon, pid: int, started: int) -> int:
    lease = daemon.planner.open_lease(TOKEN, pid, started, os.getuid()).id
    daemon.store(lease, 1, A)
    daemon.write()
    return lease


def test_a_live_worker_keeps_its_sequences(start: Start) -> None:
    daemon = start()
    lease = _with_lease(daemon, os.getpid(), start_time(os.getpid()))
    daemon = start()
    assert list(daemon.state.leases) == [lease]
    assert len(daemon.slots(lease, 1)) == 2
    assert (daemon.report.leases_kept, daemon.report.leases_closed) == (1, 0)


def test_a_worker_of_another_pid_namespace_may_still_live(start: Start) -> None:
    daemon = start()
    lease = _with_lease(daemon, 0, 0)
    daemon = start()
    assert list(daemon.state.leases) == [lease]


def test_pins_are_held_by_nobody_and_outlive_all_memory(start: Start, tmp_path: Path) -> None:
    daemon = start()
    _with_lease(daemon, os.getpid(), 1)
    daemon.write_behind()
    rows = daemon.state.live_rows()
    pins = Pins(daemon.planner)
    assert pins.pin([(rows, daemon.state.blocks.id[rows])]).blocks == 2
    daemon.write()
    daemon = start(arena_dir=tmp_path / "another arena")
    assert [len(pin) for pin in pins_of(daemon.state)] == [2]
    assert [is_pins(lease) for lease in daemon.state.leases.values()] == [True]
    assert daemon.report.leases_closed == 1
    assert Pins(daemon.planner).unpin(pins_of(daemon.state)).blocks == 0
    assert daemon.cached(A) == 2


@pytest.mark.asyncio
async def test_nobody_waits_for_who_holds_the_pins(bench: Callable[..., Bench]) -> None:
    some = bench()
    lease = some.daemon.planner.open_lease(PINS_TOKEN, 0, 0, os.getuid()).id
    some.leases.await_workers()
    assert not some.leases._waiting
    assert len(some.leases) == 0
    assert some.resume(FakeConnection(), PINS_TOKEN) is None
    assert lease in some.daemon.state.leases


@pytest.mark.parametrize("started", [0, 1, -1])
def test_a_pid_of_another_start_time_is_another_process(start: Start, started: int) -> None:
    now = start_time(os.getpid())
    daemon = start()
    _with_lease(daemon, os.getpid(), now - 1 if started == -1 else started)
    daemon = start()
    assert not daemon.state.leases
    assert not daemon.state.sequences
    assert daemon.report.leases_closed == 1
    assert daemon.cached(A) == 2  # full blocks stay cached


def test_a_dead_worker_leaves_its_full_blocks_only(
    start: Start, sleeper: subprocess.Popen[bytes]
) -> None:
    daemon = start()
    lease = _with_lease(daemon, sleeper.pid, start_time(sleeper.pid))
    daemon.run(daemon.planner.reserve(lease, 1, len(A), len(A) + 3))
    daemon.write()
    sleeper.kill()
    sleeper.wait()
    daemon = start()
    assert not daemon.state.leases
    assert len(daemon.state.live_rows()) == 2
    assert daemon.cached(A) == 2


def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert is_alive(sleeper.pid, started)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(sleeper.pid) == 0
    assert not is_alive(sleeper.pid, started)


def test_a_process_lives_as_long_as_any_of_its_threads() -> None:
    exit_thread = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    code = (
        "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start();"
        f"ctypes.CDLL(None).syscall({exit_thread}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as worker:
        started = start_time(worker.pid)
        stat = Path(f"/proc/{worker.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.002)
        assert is_alive(worker.pid, started)
        worker.kill()
        worker.wait()
        assert not is_alive(worker.pid, started)


def test_the_command_of_a_process_may_hold_anything() -> None:
    code = "import ctypes,sys; ctypes.CDLL(None).prctl(15, b'a) Z 1 (b', 0, 0, 0); print(1)"
    code += "; sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert start_time(worker.pid) >= start_time(os.getpid())
        worker.communicate(b"")


# --- while the daemon serves ------------------------------------------------------------------


class Bench:
    """Leases over a daemon of the harness."""

    def __init__(self, daemon: Daemon, grace_s: float = 3600.0) -> None:
        self.daemon = daemon
        self.leases = Leases(daemon.planner, grace_s)

    def open(self, connection: FakeConnection) -> int:
        return self.leases.open(connection)

    def resume(self, connection: FakeConnection, token: bytes) -> int | None:
        return self.leases.resume(connection, token)

    def end(self, lease: int, connection: FakeConnection) -> None:
        self.leases.end(lease, connection)

    def token(self, lease: int) -> bytes:
        return self.daemon.state.leases[lease].token

    async def closed(self, lease: int) -> None:
        """Wait until the lease has ended."""
        async with asyncio.timeout(10):
            while lease in self.daemon.state.leases:  # noqa: ASYNC110  # nobody signals it
                await asyncio.sleep(0.002)


class Clock:
    """The running loop's time: it stands still until it is moved on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time()
        self._loop.time = lambda: self._now_s  # type: ignore[method-assign]  # it is the clock

    async def forward(self, seconds: float) -> None:
        """Return when all that is due by then was called."""
        self._now_s += seconds
        for _ in range(3):  # due timers, what they call soon, and this task
            await asyncio.sleep(0)

    def go(self) -> None:
        """Let it be real time again."""
        del self._loop.time


@pytest_asyncio.fixture
async def clock() -> AsyncIterator[Clock]:
    clock = Clock()
    yield clock
    clock.go()


@pytest_asyncio.fixture
async def bench(machine: Machine) -> AsyncIterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        daemon = machine.daemon or machine.start()
        made.append(Bench(daemon, **options))
        return made[-1]

    yield make
    for one in made:
        one.leases.close()


@pytest.mark.asyncio
async def test_a_lease_ends_with_its_connection(bench: Callable[..., Bench]) -> None:
    some, connection = bench(), FakeConnection()
    lease = some.open(connection)
    assert some.daemon.state.leases[lease].pid == os.getpid()
    assert some.daemon.state.leases[lease].start_time == start_time(os.getpid())
    some.end(lease, connection)
    assert len(some.leases) == 0
    some.end(lease, connection)


@pytest.mark.asyncio
async def test_a_token_is_good_for_its_own_user_only(bench: Callable[..., Bench]) -> None:
    some, connection = bench(), FakeConnection()
    lease = some.open(connection)
    token = some.token(lease)
    assert some.resume(FakeConnection(uid=os.getuid() + 1), token) is None
    assert some.resume(FakeConnection(), bytes(16)) is None
    assert some.resume(FakeConnection(), token[:15]) is None
    assert not connection.aborted
    assert some.leases._holders[lease] is connection


@pytest.mark.asyncio
async def test_a_second_connection_takes_the_lease_over(bench: Callable[..., Bench]) -> None:
    some, first, second = bench(), FakeConnection(), FakeConnection()
    lease = some.open(first)
    assert some.resume(second, some.token(lease)) == lease
    assert first.aborted
    assert not second.aborted
    some.end(lease, first)  # seen late
    assert lease in some.daemon.state.leases
    assert some.resume(second, some.token(lease)) == lease
    assert not second.aborted
    some.end(lease, second)
    assert lease not in some.daemon.state.leases
    assert some.resume(second, TOKEN) is None


@pytest.mark.asyncio
async def test_tokens_are_random_and_lease_numbers_new(bench: Callable[..., Bench]) -> None:
    some = bench()
    leases = [some.open(FakeConnection()) for _ in range(20)]
    assert len(set(leases)) == 20
    assert len({some.token(lease) for lease in leases}) == 20
    assert all(len(some.token(lease)) == 16 for lease in leases)


@pytest.mark.asyncio
async def test_a_worker_that_does_not_come_back_has_its_grace(
    machine: Machine, bench: Callable[..., Bench], clock: Clock
) -> None:
    lease = _with_lease(machine.start(), os.getpid(), start_time(os.getpid()))
    machine.start()
    some = bench(grace_s=3.0)
    some.leases.await_workers()
    await clock.forward(2.9)
    assert lease in some.daemon.state.leases
    await clock.forward(0.2)
    assert lease not in some.daemon.state.leases
    assert some.resume(FakeConnection(), TOKEN) is None
    assert some.daemon.cached(A) == 2


def _writing(daemon: Daemon, pid: int, started: int) -> tuple[int, int]:
    """A lease that holds an open block, and the slot of that."""
    lease = _with_lease(daemon, pid, started)
    daemon.run(daemon.planner.reserve(lease, 1, len(A), len(A) + 1))
    daemon.write()
    return lease, daemon.slots(lease, 1)[-1]


def _fenced_slots(daemon: Daemon) -> list[int]:
    state = daemon.state
    rows = [one.rows for one in state.sequences.values() if one.fenced]
    return [int(slot) for row in rows for slot in state.blocks.slot[Tier.DEVICE][row]]


@pytest.mark.asyncio
async def test_a_worker_that_lives_keeps_others_out_of_where_it_may_write(
    machine: Machine, bench: Callable[..., Bench], sleeper: subprocess.Popen[bytes]
) -> None:
    lease, slot = _writing(machine.start(), sleeper.pid, start_time(sleeper.pid))
    for _ in range(2):
        machine.start()
        some = bench(grace_s=0.02)
        some.leases.await_workers()
        async with asyncio.timeout(10):
            while some.daemon.planner.sequences_of(lease):  # noqa: ASYNC110  # nobody signals it
                await asyncio.sleep(0.002)
        some.daemon.write()
        assert _fenced_slots(some.daemon) == [slot]
        assert len(some.daemon.state.live_rows()) == 3
        some.leases.close()
    some = bench(grace_s=0.02)
    some.leases.await_workers()
    sleeper.kill()
    await some.closed(lease)
    assert _fenced_slots(some.daemon) == []
    assert some.daemon.cached(A) == 2


@pytest.mark.asyncio
async def test_a_worker_whose_connection_we_closed_may_still_write(
    bench: Callable[..., Bench],
) -> None:
    some, connection = bench(), FakeConnection()
    lease = some.open(connection)
    some.daemon.store(lease, 1, A)
    some.daemon.run(some.daemon.planner.reserve(lease, 1, len(A), len(A) + 1))
    connection.refused = True
    some.end(lease, connection)
    assert len(_fenced_slots(some.daemon)) == 1
    token = some.token(lease)
    again = FakeConnection()
    assert some.resume(again, token) == lease
    assert some.daemon.planner.sequences_of(lease) == []
    some.daemon.planner.release(lease, [1])
    assert _fenced_slots(some.daemon) == []
    some.end(lease, again)
    assert lease not in some.daemon.state.leases


@pytest.mark.asyncio
async def test_a_worker_that_comes_back_has_its_lease_for_good(
    machine: Machine, bench: Callable[..., Bench], clock: Clock
) -> None:
    lease = _with_lease(machine.start(), os.getpid(), start_time(os.getpid()))
    machine.start()
    some = bench(grace_s=3.0)
    some.leases.await_workers()
    connection = FakeConnection()
    assert some.resume(connection, TOKEN) == lease
    await clock.forward(10.0)
    assert lease in some.daemon.state.leases
    some.end(lease, connection)
    assert lease not in some.daemon.state.leases


@pytest.mark.asyncio
async def test_a_worker_that_ends_within_its_grace_is_noticed_at_once(
    machine: Machine, bench: Callable[..., Bench], sleeper: subprocess.Popen[bytes]
) -> None:
    lease = _with_lease(machine.start(), sleeper.pid, start_time(sleeper.pid))
    machine.start()
    some = bench(grace_s=3600.0)
    some.leases.await_workers()
    await asyncio.sleep(0.01)
    assert lease in some.daemon.state.leases
    sleeper.kill()
    await some.closed(lease)


@pytest.mark.asyncio
async def test_a_worker_that_ended_between_recovery_and_serving(
    machine: Machine, bench: Callable[..., Bench], sleeper: subprocess.Popen[bytes]
) -> None:
    lease = _with_lease(machine.start(), sleeper.pid, start_time(sleeper.pid))
    machine.start()
    sleeper.kill()
    sleeper.wait()
    some = bench(grace_s=3600.0)
    some.leases.await_workers()
    await some.closed(lease)


@pytest.mark.asyncio
async def test_a_pid_that_became_another_process_between_recovery_and_serving(
    machine: Machine, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _with_lease(machine.start(), os.getpid(), start_time(os.getpid()))
    machine.start()
    monkeypatch.setattr(process, "start_time", lambda _pid: 1)
    some = bench(grace_s=3600.0)
    some.leases.await_workers()
    await some.closed(lease)


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [PermissionError(1, "sandboxed"), OSError(24, "too many files")])
async def test_a_worker_that_cannot_be_watched_keeps_its_grace(
    machine: Machine,
    bench: Callable[..., Bench],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
) -> None:
    """A sandbox may forbid pidfd_open; that says nothing about the worker."""
    lease = _with_lease(machine.start(), os.getpid(), start_time(os.getpid()))
    machine.start()

    def refused(_pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refused)
    some = bench(grace_s=3.0)
    some.leases.await_workers()
    await clock.forward(2.9)
    assert lease in some.daemon.state.leases
    await clock.forward(0.2)
    assert lease not in some.daemon.state.leases


@pytest.mark.asyncio
async def test_workers_of_other_pid_namespaces_have_the_grace_only(
    machine: Machine, bench: Callable[..., Bench], clock: Clock
) -> None:
    lease = _with_lease(machine.start(), 0, 0)
    machine.start()
    some = bench(grace_s=3.0)
    some.leases.await_workers()
    await clock.forward(2.9)
    assert lease in some.daemon.state.leases
    await clock.forward(0.2)
    assert lease not in some.daemon.state.leases


@pytest.mark.asyncio
async def test_where_a_worker_of_another_pid_namespace_writes_is_fenced_until_it_is_back(
    machine: Machine, bench: Callable[..., Bench], clock: Clock
) -> None:
    lease, slot = _writing(machine.start(), 0, 0)
    machine.start()
    some = bench(grace_s=3.0)
    some.leases.await_workers()
    await clock.forward(2.9)
    assert some.daemon.planner.sequences_of(lease)
    await clock.forward(0.2)
    assert not some.daemon.planner.sequences_of(lease)
    assert _fenced_slots(some.daemon) == [slot]
    assert some.resume(FakeConnection(), TOKEN) == lease
    some.daemon.planner.release(lease, [1])
    assert _fenced_slots(some.daemon) == []


@pytest.mark.asyncio
async def test_no_descriptor_is_left_behind(
    machine: Machine, bench: Callable[..., Bench], sleeper: subprocess.Popen[bytes]
) -> None:
    daemon = machine.start()
    for number in range(3):
        daemon.hello(bytes([number]) * 16, pid=sleeper.pid)
    daemon.hello(TOKEN)
    daemon.write()
    machine.start()
    some = bench()
    before = len(os.listdir("/proc/self/fd"))
    some.leases.await_workers()
    assert len(os.listdir("/proc/self/fd")) == before + 4
    assert some.resume(FakeConnection(), TOKEN) is not None
    sleeper.kill()
    await some.closed(1)
    some.leases.close()
    assert len(os.listdir("/proc/self/fd")) == before
