"""Reading cached blocks by copy: many in a call, and one alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

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
from tierkv.bench.put import BARS, BATCHES
from tierkv.core.spec import KVSpec
from tierkv.units import KiB, MiB

ONE_BLOCK_US = {64 * KiB: 35.0, MiB: 110.0}
"""Block bytes, and how long the median get of one block may take."""

PROMPTS = 32
"""One-block prompts that take turns, so that no block stays in the processor's caches."""


def run(bench: Bench) -> Iterator[Line]:
    """64 blocks in a call, and one."""
    for spec in blocks.specs(bench, list(BARS)):
        yield _many(bench, spec)
    for spec in blocks.specs(bench, list(ONE_BLOCK_US)):
        yield _one(bench, spec)


def _many(bench: Bench, spec: KVSpec) -> Line:
    place = bench.same_core
    payload = blocks.some_payload(spec, blocks.BLOCKS_PER_CALL)
    ring, times = blocks.Ring(payload, BATCHES), bench.pick(12, 2)
    prompts = blocks.Prompts(spec, len(payload))
    out = np.zeros_like(payload)
    name = f"get.{blocks.label(spec)}"
    settings = {"device.bytes": str(2 * BATCHES * payload.nbytes)}
    with Daemon(bench, place, name, settings) as daemon, daemon.connect() as cache:
        namespace = cache.namespace(spec)
        held = blocks.HeldSlots(namespace, payload, BATCHES)
        cached = [prompts.fresh() for _ in range(BATCHES)]
        for tokens in cached:
            worker.put(namespace, tokens, payload)
            blocks.check(namespace, tokens, payload)
        turns = cycle(cached)
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: repeat(
                    lambda: blocks.timed_get(namespace, next(turns), out), times
                ),
                "numpy copy": lambda: repeat(lambda: once(lambda: held.get(out)), times),
                "memcpy": lambda: repeat(lambda: once(ring.copy), times),
            },
        )
    return measured.line(
        name,
        gigabytes_per_s(payload.nbytes),
        "tierkv",
        ["numpy copy", "memcpy"],
        place,
        bars=[Reaches(BARS[spec.block_bytes], "numpy copy")],
        note=f"{len(payload)} blocks a call",
    )


def _one(bench: Bench, spec: KVSpec) -> Line:
    place, calls = bench.same_core, bench.pick(1000, 50)
    payload = blocks.some_payload(spec, 1)
    prompts = blocks.Prompts(spec, 1)
    out = np.zeros_like(payload)
    name = f"get.one.{blocks.label(spec)}"
    settings = {"device.bytes": str(2 * PROMPTS * payload.nbytes)}
    with Daemon(bench, place, name, settings) as daemon, daemon.connect() as cache:
        namespace = cache.namespace(spec)
        held = blocks.HeldSlots(namespace, payload, PROMPTS)
        cached = [prompts.fresh() for _ in range(PROMPTS)]
        for tokens in cached:
            worker.put(namespace, tokens, payload)
            blocks.check(namespace, tokens, payload)
        turns = cycle(cached)
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: each_call(
                    lambda: worker.read(namespace, next(turns), out), calls
                ),
                "numpy copy": lambda: each_call(lambda: held.get(out), calls),
            },
        )
    bars = [AtMost(ONE_BLOCK_US[spec.block_bytes])]
    return measured.line(name, MICROSECONDS, "tierkv", ["numpy copy"], place, bars=bars)
