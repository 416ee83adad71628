"""How metadata grows with the cached blocks: memory, cost of each verb, and the longest call.

    python -m benchmarks.scale 10k 1M 16M

Each size runs in a process of its own: a state is filled with so many disk blocks as a recovery
does it; then requests look up, extend and let go of chains, and every new block pushes an old one
out. Nothing is written, so the figures are those of the metadata alone.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tierkv.core.blocks import INDEXED, SEALED, VALUE
from tierkv.core.counters import Counters
from tierkv.core.effects import Headers, Move, Moved, ReadHeaders
from tierkv.core.ids import I64, NO_SLOT, U32, U64, Tier
from tierkv.core.inline import run_inline
from tierkv.core.matching import Chain
from tierkv.core.placement import Placement
from tierkv.core.planner import Limits, Planner
from tierkv.core.slot_tables import BlockEntries
from tierkv.core.state import PoolShape, State
from tierkv.native.loops import loops
from tierkv.service.runtime import take_memory
from tierkv.service.snapshot import restore
from tierkv.tiers.index import BlockRows, IndexContents

CHAIN = 8192
SHAPE = PoolShape(65536, 16)
DEVICE_BLOCKS = 4 * CHAIN
STEP = 256
"""Blocks of a request that extends a sequence."""

PARTS = 4
"""Such requests that a sequence sees."""

AHEAD_EVERY = 16
"""Sequences after which the memory for the next ones is taken. The daemon does it on a thread."""

ROUNDS = 30
MILLION = 1_000_000
SIZES = {"10k": 10_000, "100k": 100_000, "1M": MILLION, "10M": 10 * MILLION, "16M": 16 * MILLION}
_NAMESPACE = 0
_RANDOM = 7


class Tables:
    """Slot tables that are never asked for more than they were told."""

    def tokens(self, tier: Tier, pool: int, slots: I64) -> U32:
        return np.zeros((len(slots), SHAPE.block_tokens), np.uint32)

    def extras(self, tier: Tier, pool: int, slots: I64) -> U64:
        return np.zeros(len(slots), np.uint64)

    def fill(self, tier: Tier, pool: int, slots: I64, entries: BlockEntries) -> None:
        pass

    def open(self, tier: Tier, pool: int, slots: I64, ids: U64) -> None:
        pass

    def punch(self, tier: Tier, pool: int, slots: I64) -> None:
        pass


def perform(effect: Any) -> Any:
    """All moves succeed."""
    if isinstance(effect, Move):
        sums = np.zeros(len(effect.ids), np.uint64)
        return Moved(np.ones(len(effect.ids), np.bool_), sums, sums)
    assert isinstance(effect, ReadHeaders)
    count = len(effect.ids)
    tokens = np.zeros((count, SHAPE.block_tokens), np.uint32)
    return Headers(np.ones(count, np.bool_), tokens, np.zeros(count, np.uint64))


def checkpoint(blocks: int) -> tuple[IndexContents, BlockRows]:
    """An index of that many disk blocks, in chains of 8192, rows as they come."""
    random = np.random.default_rng(_RANDOM)
    values = np.zeros(blocks, VALUE)
    values["id"] = np.arange(1, blocks + 1)
    values["parent"] = np.arange(blocks)
    values["parent"][::CHAIN] = 0
    for name in ("hash_hi", "hash_lo", "sum_hi", "sum_lo"):
        values[name] = random.integers(0, 2**64, blocks, dtype=np.uint64)
    values["flags"] = SEALED | INDEXED
    values["slot_device"] = values["slot_host"] = NO_SLOT
    values["slot_disk"] = np.arange(blocks)
    namespace = bytes(16) + np.array([0], "<u4").tobytes()
    namespace += np.array([SHAPE.block_bytes], "<u8").tobytes()
    namespace += np.array([SHAPE.block_tokens], "<u4").tobytes()
    meta: dict[str, int | bytes] = {"next_block": blocks + 1}
    contents = IndexContents({}, {}, {_NAMESPACE: namespace}, meta)
    return contents, BlockRows(np.arange(blocks, dtype=np.uint32), values)


class Store:
    """A state of ``blocks`` disk blocks, full, and what serves requests on it."""

    def __init__(self, blocks: int) -> None:
        before = rss_bytes()
        sizes = {Tier.DEVICE: 65536, Tier.HOST: 65536, Tier.DISK: 69632}
        budgets = {
            Tier.DEVICE: DEVICE_BLOCKS * sizes[Tier.DEVICE],
            Tier.HOST: 0,
            Tier.DISK: blocks * sizes[Tier.DISK],
        }
        self.state = State(budgets, lambda tier, _shape: sizes[tier], loops().structures())
        contents, found = checkpoint(blocks)
        started = time.perf_counter()
        restore(self.state, contents, [found])
        self.state.reindex()
        self.state.take_changes()
        self.restored_s = time.perf_counter() - started
        self.chain_hi, self.chain_lo = (
            found.values["hash_hi"].copy(),
            found.values["hash_lo"].copy(),
        )
        del found
        policies = {tier: self.state.structures.lru(self.state.rows_room) for tier in Tier}
        placement = Placement(self.state, Tables(), policies, self.state.commit, Counters())
        started = time.perf_counter()
        placement.list_all()
        self.listed_s = time.perf_counter() - started
        self.planner = Planner(self.state, placement, Limits())
        self.lease = self.planner.open_lease(bytes(16), os.getpid(), 0, 0).id
        gc.collect()
        gc.freeze()
        chains = self.chain_hi.nbytes + self.chain_lo.nbytes
        self.bytes_per_block = (rss_bytes() - before - chains) / blocks


class Calls:
    """How long calls of each name took, seconds of processor time: others share the machine."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.thread_time()
        result = call(*arguments)
        self.times.setdefault(name, []).append(time.thread_time() - started)
        return result


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def chain_of(hi: U64, lo: U64) -> Chain:
    tokens = np.zeros((len(hi), SHAPE.block_tokens), np.uint32)
    return Chain(hi, lo, tokens, np.zeros(len(hi), np.uint64))


def measure(blocks: int, churn_calls: int) -> dict[str, Any]:
    """All figures of one size."""
    store = Store(blocks)
    calls = Calls()
    random = np.random.default_rng(1)
    chains = max(1, blocks // CHAIN)
    for _ in range(ROUNDS):
        at = int(random.integers(chains)) * CHAIN
        part = slice(at, at + CHAIN)
        hi, lo = store.chain_hi[part], store.chain_lo[part]
        found = calls.time("lookup", store.planner.lookup, _NAMESPACE, hi, lo)
        if sum(found) != len(hi):
            raise RuntimeError(f"{sum(found)} of {len(hi)} blocks were found")
    collected = time.perf_counter()
    gc.collect()
    collected = time.perf_counter() - collected
    churn(store, calls, churn_calls)
    per_block = {
        "lookup": min(CHAIN, blocks),
        "reserve": STEP,
        "seal": STEP,
        "release": PARTS * STEP,
    }
    return {
        "blocks": blocks,
        "bytes_per_block": round(store.bytes_per_block, 1),
        "restore_s": round(store.restored_s, 3),
        "list_s": round(store.listed_s, 3),
        "full_gc_ms": round(1e3 * collected, 2),
        "ns_per_block": {
            name: round(1e9 * float(np.median(times)) / per_block[name])
            for name, times in calls.times.items()
        },
        "worst_ms": {name: round(1e3 * max(times), 2) for name, times in calls.times.items()},
        "p999_ms": {
            name: round(1e3 * float(np.quantile(times, 0.999)), 2)
            for name, times in calls.times.items()
        },
    }


def churn(store: Store, calls: Calls, count: int) -> None:
    """Sequences of 1024 new blocks, one after the other; what is old leaves for them."""
    planner, lease = store.planner, store.lease
    random = np.random.default_rng(2)
    tokens = SHAPE.block_tokens
    for local in range(1, count // PARTS):
        empty = chain_of(*np.zeros((2, 0), np.uint64))
        run_inline(planner.acquire(lease, _NAMESPACE, local, empty), perform)
        for part in range(PARTS):
            first, total = part * STEP, (part + 1) * STEP
            hi = random.integers(0, 2**64, STEP, dtype=np.uint64)
            chain = chain_of(hi, hi * np.uint64(3))
            reserving = planner.reserve(lease, local, first * tokens, total * tokens)
            calls.time("reserve", run_inline, reserving, perform)
            sealing = planner.seal(lease, local, first, chain, hi, hi)
            calls.time("seal", run_inline, sealing, perform)
        calls.time("release", planner.release, lease, [local])
        planner.take_sealed()
        store.state.take_changes()
        if local % AHEAD_EVERY == 0:
            take_memory(planner.placement.ahead())


def main() -> None:
    """Print a line for each size, in a process of its own, and the growth over the first one."""
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        blocks = int(sys.argv[2])
        print(json.dumps(measure(blocks, int(os.environ.get("SCALE_CALLS", "8000")))))
        return
    first: dict[str, float] = {}
    for name in sys.argv[1:] or ("10k", "1M"):
        blocks = SIZES[name] if name in SIZES else int(name)
        command = [sys.executable, "-m", "benchmarks.scale", "--one", str(blocks)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        found = json.loads(done.stdout)
        first = first or found["ns_per_block"]
        found["growth"] = {
            verb: round(spent / first[verb], 2) for verb, spent in found["ns_per_block"].items()
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
