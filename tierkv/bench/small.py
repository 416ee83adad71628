"""Small changes: begin with room, append one block, end; acknowledged as the mode promises."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tierkv.bench import worker
from tierkv.bench.daemon import Daemon, Link, some_tokens, spec_of
from tierkv.bench.harness import F64, Bench, Line, Placement, each_call, thousands_per_s
from tierkv.bench.raw import RawLog
from tierkv.client.sync import Namespace
from tierkv.core.ids import U32
from tierkv.rpc.messages import Acquire, Release
from tierkv.rpc.wire import encode

SPEC = spec_of(64)
REQUESTS = 3
CLIENTS = 16


def run(bench: Bench) -> Iterator[Line]:
    """In every durability mode, alone and with many workers at once."""
    for mode in ("kill", "power") if bench.quick else ("none", "kill", "power"):
        settings = {"wal.durability": mode, "disk.bytes": "64 MiB"}
        place = bench.same_core
        with Daemon(bench, place, f"small-{mode}", settings) as daemon:
            yield _cycles(bench, place, daemon, mode)
            yield _together(bench, place, daemon, mode)


def _cycles(bench: Bench, place: Placement, daemon: Daemon, mode: str) -> Line:
    """The median cycle: on a busy machine the mean would tell of the others' time slices."""
    count = bench.pick(200 if mode == "power" else 1000, 10)
    link = Link(daemon.socket)
    null = encode(1, Release([]))
    with daemon.connect() as cache, RawLog(bench, mode) as raw:
        namespace = cache.namespace(SPEC)
        seeds = itertools.count(1)

        def cycles() -> F64:
            fresh = iter(prompts(count, next(seeds)))
            return each_call(lambda: cycle(namespace, next(fresh)), count)

        def floor() -> None:
            for _ in range(REQUESTS):
                link.exchange(null)
                raw.append()
            raw.sync()

        def bare() -> None:
            for _ in range(REQUESTS):
                raw.append()
            raw.sync()

        both = f"null RPC + {raw.name}"
        measured = bench.interleave(
            place,
            {
                "tierkv": cycles,
                both: lambda: each_call(floor, count),
                raw.name: lambda: each_call(bare, count),
            },
        )
    name, unit = f"put.small.{mode}", thousands_per_s(1)
    return measured.line(name, unit, "tierkv", [both, raw.name], place, note="3 requests each")


def prompts(count: int, seed: int = 0) -> Iterable[U32]:
    """Prompts of one block each (u32 [block_tokens])."""
    return some_tokens(seed, count * SPEC.block_tokens).reshape(count, SPEC.block_tokens)


def cycle(namespace: Namespace, tokens: U32) -> None:
    """Cache one block, in three requests."""
    sequence = worker.reserve(namespace, tokens)
    sequence.append(tokens)
    sequence.end()


def _together(bench: Bench, place: Placement, daemon: Daemon, mode: str) -> Line:
    """Many connections each ask to begin, all wait, then all release: the log is shared."""
    count = bench.pick(200, 2)
    links = [Link(daemon.socket) for _ in range(CLIENTS)]
    opened = [link.open(SPEC) for link in links]
    names = itertools.count(1)

    def pairs(workers: list[Link]) -> None:
        name = next(names)
        numbers = opened[: len(workers)]
        exchange_all(workers, [encode(1, Acquire(number, name, b"", b"")) for number in numbers])
        exchange_all(workers, [encode(1, Release([name])) for _ in workers])

    measured = bench.interleave(
        place,
        {
            "together": lambda: each_call(lambda: pairs(links), count),
            "one worker": lambda: CLIENTS * each_call(lambda: pairs(links[:1]), count),
        },
    )
    for link in links:
        link.close()
    return measured.line(
        f"put.begin_end.x{CLIENTS}.{mode}",
        thousands_per_s(CLIENTS),
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
