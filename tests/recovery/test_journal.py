"""Replies wait for the log; what fails takes the daemon down and lets no reply out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tierkv_wal import WalDead

from tierkv.core.ids import Tier
from tierkv.core.records import RECORD, Kind, Records, blank, push
from tierkv.core.state import PoolShape, State
from tierkv.errors import InvariantViolation, LimitExceeded
from tierkv.service.journal import Journal

pytestmark = pytest.mark.asyncio


class FakeWriter:
    """A log in memory. ``gate`` holds a sync back; ``fail_*`` make the next call of it fail."""

    append_records_max = 100

    def __init__(self) -> None:
        self.appended_lsn = self.written_lsn = self.durable_lsn = 0
        self.open_frame: list[Any] = []
        self.frames: list[list[int]] = []
        self.syncs = 0
        self.wrote = asyncio.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.fail_append = self.fail_write = self.fail_sync = False
        self.dead = False

    def _check(self, fail: bool) -> None:
        if self.dead:
            raise WalDead("dead")
        if fail:
            self.dead = True
            raise OSError(5, "Input/output error")

    def append(self, data: Any) -> int:
        self._check(self.fail_append)
        records = np.frombuffer(data, RECORD)
        self.open_frame += records["key"].tolist()
        self.appended_lsn += len(records)
        return self.appended_lsn

    def write(self) -> int:
        self._check(self.fail_write)
        if self.open_frame:
            self.frames.append(self.open_frame)
            self.wrote.set()
            self.open_frame = []
        self.written_lsn = self.appended_lsn
        return self.written_lsn

    def sync(self) -> int:
        written = self.written_lsn
        self.gate.wait()
        self._check(self.fail_sync)
        self.syncs += 1
        self.durable_lsn = written
        return written


class Bench:
    """A journal on a fake writer, and what became of it."""

    def __init__(self, durability: str, flush_s: float = 0.005) -> None:
        self.writer = FakeWriter()
        self.deaths: list[Exception] = []
        self.died = asyncio.Event()
        self.replies: list[str] = []
        self.state = State(dict.fromkeys(Tier, 64 * 100), lambda _tier, shape: shape.block_bytes)
        self.journal = Journal(
            self.state,
            self.writer,
            durability,
            flush_s,
            self._dead,
        )

    def _dead(self, error: Exception) -> None:
        self.deaths.append(error)
        self.died.set()

    def commit(self, lease: int) -> None:
        records = blank(1, Kind.LEASE_OPEN)
        records["key"] = lease
        self.journal.commit(records)

    def ask(self, name: str, lease: int | None = None, *, lasting: bool = True) -> None:
        if lease is not None:
            self.commit(lease)
        self.journal.release(lambda: self.replies.append(name), lasting=lasting)

    def with_blocks(self, count: int) -> Records:
        """Blocks in the state; returns the records that drop them all."""
        self.state.add_namespace(0, bytes(16), PoolShape(64, 4))
        allocated = blank(count, Kind.ALLOC)
        allocated["key"] = allocated["loc"] = np.arange(count)
        allocated["id"] = np.arange(count) + 1
        self.state.apply(allocated)
        dropped = allocated.copy()
        dropped["type"] = Kind.DROP
        return dropped


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


async def turn() -> None:
    await asyncio.sleep(0)


async def test_kill_one_turn_is_one_frame_and_replies_follow_it_in_order(
    bench: Callable[..., Bench],
) -> None:
    kill = bench("kill")
    for lease in range(1, 5):
        kill.ask(f"r{lease}", lease)
    assert kill.writer.frames == []
    assert kill.replies == []
    await turn()
    assert kill.writer.frames == [[1, 2, 3, 4]]
    assert kill.replies == ["r1", "r2", "r3", "r4"]
    kill.ask("read")  # nothing to wait for
    assert kill.replies[-1] == "read"
    kill.journal.close()


async def test_kill_a_read_waits_for_what_others_wrote_in_its_turn(
    bench: Callable[..., Bench],
) -> None:
    kill = bench("kill")
    kill.commit(1)
    kill.ask("read")
    assert kill.replies == []
    await turn()
    assert kill.replies == ["read"]
    kill.journal.close()


async def test_kill_settle_writes_at_once_and_syncs_nothing(bench: Callable[..., Bench]) -> None:
    kill = bench("kill")
    kill.ask("r", 1)
    kill.journal.commit(kill.with_blocks(1))
    await kill.journal.settle()
    assert kill.writer.frames == [[1, 0]]
    assert kill.writer.syncs == 0
    await turn()
    assert kill.replies == ["r"]
    kill.journal.close()


async def test_power_replies_wait_for_the_sync_and_the_next_turn_gathers(
    bench: Callable[..., Bench],
) -> None:
    power = bench("power")
    power.writer.gate.clear()
    power.ask("r1", 1)
    await turn()
    assert power.writer.frames == [[1]]
    power.ask("r2", 2)
    power.ask("r3", 3)
    power.ask("read")
    await turn()
    assert power.writer.frames == [[1], [2, 3]]
    power.ask("late read")
    assert power.replies == []
    power.journal.commit(power.with_blocks(1))
    settled = asyncio.ensure_future(power.journal.settle())
    await turn()
    done_early = settled.done()
    power.writer.gate.set()
    await settled
    assert not done_early
    assert power.replies == ["r1", "r2", "r3", "read", "late read"]
    assert power.writer.syncs == 2
    assert power.writer.durable_lsn == 4
    power.journal.close()


async def test_power_a_reply_about_memory_waits_for_the_write_and_wants_no_sync(
    bench: Callable[..., Bench],
) -> None:
    power = bench("power")
    power.ask("begin", 1, lasting=False)
    assert power.replies == []
    await turn()
    assert power.writer.frames == [[1]]
    assert power.replies == ["begin"]
    assert power.writer.syncs == 0
    power.writer.gate.clear()
    power.ask("seal", 2)
    await turn()
    power.ask("look", lasting=False)
    power.ask("begin again", 3, lasting=False)
    await turn()
    assert power.replies == ["begin", "look", "begin again"]
    sealed = asyncio.Event()
    power.journal.release(sealed.set)
    power.writer.gate.set()
    async with asyncio.timeout(5):
        await sealed.wait()
    assert power.replies[3:] == ["seal"]
    assert power.writer.durable_lsn == 3
    power.journal.close()


async def test_power_settle_without_any_reply_waiting_syncs_by_itself(
    bench: Callable[..., Bench],
) -> None:
    power = bench("power")
    power.journal.commit(power.with_blocks(1))
    await power.journal.settle()
    assert power.writer.durable_lsn == 1
    await power.journal.settle()
    assert power.writer.syncs == 1
    power.journal.close()


async def test_settling_waits_for_nothing_that_freed_no_slot(bench: Callable[..., Bench]) -> None:
    power = bench("power")
    power.journal.commit(power.with_blocks(1))
    await power.journal.settle()
    power.writer.gate.clear()
    power.ask("r", 1)
    await turn()
    settled = asyncio.ensure_future(power.journal.settle())
    await turn()
    done_early = settled.done()
    power.writer.gate.set()
    await settled
    assert done_early
    power.journal.close()


async def test_power_a_read_does_not_wait_for_ever_behind_records_without_a_reply(
    bench: Callable[..., Bench],
) -> None:
    """A worker has gone, its lease is closed; then another one only looks something up."""
    power = bench("power")
    power.commit(1)
    await turn()
    assert power.writer.frames == [[1]]
    out = asyncio.Event()
    power.journal.release(out.set)
    assert not out.is_set()
    async with asyncio.timeout(5):
        await out.wait()
    assert power.writer.durable_lsn == 1
    power.journal.close()


async def test_none_replies_at_once_and_writes_a_little_later(bench: Callable[..., Bench]) -> None:
    none = bench("none")
    none.ask("r1", 1)
    assert none.replies == ["r1"]
    await turn()
    assert none.writer.frames == []
    await none.writer.wrote.wait()
    assert none.writer.frames == [[1]]
    none.ask("r2", 2)
    none.journal.commit(none.with_blocks(1))
    await none.journal.settle()
    assert none.writer.frames == [[1], [2, 0]]
    assert none.writer.syncs == 0
    none.journal.close()


async def test_none_close_writes_what_is_left(bench: Callable[..., Bench]) -> None:
    none = bench("none", 60.0)
    none.commit(1)
    none.journal.close()
    assert none.writer.frames == [[1]]


@pytest.mark.parametrize("durability", ["kill", "power", "none"])
async def test_freed_slots_write_the_frame_before_their_entries_change(
    bench: Callable[..., Bench], durability: str
) -> None:
    some = bench(durability, 60.0)
    dropped = some.with_blocks(3)
    some.journal.flush()
    some.commit(1)
    some.journal.write_freed()
    assert some.writer.frames == []
    some.journal.commit(dropped)
    waits = durability != "none"
    some.ask("r1")
    some.journal.write_freed()
    assert some.writer.frames == [[1, 0, 1, 2]]
    assert some.replies == ([] if waits else ["r1"])
    some.commit(2)
    some.journal.write_freed()
    assert len(some.writer.frames) == 1
    async with asyncio.timeout(5):
        await some.journal.settle()
    await turn()
    assert some.replies == ["r1"]
    some.journal.close()


@pytest.mark.parametrize("durability", ["kill", "power", "none"])
@pytest.mark.parametrize("what", ["fail_append", "fail_write"])
async def test_a_failed_write_is_death_once_and_no_reply_goes_out(
    bench: Callable[..., Bench], durability: str, what: str
) -> None:
    some = bench(durability, 0.001)
    setattr(some.writer, what, True)
    some.commit(1)
    if durability != "none":
        some.ask("r1")
    await some.died.wait()
    some.ask("r2", 2)
    some.ask("read")
    await asyncio.sleep(0.003)
    assert [type(error) for error in some.deaths] == [OSError]
    assert some.replies == []
    with pytest.raises(WalDead):
        await some.journal.settle()
    with pytest.raises(WalDead):
        some.journal.flush()
    some.journal.close()


@pytest.mark.parametrize("durability", ["kill", "power", "none"])
async def test_settle_does_not_return_when_its_own_write_fails(
    bench: Callable[..., Bench], durability: str
) -> None:
    """The caller would overwrite slots whose owners the log still knows."""
    some = bench(durability, 60.0)
    some.journal.commit(some.with_blocks(1))
    some.writer.fail_write = True
    with pytest.raises(WalDead):
        await some.journal.settle()
    some.journal.close()


async def test_a_failed_sync_is_death_and_no_reply_goes_out(bench: Callable[..., Bench]) -> None:
    power = bench("power")
    power.writer.fail_sync = True
    power.ask("r1", 1)
    await power.died.wait()
    assert len(power.deaths) == 1
    power.ask("r2", 2)
    await asyncio.sleep(0.002)
    assert power.replies == []
    assert len(power.deaths) == 1
    power.journal.close()


async def test_records_that_the_state_refuses_are_death(bench: Callable[..., Bench]) -> None:
    """The state may have taken half of them, and the log none."""
    kill = bench("kill")
    kill.ask("r1", 1)
    closed = blank(2, Kind.LEASE_CLOSE)
    closed["key"] = [1, 7]
    with pytest.raises(InvariantViolation):
        kill.journal.commit(closed)
    kill.ask("r2")
    await turn()
    assert [type(error) for error in kill.deaths] == [InvariantViolation]
    assert kill.writer.frames == []
    assert kill.replies == []
    kill.journal.close()


async def test_records_too_many_for_a_frame_change_nothing(bench: Callable[..., Bench]) -> None:
    kill = bench("kill")
    kill.commit(1)
    opened = blank(1, Kind.SEQ_OPEN)
    opened["id"] = 1 << 32
    rows = np.arange(12 * 100, dtype=np.uint32)
    with pytest.raises(LimitExceeded, match="makes 101 log records, a log segment holds 100"):
        kill.journal.commit(np.concatenate([opened, push(1 << 32, rows)]))
    assert not kill.state.sequences
    assert kill.deaths == []
    await turn()
    assert kill.writer.frames == [[1]]
    kill.journal.close()


async def test_records_that_stand_each_for_itself_go_into_several_frames(
    bench: Callable[..., Bench],
) -> None:
    kill = bench("kill")
    kill.writer.append_records_max = 4
    dropped = kill.with_blocks(10)
    placed = dropped.copy()
    placed["type"], placed["tier"] = Kind.PLACE, Tier.DISK
    kill.journal.commit(placed)
    kill.journal.commit(dropped)
    assert kill.writer.appended_lsn == 20
    dropped["tier"] = Tier.DISK
    kill.journal.commit(dropped)
    assert not len(kill.state.live_rows())
    await turn()
    kill.journal.close()


@pytest.mark.parametrize("durability", ["kill", "none"])
async def test_a_closed_journal_does_not_touch_the_log_again(
    bench: Callable[..., Bench], durability: str
) -> None:
    closed = bench(durability)
    closed.commit(1)
    closed.journal.close()
    assert closed.writer.frames == [[1]]
    closed.writer.dead = True  # as a closed one answers
    await asyncio.sleep(0.02)
    assert closed.deaths == []
