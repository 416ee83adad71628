"""What more cached blocks cost: the same requests on small and on big caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tierkv.bench import worker
from tierkv.bench.bars import Takes
from tierkv.bench.daemon import Daemon, some_tokens
from tierkv.bench.harness import F64, MICROSECONDS, Bench, Line, each_call
from tierkv.bench.lookup import CHAIN_BLOCKS, SPEC, fill
from tierkv.client.sync import Namespace

BLOCKS = 64
"""Of each request."""

FLAT = 1.5
SIZES = (10_000, 1_000_000)
FULL_SIZE = 16_000_000
SPARE_BYTES = 1 << 20
SLOT_BYTES = 64


def run(bench: Bench) -> Iterator[Line]:
    """Lookup, begin and append, in daemons side by side."""
    sizes = (1000, 10_000) if bench.quick else (*SIZES, *([FULL_SIZE] if bench.full else []))
    place = bench.same_core
    with ExitStack() as leaving:

        def filled(size: int) -> Namespace:
            settings = {"device.bytes": str(SLOT_BYTES * size + SPARE_BYTES)}
            daemon = leaving.enter_context(Daemon(bench, place, f"growth-{size}", settings))
            namespace = leaving.enter_context(daemon.connect()).namespace(SPEC)
            fill(namespace, size)
            return namespace

        works = {size: _Requests(filled(size), size) for size in sizes}
        calls = bench.pick(500, 20)
        for operation in ("lookup", "begin", "append"):
            variants = {
                _label(size): _timed(getattr(work, operation), calls)
                for size, work in works.items()
            }
            measured = bench.interleave(place, variants)
            for size in sizes[1:]:
                small = _label(sizes[0])
                yield measured.line(
                    f"growth.{operation}.{size}",
                    MICROSECONDS,
                    _label(size),
                    [small],
                    place,
                    bars=[Takes(FLAT, small)],
                    note=f"{BLOCKS} blocks a request",
                )


class _Requests:
    """On chains that take turns, so that a big cache is not in the processor's caches."""

    def __init__(self, namespace: Namespace, size: int) -> None:
        self._namespace = namespace
        chains = [
            some_tokens(seed, min(CHAIN_BLOCKS, size - seed * CHAIN_BLOCKS))
            for seed in range(-(-size // CHAIN_BLOCKS))
        ]
        prefixes = [chain[:BLOCKS] for chain in chains if len(chain) >= BLOCKS]
        self._cached = itertools.cycle(prefixes)
        self._fresh = itertools.count(1 << 40)

    def lookup(self) -> None:
        """How much of a cached chain is cached."""
        if self._namespace.lookup(next(self._cached)).tokens != BLOCKS:
            raise RuntimeError("a cached chain was not found")

    def begin(self) -> None:
        """Begin on a cached chain, and end."""
        worker.begin(self._namespace, next(self._cached)).end()

    def append(self) -> None:
        """Cache a chain that nobody has seen. There is room for some; then the oldest leave."""
        tokens = some_tokens(next(self._fresh), BLOCKS)
        sequence = worker.reserve(self._namespace, tokens)
        sequence.append(tokens)
        sequence.end()


def _timed(call: Callable[[], None], count: int) -> Callable[[], F64]:
    return lambda: each_call(call, count)


def _label(size: int) -> str:
    return f"{size:,} blocks"
