"""The daemon's life as its service manager sees it: sockets, notifications, signals."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import tierkv
from tests.crash.supervisor import PASS_DESCRIPTORS
from tests.service.blocks import BLOCK, SPEC, check, fill, sized, store, tokens
from tests.service.running import WAIT_S, Daemon, running, until
from tierkv.errors import LeaseLost, Unavailable

LOOPS = ["uvloop", "asyncio"]


class Manager:
    """Receives what a service manager would (sd_notify)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.sock.settimeout(WAIT_S)
        self.seen: list[str] = []

    def wait_for(self, assignment: str) -> None:
        while assignment not in self.seen:
            self.seen += self.sock.recv(4096).decode().split("\n")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.sock.close()


def test_signs_of_life_come_as_often_as_the_manager_asks(manager: Manager) -> None:
    extra = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "300000"}
    with running(extra=extra):
        for _ in range(3):
            manager.seen.clear()
            manager.wait_for("WATCHDOG=1")


def test_a_reload_is_announced(manager: Manager) -> None:
    """systemd waits from RELOADING=1, with the time of that, to the next READY=1."""
    with running(extra={"NOTIFY_SOCKET": str(manager.path)}) as daemon:
        manager.wait_for("READY=1")
        manager.seen.clear()
        before_us = time.monotonic_ns() // 1000
        daemon.signal(signal.SIGHUP)
        manager.wait_for("READY=1")
        begin = manager.seen.index("RELOADING=1")
        assert begin < manager.seen.index("READY=1")
        (since,) = [line for line in manager.seen if line.startswith("MONOTONIC_USEC=")]
        assert before_us <= int(since.partition("=")[2]) <= time.monotonic_ns() // 1000


def test_asked_by_a_signal_it_says_how_it_is() -> None:
    with running() as daemon:
        daemon.signal(signal.SIGUSR1)
        until(lambda: "asked how it is: serving: " in daemon.said(), "for its answer")
        assert "wal_durable_lsn=" in daemon.said()


def test_an_abort_shows_what_every_thread_is_at() -> None:
    """The watchdog of systemd ends a daemon that hangs by SIGABRT."""
    with running() as daemon:
        daemon.signal(signal.SIGABRT)
        assert daemon.wait() == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in daemon.said()
        assert "Thread 0x" in daemon.said()


@pytest.mark.parametrize("loop", LOOPS)
def test_notifications(manager: Manager, loop: str) -> None:
    extra = {"NOTIFY_SOCKET": str(manager.path), "TIERKV_LOOP": loop}
    with Daemon(extra=extra) as daemon:
        daemon.launch()
        manager.wait_for("READY=1")
        # Ready means ready: the very first attempt to connect succeeds.
        with tierkv.connect(daemon.socket, timeout_s=1) as client:
            assert client.stat()["state"] == "serving"
        assert any(line.startswith("STATUS=serving: 0 leases, device") for line in manager.seen)
        assert any(line.startswith("STATUS=recovering: ") for line in manager.seen)
        assert "EXTEND_TIMEOUT_USEC=30000000" in manager.seen
        assert not any(line.startswith("WATCHDOG") for line in manager.seen)
        assert "STOPPING=1" not in manager.seen
        daemon.signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert daemon.wait() == 0


def test_a_manager_that_is_gone_and_descriptors_for_another_process(tmp_path: Path) -> None:
    """Neither is a reason to fail. And a worker waits for its daemon no longer than it said."""
    extra = {
        "NOTIFY_SOCKET": str(tmp_path / "nobody"),
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
    }
    with running(extra=extra) as daemon:
        assert daemon.socket.is_socket()
        client = tierkv.connect(daemon.socket, timeout_s=1, reconnect_s=0.3)
        assert daemon.stop() == 0
        with client, pytest.raises(Unavailable):
            client.stat()


@pytest.mark.parametrize(
    ("loop", "names"), [("uvloop", ""), ("asyncio", "rpc"), ("uvloop", "other:rpc")]
)
def test_an_inherited_socket(tmp_path: Path, loop: str, names: str) -> None:
    """As systemd passes it: descriptors from 3 on, the daemon's pid, maybe names."""
    path = tmp_path / "inherited"
    count = max(1, len(names.split(":")))
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as other:
        ours.bind(str(path))
        ours.listen()
        given = [other.fileno()] * (count - 1) + [ours.fileno()]
        variables = {"LISTEN_FDS": str(count), "TIERKV_LOOP": loop}
        daemon = Daemon(
            {"server.socket": str(path)},
            extra=variables | ({"LISTEN_FDNAMES": names} if names else {}),
            launcher=[sys.executable, "-c", PASS_DESCRIPTORS, *map(str, given), "--"],
            pass_fds=sorted(set(given)),
        )
        daemon.socket = path
        with daemon:
            daemon.start()
            with daemon.connect() as client:
                store(client.namespace(SPEC), tokens(2, seed=900))
            assert daemon.stop() == 0, daemon.said()
            # It belongs to whoever passed it: who connects now may wait for a successor.
            assert path.is_socket()
            with socket.socket(socket.AF_UNIX) as waiting:
                waiting.connect(str(path))
            if names:
                return
            daemon.start()
            with daemon.connect() as client:
                assert client.namespace(SPEC).lookup(tokens(2, seed=900)).tokens == 2 * BLOCK


@pytest.mark.parametrize(
    ("loop", "number"), [("uvloop", signal.SIGTERM), ("asyncio", signal.SIGINT)]
)
def test_a_signal_drains(loop: str, number: int) -> None:
    """What was only in RAM is on disk afterwards, and a new daemon needs no log to find it."""
    settings = sized(64, 16, 128, **{"disk.write": "demote"})
    with running(settings, extra={"TIERKV_LOOP": loop}) as daemon, daemon.connect() as client:
        ns = client.namespace(SPEC)
        ids = tokens(40, seed=910)
        sequence = fill(ns, ids)
        assert daemon.status()["tiers"]["disk"]["blocks"] == 0
        daemon.signal(number)
        assert daemon.wait() == 0, daemon.said()
        assert not daemon.socket.exists()
        assert not daemon.metrics_socket.exists()
        shutil.rmtree(daemon.arenas)
        daemon.arenas.mkdir()
        daemon.start()
        status = daemon.status()
        assert status["recovery"]["records"] == 0
        assert status["recovery"]["tiers"]["disk"] == {"kept": 40, "dropped": 0}
        # A daemon that ends in good order ends its leases; the blocks stay.
        with pytest.raises(LeaseLost):
            sequence.reserve(1)
        with fill(ns, ids) as again:
            assert again.cached_from == (40 * BLOCK, 0, 0, 40)
            check(ns, again)


def test_a_drain_in_the_middle_of_writing_behind_ends_soon() -> None:
    """The disk's queue is at work when the signal comes; that must not hold up the end."""
    with running(sized(512, 16, 1024)) as daemon:
        for seed in range(2):
            with daemon.connect() as client:
                ns = client.namespace(SPEC)
                store(ns, tokens(80, seed=920 + seed))
                began = time.monotonic()
                assert daemon.stop() == 0, daemon.said()
                assert time.monotonic() - began < 15
            daemon.start()
            assert daemon.status()["recovery"]["tiers"]["disk"]["kept"] == 80 * (seed + 1)
        assert "without a last checkpoint" not in daemon.said()


def test_a_second_signal_ends_it_at_once(manager: Manager) -> None:
    spec = msgspec.structs.replace(SPEC, layers=128)  # blocks of 512 KiB: a drain takes a while
    settings = {
        "device.bytes": "160MiB",
        "host.bytes": "0",
        "disk.bytes": "256MiB",
        "disk.segment_bytes": "256MiB",
        "disk.write": "demote",
    }
    extra = {"NOTIFY_SOCKET": str(manager.path)}
    with running(settings, extra=extra) as daemon, daemon.connect() as client:
        ns = client.namespace(spec)
        ids = tokens(256, seed=930)
        store(ns, ids)
        daemon.signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert daemon.get("/readyz") == (503, "draining\n")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 1
        assert daemon.socket.exists()
        daemon.start()
        assert daemon.status()["recovery"]["records"] > 0
        with fill(ns, ids) as sequence:
            assert sequence.cached_tokens == len(ids)


def test_a_manager_that_does_not_read_holds_up_nothing(manager: Manager) -> None:
    """Its socket's queue is full; the daemon starts and stops all the same."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noisy, suppress(BlockingIOError):
        noisy.setblocking(False)
        while True:
            noisy.sendto(b"STATUS=noise", str(manager.path))
    with running(extra={"NOTIFY_SOCKET": str(manager.path)}) as daemon:
        assert daemon.stop() == 0


def test_workers_that_gave_up_while_it_stood_still_are_forgotten(
    daemon: Daemon, ns, bystander
) -> None:
    before = daemon.status()["connections"]
    daemon.signal(signal.SIGSTOP)
    with pytest.raises(Unavailable):
        tierkv.connect(daemon.socket, timeout_s=0.2)
    daemon.signal(signal.SIGCONT)
    with fill(ns, tokens(3, seed=940)) as sequence:
        check(ns, sequence)
    until(lambda: daemon.status()["connections"] == before)
