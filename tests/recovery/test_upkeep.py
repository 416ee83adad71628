"""Pins and deletions of operators: one after the other, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest
import pytest_asyncio
from recovery_harness import SIZE, Machine, chain_of

from tierkv.core.counters import Counters
from tierkv.core.lineage import Lineage
from tierkv.rpc import messages as m
from tierkv.service import upkeep
from tierkv.service.assembly import Hooks, Parts, assemble
from tierkv.service.inspection import Inspection
from tierkv.service.selection import Selection
from tierkv.service.survey import Surveyor

pytestmark = pytest.mark.asyncio

CHAINS = [list(range(first, first + 2 * SIZE)) for first in range(100, 900, 100)]
ALL = m.Selector(namespace=0)


class Operated:
    """What an operator of a daemon has to do with; two blocks of each chain are cached."""

    def __init__(self, machine: Machine) -> None:
        daemon = machine.start(device=40, host=0, disk=0)
        daemon.namespace()
        lease = daemon.hello()
        for number, tokens in enumerate(CHAINS, 1):
            daemon.store(lease, number, tokens)
        daemon.planner.release(lease, list(range(1, len(CHAINS) + 1)))
        daemon.write()
        self.parts: Parts = assemble(
            daemon.config, daemon.recovered, Counters(), hooks=Mock(Hooks), deaths=Mock()
        )
        self.selection = Selection(self.parts, Surveyor(self.parts.planner.state))
        self.upkeep = upkeep.Upkeep(self.parts, self.selection)

    def cached(self) -> int:
        chains = [chain_of(tokens) for tokens in CHAINS]
        return sum(sum(self.parts.planner.lookup(0, one.hi, one.lo)) for one in chains)


def first_of(tokens: list[int]) -> m.Selector:
    chain = chain_of(tokens)
    return m.Selector(hash=f"{int(chain.hi[0]):016x}{int(chain.lo[0]):016x}")


@pytest_asyncio.fixture
async def operated(machine: Machine) -> AsyncIterator[Operated]:
    operated = Operated(machine)
    yield operated
    await operated.parts.close()


async def test_a_large_deletion_lets_others_in(operated, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "PART_BLOCKS", 1)
    deleting = asyncio.ensure_future(operated.upkeep.delete(m.Delete(ALL, really=True)))
    seen = set()
    while not deleting.done():
        seen.add(operated.cached())
        await asyncio.sleep(0)
    assert (await deleting).blocks == 2 * len(CHAINS)
    assert len(seen) > len(CHAINS)


async def test_deletions_at_the_same_time_are_all_written_down(operated) -> None:
    requests = [m.Delete(first_of(tokens), really=True) for tokens in CHAINS]
    await asyncio.gather(*(operated.upkeep.delete(one) for one in requests))
    names = [bytes.fromhex(one.selector.hash) for one in requests]
    assert [one.name for one in operated.parts.deleted.read()] == names
    assert operated.cached() == 0


async def test_what_is_deleted_is_not_pinned_meanwhile(operated, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "PART_BLOCKS", 1)
    deleting = operated.upkeep.delete(m.Delete(ALL, really=True))
    done, pinned = await asyncio.gather(deleting, operated.upkeep.pin(m.Pin(ALL)))
    assert (done.blocks, done.in_use, pinned.pins) == (2 * len(CHAINS), 0, 0)


async def test_threads_look_at_whole_pictures(operated, monkeypatch) -> None:
    """On the loop it would hold all that others ask, for as long as there are blocks."""
    looked: set[tuple[str, bool]] = set()

    def watched(name: str, work):
        def watching(*arguments):
            looked.add((name, threading.current_thread() is threading.main_thread()))
            return work(*arguments)

        return watching

    for name in ("chain", "named", "descendants"):
        monkeypatch.setattr(Lineage, name, watched(name, getattr(Lineage, name)))
    for name in ("depth", "begins", "is_leaf"):
        work = Lineage.__dict__[name].func
        monkeypatch.setattr(Lineage, name, property(watched(name, work)))
    inspection = Inspection(operated.parts, operated.selection)
    one = first_of(CHAINS[0])
    assert (await inspection.inspect(m.Inspect("block", hash=one.hash))).document["depth"] == 0
    assert len((await inspection.listed(m.List("chains", ALL))).items) == len(CHAINS)
    assert len((await inspection.page(m.Contents(one))).tokens) == 2
    assert (await operated.upkeep.pin(m.Pin(one))).blocks == 1
    assert (await operated.upkeep.pin(m.Pin(one, undo=True))).blocks == 0
    assert (await operated.upkeep.delete(m.Delete(one, really=True))).blocks == 2
    assert {name for name, _ in looked} == {
        "begins", "chain", "depth", "descendants", "is_leaf", "named",
    }  # fmt: skip
    assert not any(on_loop for _, on_loop in looked)
