"""Prefix lookups: one request with the hashes of a chain, in a small and in a big index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tierkv.bench.bars import AtLeast, Bar, Reaches, Takes
from tierkv.bench.ceilings import nanoseconds, program
from tierkv.bench.daemon import Daemon, Link, some_tokens, spec_of
from tierkv.bench.echo import Echo
from tierkv.bench.harness import F64, MICROSECONDS, Bench, Line, each_call, millions_per_s
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8
from tierkv.core.prefix import HASH_BYTES, chain_hashes
from tierkv.native.loops import loops
from tierkv.rpc.messages import Existing, Exists, Found, Lookup
from tierkv.rpc.wire import encode

SPEC = spec_of(64, block_tokens=1)
CHAIN_BLOCKS = 8192
CALLS_OF_TABLE = 20
"""Fewest lookups of a C process, which has to fill its table first."""

BIG = 1_000_000
KEYS, QUESTIONS = 1024, 64
KEYS_M_S = 4.0
NOT_CACHED = 255
TIMES_NATIVE, TIMES_IN_PYTHON = 2.5, 5.0
"""How many times as long as C, with tierkv's own C loops and without."""

TIMES_OF_DICT = 5.0


def run(bench: Bench) -> Iterator[Line]:
    """All sizes of request over all sizes of index."""
    for blocks in (10_000,) if bench.quick else (10_000, BIG):
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
        peers = Peers(bench, echo, chains)
        for count in (64, 1024, CHAIN_BLOCKS):
            asked = [one[: count * HASH_BYTES] for one in chains if len(one) >= count * HASH_BYTES]
            bars: list[Bar] = []
            if (count, blocks) == (CHAIN_BLOCKS, BIG):
                times = TIMES_IN_PYTHON if loops().missing else TIMES_NATIVE
                bars = [Takes(times, peers.name), Reaches(TIMES_OF_DICT, "dict")]
            yield _of(bench, daemon, peers, f"lookup.{count}.of.{blocks}", asked, bars)
        with daemon.connect() as cache:
            yield _exists(bench, cache.namespace(SPEC), peers, chains)


class Peers:
    """A dict of the same hashes, and the same table in C behind an echo of the same sizes."""

    def __init__(self, bench: Bench, echo: Echo, chains: list[bytes]) -> None:
        self.echo = echo
        self._bench = bench
        names = [hashes[at : at + 16] for hashes in chains for at in range(0, len(hashes), 16)]
        self.rows = {name: row for row, name in enumerate(names)}
        self._hashes = bench.folder / "hashes"
        self._hashes.write_bytes(b"".join(chains))
        self._table = program(bench.folder, "table")
        self.name = f"{echo.name} + C table" if self._table else echo.name

    def ceiling(self, request_bytes: int, blocks: int, count: int) -> F64:
        """Seconds of each of ``count`` round trips and lookups of ``blocks`` hashes."""
        trips = self.echo.ping(request_bytes, count)
        if self._table is None:
            return trips
        command = [self._table, str(self._hashes), str(blocks), str(max(count, CALLS_OF_TABLE))]
        return trips + nanoseconds(self._bench, self._bench.same_core.client, command)[:count]


def _of(
    bench: Bench, daemon: Daemon, peers: Peers, name: str, asked: list[bytes], bars: list[Bar]
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
            peers.name: lambda: peers.ceiling(len(requests[0]), count, calls),
            "dict": lambda: each_call(lambda: walk(peers.rows, next(blobs)), calls),
        },
    )
    link.close()
    return measured.line(name, MICROSECONDS, "tierkv", [peers.name, "dict"], place, bars=bars)


def _exists(bench: Bench, namespace: Namespace, peers: Peers, chains: list[bytes]) -> Line:
    """Blocks of all chains, and as many that nobody has cached, by the worker API."""
    place, calls = bench.same_core, bench.pick(1000, 50)
    known = np.frombuffer(b"".join(chains), np.uint8).reshape(-1, HASH_BYTES)
    generator = np.random.default_rng(0)
    unknown = generator.integers(0, 256, (KEYS // 2, HASH_BYTES), np.uint8)
    asked = [
        generator.permutation(np.concatenate([generator.choice(known, KEYS // 2), unknown]))
        for _ in range(QUESTIONS)
    ]
    for keys in asked:
        cached = namespace.exists(keys) != NOT_CACHED
        if cached.tolist() != [key.tobytes() in peers.rows for key in keys]:
            raise RuntimeError("exists and a dict of what is cached disagree")
    turns = itertools.cycle(asked)
    request_bytes = len(encode(1, Exists(0, asked[0].tobytes())))
    with Echo(bench, place, len(encode(1, Existing(bytes(KEYS))))) as echo:
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: each_call(lambda: namespace.exists(next(turns)), calls),
                echo.name: lambda: echo.ping(request_bytes, calls),
                "dict": lambda: each_call(lambda: ask(peers.rows, next(turns)), calls),
            },
        )
        against = [echo.name, "dict"]
    return measured.line(
        f"lookup.exists.{KEYS}.of.{len(known)}",
        millions_per_s(KEYS),
        "tierkv",
        against,
        place,
        bars=[AtLeast(KEYS_M_S)],
        note="half of them cached",
    )


def ask(rows: dict[bytes, int], keys: U8) -> list[bool]:
    """The same without arrays: one dict lookup a key."""
    return [key in rows for key in map(bytes, keys)]


def fill(namespace: Namespace, blocks: int) -> list[bytes]:
    """Cache this many blocks in chains of up to 8192; returns the chains' hashes."""
    chains = []
    for seed in range(-(-blocks // CHAIN_BLOCKS)):
        count = min(CHAIN_BLOCKS, blocks - seed * CHAIN_BLOCKS)
        tokens = some_tokens(seed, count)
        with namespace.begin(tokens, keep=0, reserve=0) as sequence:
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
