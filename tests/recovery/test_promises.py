"""What a reply promises holds when it goes out: between the core, the log and the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from recovery_harness import SIZE, Daemon, Machine, chain_of, content
from tierkv_wal import WalReader
from tierkv_wal.storage import RealStorage

from tests.tiers.sums import checksum
from tierkv.core.effects import Move
from tierkv.core.ids import Tier
from tierkv.core.planner import RECORDS_PER_BLOCK_MAX, Limits
from tierkv.core.records import Kind
from tierkv.core.structures import Structures
from tierkv.errors import InvariantViolation, LimitExceeded, TierFailed
from tierkv.service.engine import Engine
from tierkv.service.journal import Journal
from tierkv.tiers.mover import Mover
from tierkv.tiers.tables import ArenaTables

pytestmark = pytest.mark.asyncio

A = list(range(100, 100 + 3 * SIZE))
B = list(range(200, 200 + 3 * SIZE))


class Service:
    """A daemon of the harness with the service's own journal, mover and engine."""

    def __init__(self, daemon: Daemon, durability: str) -> None:
        self.daemon = daemon
        self.deaths: list[BaseException] = []
        self.journal = Journal(daemon.state, daemon.writer, durability, 0.01, self.deaths.append)
        recovered = daemon.recovered
        daemon.placement.commit = self.journal.commit
        daemon.placement.tables = ArenaTables(recovered.arenas, self.journal.write_freed)
        self.mover = Mover(recovered.arenas, recovered.disk, durable_writes=durability == "power")
        self.engine = Engine(
            daemon.planner,
            self.journal,
            self.mover,
            write_through=True,
            durable_seal=durability == "power",
            queue_blocks=100,
        )
        self.engine.on_broken = self.deaths.append
        self.lease = daemon.hello()
        self.namespace = daemon.namespace()

    async def replied(self, flow: Any) -> Any:
        """The result of a flow when its reply goes out."""
        result = await self.engine.run(flow)
        out = asyncio.Event()
        self.journal.release(out.set)
        await out.wait()
        return result

    async def begin(self, local: int, tokens: list[int]) -> None:
        """A sequence whose blocks have their bytes but no names."""
        planner = self.daemon.planner
        await self.replied(planner.acquire(self.lease, self.namespace, local, chain_of([])))
        await self.replied(planner.reserve(self.lease, local, 0, len(tokens)))
        for block, slot in enumerate(self.daemon.slots(self.lease, local)):
            self.daemon.payload(slot)[:] = content(tokens, block)

    def sealing(self, local: int, tokens: list[int]) -> Any:
        sums = [
            checksum(self.daemon.payload(slot)) for slot in self.daemon.slots(self.lease, local)
        ]
        pairs = np.array(sums, np.uint64).reshape(-1, 2)
        chain = chain_of(tokens)
        flow = self.daemon.planner.seal(
            self.lease, local, 0, chain, pairs[:, 0].copy(), pairs[:, 1].copy()
        )
        return self.engine.sealing(self.daemon.planner.sequence(self.lease, local), flow)

    def on_disk(self, local: int) -> int:
        rows = self.daemon.planner.sequence(self.lease, local).rows
        return int(self.daemon.state.blocks.has_copy(rows, Tier.DISK).sum())

    def logged(self) -> list[int]:
        """Types of all records that are written now."""
        directory = self.daemon.directory
        stored = directory.read_format()
        assert stored is not None
        reader = WalReader(RealStorage(), str(directory.wal), stored.store_uuid, None)
        return [int(kind) for frame in reader.frames() for kind in frame.records[:, 0]]

    async def close(self) -> None:
        await self.engine.close()
        self.journal.close()


@pytest_asyncio.fixture
async def service(machine: Machine) -> AsyncIterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(durability: str = "kill", **settings: Any) -> Service:
        made.append(Service(machine.start(durability=durability, **settings), durability))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_power_a_seal_is_answered_when_its_blocks_are_on_disk(
    service: Callable[..., Service],
) -> None:
    power = service("power")
    await power.begin(1, A)
    await power.replied(power.sealing(1, A))
    assert power.on_disk(1) == 3
    assert power.logged().count(Kind.PLACE) == 3
    assert power.daemon.writer.durable_lsn == power.daemon.writer.appended_lsn


async def test_power_the_payload_is_synced_before_the_log_speaks_of_it(
    service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    power = service("power")
    calls: list[str] = []
    disk, writer = power.daemon.recovered.disk, power.daemon.writer
    for owner, name in ((disk, "write"), (disk, "sync"), (writer, "append"), (writer, "sync")):
        monkeypatch.setattr(
            owner, name, _noting(calls, f"{type(owner).__name__}.{name}", owner, name)
        )
    await power.begin(1, A)
    calls.clear()
    await power.replied(power.sealing(1, A))
    expected = ["DiskTier.write", "DiskTier.sync", "WalWriter.append", "WalWriter.sync"]
    assert calls[calls.index("DiskTier.write") :] == expected
    # The seal itself is synced along: it frees no slot that the write could harm.
    assert calls[: calls.index("DiskTier.write")] == ["WalWriter.append"]


async def test_power_a_seal_asked_again_promises_no_less(service: Callable[..., Service]) -> None:
    """The disk refuses; the worker asks again. Or the daemon dies in between, and it asks again."""
    power = service("power")
    await power.begin(1, A)
    write = power.mover._write
    power.mover._write = _failing(TierFailed("no disk"))
    with pytest.raises(TierFailed, match="sealed but the disk tier did not take them"):
        await power.replied(power.sealing(1, A))
    with pytest.raises(TierFailed):
        await power.replied(power.sealing(1, A))
    power.mover._write = write
    power.daemon.placement.disk_paused = False
    await power.replied(power.sealing(1, A))
    assert power.on_disk(1) == 3


async def test_power_a_seal_that_meets_cached_blocks_promises_no_less(
    service: Callable[..., Service],
) -> None:
    """The blocks were sealed by somebody whose copies the disk refused."""
    power = service("power")
    await power.begin(1, A)
    write = power.mover._write
    power.mover._write = _failing(TierFailed("no disk"))
    with pytest.raises(TierFailed):
        await power.replied(power.sealing(1, A))
    power.mover._write = write
    power.daemon.placement.disk_paused = False
    await power.begin(2, A)
    await power.replied(power.sealing(2, A))
    assert power.daemon.counters.deduplicated_blocks == 3
    assert power.on_disk(2) == 3


@pytest.mark.parametrize("durability", ["kill", "power", "none"])
async def test_a_slot_is_overwritten_only_when_its_drop_is_as_safe_as_a_reply(
    service: Callable[..., Service], durability: str
) -> None:
    """Blocks go down in a chain of moves; before each, the log is asked what it has."""
    some = service(durability, device=3, host=3, disk=9)
    seen: list[tuple[int, int]] = []
    perform = some.mover.perform

    def noting(effect: Any) -> Any:
        if isinstance(effect, Move):
            writer = some.daemon.writer
            safe = writer.durable_lsn if durability == "power" else writer.written_lsn
            seen.append((safe, appended[0]))
        return perform(effect)

    appended = [0]
    commit = some.journal.commit

    def counting(records: Any, *, applied: bool = False) -> None:
        commit(records, applied=applied)
        if (records["type"] == Kind.DROP).any():
            appended[0] = some.daemon.writer.appended_lsn

    some.mover.perform = noting
    some.daemon.placement.commit = counting
    for local, tokens in enumerate((A, B, [t + 1000 for t in A]), 1):
        await some.begin(local, tokens)
        await some.replied(some.sealing(local, tokens))
        some.daemon.planner.suspend(some.lease, local)
    await some.replied(some.daemon.planner.resume(some.lease, 1))
    for block, slot in enumerate(some.daemon.slots(some.lease, 1)):
        assert np.array_equal(some.daemon.payload(slot), content(A, block))
    assert len(seen) >= 4
    assert any(dropped for _, dropped in seen)
    assert all(safe >= dropped for safe, dropped in seen)


async def test_one_request_never_makes_more_records_than_a_frame_holds(
    service: Callable[..., Service],
) -> None:
    """The log segments of the harness are small; the daemon limits requests accordingly."""
    some = service("kill", device=300, host=0, disk=300)
    most = some.daemon.writer.append_records_max // RECORDS_PER_BLOCK_MAX
    some.daemon.planner.limits = Limits(100, most)
    tokens = list(range(5000, 5000 + most * SIZE))
    await some.begin(1, tokens)
    await some.replied(some.sealing(1, tokens))
    with pytest.raises(LimitExceeded, match="blocks_per_request_max"):
        await some.engine.run(some.daemon.planner.reserve(some.lease, 1, 0, (most + 1) * SIZE))
    rows = some.daemon.planner.sequence(some.lease, 1).rows
    await some.engine.run(some.daemon.placement.clean_down(rows, some.daemon.state.blocks.id[rows]))
    # The same chain again, while its blocks are only on disk: three records for each.
    some.daemon.planner.release(some.lease, [1])
    some.daemon.placement._drop(Tier.DEVICE, rows, "capacity")
    await some.begin(2, tokens)
    await some.replied(some.sealing(2, tokens))
    assert some.daemon.counters.deduplicated_blocks == most
    assert not some.deaths


async def test_more_than_a_frame_holds_is_refused_before_anything_changes(
    service: Callable[..., Service],
) -> None:
    some = service("kill", device=300, host=0, disk=0)
    some.daemon.state.structures = Structures()  # a shortcut asks the log when it is done
    await some.begin(1, A)
    planner = some.daemon.planner
    before, next_block = some.daemon.slots(some.lease, 1), some.daemon.state.next_block
    with pytest.raises(LimitExceeded, match=r"wal\.segment_bytes"):
        await some.engine.run(planner.reserve(some.lease, 1, 0, 280 * SIZE))
    assert some.daemon.slots(some.lease, 1) == before
    assert some.daemon.state.next_block == next_block
    assert not some.deaths
    await some.replied(planner.reserve(some.lease, 1, 0, 100 * SIZE))


async def test_the_daemon_ends_if_what_was_done_is_more_than_a_frame_holds(
    service: Callable[..., Service],
) -> None:
    """It never is, for requests are limited; but the state would not be what the log says."""
    some = service("kill", device=300, host=0, disk=0)
    await some.begin(1, A)
    with pytest.raises(LimitExceeded, match=r"wal\.segment_bytes"):
        await some.engine.run(some.daemon.planner.reserve(some.lease, 1, 0, 280 * SIZE))
    assert [type(death) for death in some.deaths] == [LimitExceeded]


async def test_a_bug_in_a_request_is_the_daemons_end_wherever_it_strikes(
    service: Callable[..., Service],
) -> None:
    """Not only in a request that had to wait: half a change may have been made."""
    some = service("kill")

    def broken(error: Exception, waits: bool) -> Any:
        if waits:
            yield from some.daemon.placement.copy(
                Tier.DEVICE, Tier.HOST, np.zeros(0, np.int64), np.zeros(0, np.uint64)
            )
        raise error

    for error in (InvariantViolation("impossible"), IndexError("a bug")):
        with pytest.raises(type(error)):
            some.engine.start(broken(error, False), lambda _result: None)
    assert [type(error) for error in some.deaths] == [InvariantViolation, IndexError]


def _failing(error: Exception) -> Callable[..., Any]:
    def fail(*_args: object) -> Any:
        raise error

    return fail


def _noting(calls: list[str], label: str, owner: object, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        calls.append(label)
        return original(*args, **named)

    return call
