"""Reading cached blocks by copy: many in a call, and one alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import NamedTuple

import numpy as np

from tierkv.bench import blocks, worker
from tierkv.bench.bars import AtMost, Reaches
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import (
    MICROSECONDS,
    Bench,
    Line,
    each_call,
    gigabytes_per_s,
    once,
    repeat,
)
from tierkv.bench.put import BARS
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8, U32
from tierkv.core.spec import KVSpec
from tierkv.units import KiB, MiB

ONE_BLOCK_US = {64 * KiB: 35.0, MiB: 110.0}
"""Block bytes, and how long the median get of one block may take."""

BATCHES = 3
"""So many of 64 blocks take turns."""

PROMPTS = 32
"""One-block prompts that take turns, so that no block stays in the processor's caches."""


def run(bench: Bench) -> Iterator[Line]:
    """64 blocks in a call, and one."""
    for spec in blocks.specs(bench, list(BARS)):
        yield _many(bench, spec)
    for spec in blocks.specs(bench, list(ONE_BLOCK_US)):
        yield _one(bench, spec)


class _Cached(NamedTuple):
    """What a get finds: prompts that are cached with ``payload``, in turn, and memory for a copy.

    ``held``: slots that this worker holds already, to copy out of.
    """

    namespace: Namespace
    payload: U8
    turns: Iterator[U32]
    out: U8
    held: blocks.HeldSlots


@contextmanager
def _cached(bench: Bench, spec: KVSpec, name: str, count: int, prompts: int) -> Iterator[_Cached]:
    """A daemon that has so many prompts of ``count`` blocks cached, every byte checked."""
    payload = blocks.some_payload(spec, count)
    unseen = blocks.Prompts(spec, count)
    # One more for the room that a worker keeps for what it may put next.
    settings = {"device.bytes": str((2 * prompts + 1) * payload.nbytes)}
    with Daemon(bench, bench.same_core, name, settings) as daemon, daemon.connect() as cache:
        namespace = cache.namespace(spec)
        held = blocks.HeldSlots(namespace, payload, prompts)
        cached = [unseen.fresh() for _ in range(prompts)]
        for tokens in cached:
            worker.put(namespace, tokens, payload)
            blocks.check(namespace, tokens, payload)
        yield _Cached(namespace, payload, cycle(cached), np.zeros_like(payload), held)


def _many(bench: Bench, spec: KVSpec) -> Line:
    count, times = blocks.BLOCKS_PER_CALL, bench.pick(12, 2)
    name = f"get.{blocks.label(spec)}"
    with _cached(bench, spec, name, count, BATCHES) as cached:
        namespace, payload, turns, out, held = cached
        ring = blocks.Ring(payload, BATCHES)
        calls = {
            "tierkv": lambda: worker.read(namespace, next(turns), out),
            "a sequence": lambda: worker.get(namespace, next(turns), out),
            "numpy copy": lambda: held.get(out),
            "memcpy": ring.copy,
        }
        measured = bench.interleave(
            bench.same_core,
            {name: partial(repeat, partial(once, call), times) for name, call in calls.items()},
        )
    return measured.line(
        name,
        gigabytes_per_s(payload.nbytes),
        "tierkv",
        ["numpy copy", "memcpy", "a sequence"],
        bench.same_core,
        bars=[Reaches(BARS[spec.block_bytes], "numpy copy")],
        note=f"{count} blocks a call",
    )


def _one(bench: Bench, spec: KVSpec) -> Line:
    calls = bench.pick(1000, 50)
    name = f"get.one.{blocks.label(spec)}"
    with _cached(bench, spec, name, 1, PROMPTS) as cached:
        namespace, _, turns, out, held = cached
        measured = bench.interleave(
            bench.same_core,
            {
                "tierkv": lambda: each_call(
                    lambda: worker.read(namespace, next(turns), out), calls
                ),
                "numpy copy": lambda: each_call(lambda: held.get(out), calls),
            },
        )
    bars = [AtMost(ONE_BLOCK_US[spec.block_bytes])]
    return measured.line(name, MICROSECONDS, "tierkv", ["numpy copy"], bench.same_core, bars=bars)
