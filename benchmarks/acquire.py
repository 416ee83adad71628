"""Beginning a sequence on a prefix that is all in the device tier: hash, ask, pin."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.daemon import Daemon, some_tokens, spec_of
from benchmarks.echo import Echo
from benchmarks.harness import F64, MICROSECONDS, Bench, Line, each_call
from tierkv.client.sync import Namespace
from tierkv.core.ids import U32
from tierkv.core.prefix import chain_hashes
from tierkv.rpc.messages import Acquire, Table
from tierkv.rpc.wire import encode

SPEC = spec_of(64)


def run(bench: Bench) -> Iterator[Line]:
    """``begin`` on 2,048 and on 131,072 tokens, in blocks of 16."""
    with Daemon(bench, bench.same_core, "acquire", {}) as daemon, daemon.connect() as cache:
        namespace = cache.namespace(SPEC)
        for count in (2_048, 131_072):
            yield _of(bench, namespace, some_tokens(count, count))


def _of(bench: Bench, namespace: Namespace, tokens: U32) -> Line:
    place = bench.same_core
    blocks = len(tokens) // SPEC.block_tokens
    with namespace.begin(tokens) as sequence:
        sequence.reserve(len(tokens))
        sequence.append(tokens)
    request = bytes(encode(1, Acquire(0, 1, bytes(16 * blocks), tokens.tobytes())))
    reply_bytes = len(encode(1, Table(1, bytes(4 * blocks), blocks, blocks)))
    calls = max(5, bench.pick(400_000, 20_000) // blocks)
    with Echo(bench, place, reply_bytes) as echo:

        def floor() -> None:
            chain_hashes(SPEC.digest, tokens, SPEC.block_tokens)
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
    name = f"acquire.{len(tokens)}"
    return measured.line(name, MICROSECONDS, "tierkv", [hashed, in_c], place)


def _begins(namespace: Namespace, tokens: U32, count: int) -> F64:
    """Seconds of each ``begin`` (shape [count]); the ``end`` between them is not counted."""
    spent = np.empty(count)
    for at in range(count):
        began = time.perf_counter()
        sequence = namespace.begin(tokens, keep=0)
        spent[at] = time.perf_counter() - began
        if sequence.cached_tokens != len(tokens):
            raise RuntimeError(f"only {sequence.cached_tokens} tokens are cached")
        sequence.end()
    return spent
