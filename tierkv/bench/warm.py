"""Beginning a sequence on a prefix that is all in the device tier: hash, ask, pin; no copy."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from tierkv.bench import worker
from tierkv.bench.bars import AtMost, Bar, Takes
from tierkv.bench.daemon import Daemon, some_tokens, spec_of
from tierkv.bench.echo import Echo
from tierkv.bench.harness import F64, MICROSECONDS, Bench, Line, each_call
from tierkv.client.sync import Namespace
from tierkv.core.ids import U32
from tierkv.native.loops import loops
from tierkv.rpc.messages import Acquire, Table
from tierkv.rpc.wire import encode
from tierkv.units import KiB, MiB

SMALL_BYTES = 4 * KiB
LARGE_BYTES = 2 * MiB
"""Sizes of blocks whose warm hits must take as long."""

TOKENS = (2_048, 131_072)
WARM_US = 1000.0
SAME = 1.2


def run(bench: Bench) -> Iterator[Line]:
    """``begin`` on 2,048 and on 131,072 cached tokens, and with blocks 512 times as large."""
    large = spec_of(bench.pick(LARGE_BYTES, 64 * KiB))
    settings = {"device.bytes": str(TOKENS[0] // 16 * large.block_bytes + 64 * MiB)}
    with Daemon(bench, bench.same_core, "warm", settings) as daemon, daemon.connect() as cache:
        small = cache.namespace(spec_of(SMALL_BYTES))
        for count in TOKENS:
            bars: list[Bar] = [AtMost(WARM_US)] if count == TOKENS[0] else []
            yield _of(bench, small, some_tokens(count, count), bars)
        yield _large(bench, small, cache.namespace(large))


def _cached(namespace: Namespace, count: int) -> U32:
    tokens = some_tokens(count, count)
    with namespace.begin(tokens, keep=0, reserve=0) as sequence:
        sequence.append(tokens[sequence.num_tokens :])
    return tokens


def _of(bench: Bench, namespace: Namespace, tokens: U32, bars: list[Bar]) -> Line:
    place, spec = bench.same_core, namespace.spec
    blocks = len(tokens) // spec.block_tokens
    _cached(namespace, len(tokens))
    request = bytes(encode(1, Acquire(0, 1, bytes(16 * blocks), tokens.tobytes())))
    reply_bytes = len(encode(1, Table(1, bytes(4 * blocks), blocks, blocks)))
    calls = max(5, bench.pick(400_000, 20_000) // blocks)
    with Echo(bench, place, reply_bytes) as echo:
        hashes = loops()

        def floor() -> None:
            hashes.chain_hashes(spec.digest, tokens, spec.block_tokens)
            echo.exchange(request)

        in_c, hashed = f"{echo.name}, C client", f"hashing + {echo.name}"
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: _begins(namespace, tokens, calls),
                hashed: lambda: each_call(floor, calls),
                in_c: lambda: echo.ping(len(request), calls),
            },
        )
    name = f"get.warm.{len(tokens)}"
    return measured.line(name, MICROSECONDS, "tierkv", [hashed, in_c], place, bars=bars)


def _large(bench: Bench, small: Namespace, large: Namespace) -> Line:
    """A hit of the same tokens in blocks that hold more."""
    place, calls = bench.same_core, bench.pick(2000, 100)
    tokens = _cached(small, TOKENS[0])
    _cached(large, TOKENS[0])
    measured = bench.interleave(
        place,
        {
            "large": lambda: _begins(large, tokens, calls),
            "small blocks": lambda: _begins(small, tokens, calls),
        },
    )
    name = f"get.warm.{TOKENS[0]}.large"
    bars: list[Bar] = [AtMost(WARM_US), Takes(SAME, "small blocks")]
    note = f"blocks of {large.spec.block_bytes:,} bytes, not {small.spec.block_bytes:,}"
    return measured.line(name, MICROSECONDS, "large", ["small blocks"], place, bars=bars, note=note)


def _begins(namespace: Namespace, tokens: U32, count: int) -> F64:
    """Seconds of each ``begin`` (shape [count]); the ``end`` between them is not counted."""
    spent = np.empty(count)
    for at in range(count):
        began = time.perf_counter()
        sequence = worker.begin(namespace, tokens)
        spent[at] = time.perf_counter() - began
        sequence.end()
    return spent
