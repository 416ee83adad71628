"""Allocate, seal and release many blocks at once: what the daemon's bookkeeping costs a block.

The requests are encoded beforehand and the blocks are tiny, so that no payload and no hashing is
in what is timed: only the daemon, and the wire.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tierkv.bench.bars import AtMost, Takes
from tierkv.bench.daemon import Daemon, Link, some_tokens, spec_of
from tierkv.bench.harness import MICROSECONDS, Bench, Line, repeat
from tierkv.core.prefix import chain_hashes
from tierkv.rpc.messages import Acquire, Release, Seal, Table
from tierkv.rpc.wire import encode

SPEC = spec_of(64)
BLOCKS = 8192
US_MAX, TIMES_OF_NONE = 1000.0, 1.25


def run(bench: Bench) -> Iterator[Line]:
    """Where there is room, and where as many blocks have to be evicted."""
    calls = bench.pick(12, 2)
    for evicting in (False, True):
        batches = 2 if evicting else (1 + bench.rounds) * calls
        yield _of(bench, "evicting" if evicting else "kill", batches, calls)


def _of(bench: Bench, kind: str, batches: int, calls: int) -> Line:
    place = bench.same_core
    with ExitStack() as leaving:

        def cycles(mode: str) -> Callable[[], float]:
            settings = {
                "device.bytes": str(batches * BLOCKS * SPEC.block_bytes + (1 << 20)),
                "wal.durability": mode,
                "wal.segment_bytes": "64 MiB",
            }
            daemon = leaving.enter_context(Daemon(bench, place, f"requests-{mode}", settings))
            link = Link(daemon.socket)
            leaving.callback(link.close)
            return _Cycle(link).run

        kill, none = cycles("kill"), cycles("none")
        measured = bench.interleave(
            place, {"kill": lambda: repeat(kill, calls), "none": lambda: repeat(none, calls)}
        )
    return measured.line(
        f"put.requests.{BLOCKS}.{kind}",
        MICROSECONDS,
        "kill",
        ["none"],
        place,
        bars=[] if kind == "evicting" else [AtMost(US_MAX), Takes(TIMES_OF_NONE, "none")],
        note="begin, seal, release",
    )


class _Cycle:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._namespace = link.open(SPEC)
        self._names = itertools.count(1)

    def run(self) -> float:
        """Seconds to allocate, seal and release so many blocks that nobody has seen."""
        name, count = next(self._names), BLOCKS * SPEC.block_tokens
        tokens = some_tokens(name, count)
        hashes = chain_hashes(SPEC.digest, tokens, SPEC.block_tokens).tobytes()
        link = self._link
        begin = encode(0, Acquire(self._namespace, name, b"", b"", room_tokens=count))
        # Any checksums but zeroes, which would say that there are none.
        seal = encode(0, Seal(name, 0, hashes, tokens.tobytes(), hashes))
        release = encode(0, Release([name]))
        began = time.perf_counter()
        link.exchange(begin)
        sealed = link.decode(link.exchange(seal))
        link.exchange(release)
        spent = time.perf_counter() - began
        if not isinstance(sealed, Table) or sealed.sealed != BLOCKS:
            raise RuntimeError(f"{BLOCKS} blocks were to be sealed, but the daemon says {sealed}")
        return spent
