"""Prefix lookups: one request with the hashes of a chain, in a small and in a big index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.daemon import Daemon, Link, some_tokens, spec_of
from benchmarks.echo import Echo
from benchmarks.harness import MICROSECONDS, Bench, Line, each_call
from tierkv.client.sync import Namespace
from tierkv.core.prefix import HASH_BYTES, chain_hashes
from tierkv.rpc.messages import Found, Lookup
from tierkv.rpc.wire import encode

SPEC = spec_of(64, block_tokens=1)
CHAIN_BLOCKS = 8192


def run(bench: Bench) -> Iterator[Line]:
    """All sizes of request over all sizes of index."""
    for blocks in (10_000,) if bench.quick else (10_000, 1_000_000):
        yield from _over(bench, blocks)


def _over(bench: Bench, blocks: int) -> Iterator[Line]:
    place = bench.same_core
    reply_bytes = len(encode(1, Found(0, 0, 0, 0)))
    settings = {"device.bytes": str(64 * blocks + (1 << 20))}
    with (
        Daemon(bench, place, f"lookup-{blocks}", settings) as daemon,
        Echo(bench, place, reply_bytes) as echo,
    ):
        with daemon.connect() as cache:
            chains = fill(cache.namespace(SPEC), blocks)
        names = [hashes[at : at + 16] for hashes in chains for at in range(0, len(hashes), 16)]
        rows = {name: row for row, name in enumerate(names)}
        for count in (64, 1024, CHAIN_BLOCKS):
            asked = [one[: count * HASH_BYTES] for one in chains if len(one) >= count * HASH_BYTES]
            yield _of(bench, daemon, echo, f"lookup.{count}.of.{blocks}", asked, rows)


def _of(
    bench: Bench, daemon: Daemon, echo: Echo, name: str, asked: list[bytes], rows: dict[bytes, int]
) -> Line:
    """Ask for the chains in turn, so that a big index is not in the processor's caches."""
    count = len(asked[0]) // HASH_BYTES
    link = Link(daemon.socket)
    namespace = link.open(SPEC)
    reply = link.call(Lookup(namespace, asked[-1]))
    if not isinstance(reply, Found) or reply.blocks != count:
        raise RuntimeError(f"{count} blocks are cached, but the daemon says {reply}")
    requests = [encode(1, Lookup(namespace, one)) for one in asked]
    frames, blobs = itertools.cycle(requests), itertools.cycle(asked)
    calls = bench.pick(1500, 100) if count < CHAIN_BLOCKS else bench.pick(300, 20)
    place = bench.same_core
    measured = bench.interleave(
        place,
        {
            "tierkv": lambda: each_call(lambda: link.exchange(next(frames)), calls),
            echo.name: lambda: each_call(lambda: echo.exchange(requests[0]), calls),
            "dict": lambda: each_call(lambda: walk(rows, next(blobs)), calls),
        },
    )
    link.close()
    return measured.line(name, MICROSECONDS, "tierkv", [echo.name, "dict"], place)


def fill(namespace: Namespace, blocks: int) -> list[bytes]:
    """Cache this many blocks in chains of up to 8192; returns the chains' hashes."""
    chains = []
    for seed in range(-(-blocks // CHAIN_BLOCKS)):
        count = min(CHAIN_BLOCKS, blocks - seed * CHAIN_BLOCKS)
        tokens = some_tokens(seed, count)
        with namespace.begin(tokens) as sequence:
            sequence.reserve(count)
            sequence.append(tokens)
        chains.append(chain_hashes(SPEC.digest, tokens, 1).tobytes())
    return chains


def walk(rows: dict[bytes, int], hashes: bytes) -> list[int]:
    """What a prefix cache without arrays does: one dict lookup a block, until one is missing."""
    found = []
    for at in range(0, len(hashes), HASH_BYTES):
        row = rows.get(hashes[at : at + HASH_BYTES])
        if row is None:
            break
        found.append(row)
    return found
