"""Checkpoints while work goes on, and those that fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from recovery_harness import SIZE, Daemon, Machine, kept, picture
from tierkv_wal import WalDead

from tierkv.core.ids import Tier
from tierkv.errors import TierFailed
from tierkv.service.checkpoint import DIRTY_ROWS_MAX, Checkpointer
from tierkv.service.journal import Journal
from tierkv.service.machine import RealMachine
from tierkv.service.progress import tell_nobody
from tierkv.service.recovery import load
from tierkv.service.site import Site

pytestmark = pytest.mark.asyncio

A = list(range(100, 100 + 3 * SIZE))
B = list(range(200, 200 + 3 * SIZE))
MiB = 1 << 20


class Bench:
    """A daemon of the harness with the service's own journal and checkpointer."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.deaths: list[Exception] = []
        self.journal = Journal(daemon.state, daemon.writer, "kill", 0.01, self.deaths.append)
        daemon.placement.commit = self.journal.commit
        recovered = daemon.recovered
        self.checkpointer = Checkpointer(
            daemon.state,
            recovered.specs,
            self.journal,
            recovered.writer,
            recovered.disk,
            recovered.index,
            recovered.checkpoint_lsn,
        )

    def loaded(self) -> dict[str, Any]:
        """The state that a recovery would read now, before it undoes anything."""
        daemon = self.daemon
        stored = daemon.directory.read_format()
        assert stored is not None
        site = Site(daemon.config, daemon.directory, stored, False, RealMachine(), tell_nobody)
        state = load(site, daemon.recovered.index).state
        return kept(picture(state))

    def now(self) -> dict[str, Any]:
        return kept(picture(self.daemon.state))


@pytest_asyncio.fixture
async def bench(machine: Machine) -> AsyncIterator[Bench]:
    bench = Bench(machine.start(device=8, host=2, disk=8))
    yield bench
    bench.checkpointer.close()
    bench.journal.close()


def _segments(bench: Bench) -> list[str]:
    return sorted(path.name for path in bench.daemon.directory.wal.glob("*.wal"))


def _lease(bench: Bench) -> int:
    lease = bench.daemon.hello()
    bench.daemon.namespace()
    return lease


async def test_a_checkpoint_holds_the_state_and_frees_the_log(bench: Bench) -> None:
    lease = _lease(bench)
    for local in range(1, 60):
        bench.daemon.store(lease, local, A)
        bench.daemon.planner.release(lease, [local])
    bench.daemon.store(lease, 1, A)
    assert len(_segments(bench)) > 1
    await bench.checkpointer.run()
    assert len(_segments(bench)) == 1
    assert bench.checkpointer.last_lsn == bench.daemon.writer.durable_lsn
    assert bench.loaded() == bench.now()
    meta = bench.daemon.recovered.index.load().meta
    assert meta["checkpoint_lsn"] == bench.daemon.writer.written_lsn


async def test_changes_while_the_thread_writes_are_in_the_next_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _lease(bench)
    bench.daemon.store(lease, 1, A)
    gate, entered = threading.Event(), threading.Event()
    commit = bench.daemon.recovered.index.commit

    def held_back(content: Any) -> None:
        entered.set()
        gate.wait()
        commit(content)

    monkeypatch.setattr(bench.daemon.recovered.index, "commit", held_back)
    running = asyncio.ensure_future(bench.checkpointer.run())
    await asyncio.to_thread(entered.wait)
    bench.daemon.store(lease, 2, B)
    bench.daemon.planner.release(lease, [1])
    bench.journal.flush()
    during = bench.now()
    gate.set()
    await running
    assert bench.loaded() == during
    await bench.checkpointer.run()
    assert bench.loaded() == bench.now() == during


@pytest.mark.parametrize("error", [TierFailed("no space"), RuntimeError("a bug")])
async def test_a_failed_one_leaves_all_to_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lease = _lease(bench)
    await bench.checkpointer.run()
    bench.daemon.store(lease, 1, A)
    bench.daemon.store(lease, 2, B)
    bench.daemon.planner.release(lease, [2])
    before = _segments(bench)
    with monkeypatch.context() as patch:
        patch.setattr(bench.daemon.recovered.index, "commit", _failing(error))
        with pytest.raises(type(error)):
            await bench.checkpointer.run()
    assert _segments(bench) == before
    assert bench.loaded() == bench.now()
    rows = bench.daemon.state.live_rows()
    bench.daemon.placement._drop(Tier.DEVICE, rows[bench.daemon.state.blocks.refs[rows] == 0], "x")
    await bench.checkpointer.run()
    assert bench.loaded() == bench.now()


async def test_a_cancelled_one_that_fails_unseen_leaves_all_to_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the daemon's life its ticks are cancelled, then comes the last checkpoint."""
    lease = _lease(bench)
    bench.daemon.store(lease, 1, A)
    gate, entered = threading.Event(), threading.Event()

    def fails_late(_content: Any) -> None:
        entered.set()
        gate.wait()
        raise TierFailed("no space")

    with monkeypatch.context() as patch:
        patch.setattr(bench.daemon.recovered.index, "commit", fails_late)
        running = asyncio.ensure_future(bench.checkpointer.run())
        await asyncio.to_thread(entered.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gate.set()
    await bench.checkpointer.run(last=True)
    assert bench.loaded() == bench.now()


async def test_a_failed_one_and_then_a_crash(
    machine: Machine, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = _lease(bench)
    bench.daemon.store(lease, 1, A)
    with monkeypatch.context() as patch:
        patch.setattr(bench.daemon.recovered.index, "commit", _failing(TierFailed("no space")))
        with pytest.raises(TierFailed):
            await bench.checkpointer.run()
    expected = bench.now()
    daemon = machine.start()
    assert kept(picture(daemon.state)) == expected


async def test_segments_go_only_behind_the_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    recovered = bench.daemon.recovered
    assert recovered.disk is not None
    for owner, name in (
        (recovered.writer, "sync"),
        (recovered.disk, "sync"),
        (recovered.index, "commit"),
        (recovered.writer, "forget"),
    ):
        monkeypatch.setattr(owner, name, _noting(calls, owner, name))
    _lease(bench)
    await bench.checkpointer.run()
    assert calls == ["WalWriter.sync", "DiskTier.sync", "Index.commit", "WalWriter.forget"]


async def test_a_log_that_cannot_be_synced_is_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease(bench)
    monkeypatch.setattr(bench.daemon.writer, "sync", _failing(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        await bench.checkpointer.run()
    assert len(bench.deaths) == 1
    replies: list[str] = []
    bench.journal.release(lambda: replies.append("no"))
    assert replies == []
    with pytest.raises(WalDead):
        await bench.checkpointer.run()


async def test_a_disk_tier_that_cannot_be_synced_does_not_let_the_log_grow_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copies are verified when they are read: keeping the log would bring none back."""
    lease = _lease(bench)
    bench.daemon.store(lease, 1, A)
    monkeypatch.setattr(bench.daemon.recovered.disk, "sync", _failing(TierFailed("rotten")))
    await bench.checkpointer.run()
    assert "may not survive power loss: rotten" in caplog.text
    assert bench.loaded() == bench.now()
    assert bench.checkpointer.last_lsn == bench.daemon.writer.written_lsn


async def test_a_segment_that_cannot_be_removed_is_no_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _lease(bench)
    monkeypatch.setattr(bench.daemon.writer, "forget", _failing(OSError(30, "Read-only")))
    await bench.checkpointer.run()
    assert "cannot remove old log segments" in caplog.text
    assert bench.checkpointer.last_lsn == bench.daemon.writer.written_lsn


async def test_when_one_is_due(bench: Bench) -> None:
    checkpointer = bench.checkpointer
    await checkpointer.run()
    assert not checkpointer.due(0, 0.0)  # nothing happened
    lease = _lease(bench)
    bench.journal.flush()
    assert not checkpointer.due(MiB, 3600.0)
    assert checkpointer.due(MiB, 0.0)
    assert checkpointer.due(64, 3600.0)
    await checkpointer.run()
    bench.daemon.store(lease, 1, A)
    state = bench.daemon.state
    state.touch_rows(np.zeros(DIRTY_ROWS_MAX, np.int64) + int(state.live_rows()[0]))
    assert checkpointer.due(MiB, 3600.0)
    await checkpointer.run()
    assert not checkpointer.due(0, 0.0)


async def test_only_the_last_one_says_that_no_reply_is_ahead_of_the_log(machine: Machine) -> None:
    bench = Bench(machine.start(durability="none"))
    index = bench.daemon.recovered.index
    assert index.load().meta["replies_ahead"] == 1
    await bench.checkpointer.run()
    assert index.load().meta["replies_ahead"] == 1
    await bench.checkpointer.run(last=True)
    assert index.load().meta["replies_ahead"] == 0
    bench.checkpointer.close()
    bench.journal.close()


def _failing(error: Exception) -> Callable[..., Any]:
    def fail(*_args: object) -> Any:
        raise error

    return fail


def _noting(calls: list[str], owner: object, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(f"{type(owner).__name__}.{name}")
        return original(*args)

    return call
