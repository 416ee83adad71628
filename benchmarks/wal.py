"""Small changes: begin, reserve, append one block, end; each acknowledged as the mode promises."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

from benchmarks.daemon import Daemon, Link, some_tokens, spec_of
from benchmarks.harness import Bench, Line, Placement, thousands_per_s
from benchmarks.raw import RawLog
from tierkv.client.sync import Namespace
from tierkv.core.ids import U32
from tierkv.rpc.messages import Acquire, Lookup, Release
from tierkv.rpc.wire import encode

SPEC = spec_of(64)
ROUND_TRIPS = 4
CLIENTS = 16


def run(bench: Bench) -> Iterator[Line]:
    """In every durability mode, alone and with many workers at once."""
    for mode in ("kill", "power") if bench.quick else ("none", "kill", "power"):
        settings = {"wal.durability": mode, "disk.bytes": "64 MiB"}
        place = bench.same_core
        with Daemon(bench, place, f"wal-{mode}", settings) as daemon:
            yield _cycles(bench, place, daemon, mode)
            yield _together(bench, place, daemon, mode)


def _cycles(bench: Bench, place: Placement, daemon: Daemon, mode: str) -> Line:
    count = bench.pick(1000, 10)
    link = Link(daemon.socket)
    null = encode(1, Lookup(link.open(SPEC), b""))
    with daemon.connect() as cache, RawLog(bench, mode) as raw:
        namespace = cache.namespace(SPEC)
        supply = itertools.count(1)

        def cycles() -> float:
            fresh = prompts(count, next(supply))
            began = time.perf_counter()
            for tokens in fresh:
                cycle(namespace, tokens)
            return time.perf_counter() - began

        def floor() -> float:
            began = time.perf_counter()
            for _ in range(count * ROUND_TRIPS):
                link.exchange(null)
                raw.append()
            return time.perf_counter() - began

        def bare() -> float:
            began = time.perf_counter()
            for _ in range(count * ROUND_TRIPS):
                raw.append()
            return time.perf_counter() - began

        measured = bench.interleave(
            place, {"tierkv": cycles, f"null RPC + {raw.name}": floor, raw.name: bare}
        )
    return measured.line(
        f"wal.cycle.{mode}",
        thousands_per_s(count),
        "tierkv",
        [f"null RPC + {raw.name}", raw.name],
        place,
        note="4 requests each",
    )


def prompts(count: int, seed: int = 0) -> Iterable[U32]:
    """Prompts of one block each (u32 [block_tokens])."""
    return some_tokens(seed, count * SPEC.block_tokens).reshape(count, SPEC.block_tokens)


def cycle(namespace: Namespace, tokens: U32) -> None:
    """Cache one block, in four requests."""
    sequence = namespace.begin(tokens)
    sequence.reserve(SPEC.block_tokens)
    sequence.append(tokens)
    sequence.end()


def _together(bench: Bench, place: Placement, daemon: Daemon, mode: str) -> Line:
    """Many connections each ask to begin, all wait, then all release: the log is shared."""
    count = bench.pick(100, 2)
    links = [Link(daemon.socket) for _ in range(CLIENTS)]
    opened = [link.open(SPEC) for link in links]
    names = iter(range(1, 1 << 32))

    def pairs(workers: list[Link], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            name = next(names)
            begins = [
                encode(1, Acquire(number, name, b"", b"")) for number in opened[: len(workers)]
            ]
            exchange_all(workers, begins)
            exchange_all(workers, [encode(1, Release([name])) for _ in workers])
        return time.perf_counter() - began

    measured = bench.interleave(
        place,
        {
            "together": lambda: pairs(links, count),
            "one worker": lambda: pairs(links[:1], count * CLIENTS),
        },
    )
    for link in links:
        link.close()
    return measured.line(
        f"wal.begin_end.x{CLIENTS}.{mode}",
        thousands_per_s(count * CLIENTS),
        "together",
        ["one worker"],
        place,
        note="2 requests each",
    )


def exchange_all(links: list[Link], frames: list[bytearray]) -> None:
    """Send one frame on each connection, then take all replies."""
    for link, frame in zip(links, frames, strict=True):
        link.send(frame)
    for link in links:
        link.receive()
