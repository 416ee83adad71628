"""Caching fresh blocks by copy, many in a call or one; evicting as many old ones."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.bench import blocks, worker
from tierkv.bench.bars import Reaches
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import (
    F64,
    MICROSECONDS,
    Bench,
    Line,
    each_call,
    gigabytes_per_s,
    once,
    repeat,
)
from tierkv.client.stock import STOCK_BYTES_MAX
from tierkv.core.spec import KVSpec
from tierkv.units import KiB, MiB

BARS = {64 * KiB: 0.75, 256 * KiB: 0.85, 2 * MiB: 0.9}
"""Block bytes, and which share of a plain copy's speed a put has to reach."""

BATCHES, BATCHES_LARGE = 8, 3
"""So many cached ones, and as many slots for the plain copy: a worker keeps room for its next put
if that is a small part of the tier. Not for large ones."""

ONE_BLOCK = 64 * KiB

PROMPTS = 32
"""One-block prompts that are cached at a time."""


def run(bench: Bench) -> Iterator[Line]:
    """64 blocks in a call, and one."""
    for spec in blocks.specs(bench, list(BARS)):
        yield _many(bench, spec)
    (spec,) = blocks.specs(bench, [ONE_BLOCK])
    yield _one(bench, spec)


def _many(bench: Bench, spec: KVSpec) -> Line:
    place = bench.same_core
    payload = blocks.some_payload(spec, blocks.BLOCKS_PER_CALL)
    batches = BATCHES if payload.nbytes <= STOCK_BYTES_MAX else BATCHES_LARGE
    ring, times = blocks.Ring(payload, batches), bench.pick(12, 2)
    prompts = blocks.Prompts(spec, len(payload))
    name = f"put.{blocks.label(spec)}"
    settings = {"device.bytes": str(2 * batches * payload.nbytes)}
    with Daemon(bench, place, name, settings) as daemon, daemon.connect() as cache:
        namespace = cache.namespace(spec)
        held = blocks.HeldSlots(namespace, payload, batches)
        for _ in range(batches):
            blocks.timed_put(namespace, prompts.fresh(), payload)

        def puts(put: blocks.Put) -> F64:
            return repeat(lambda: blocks.timed_put(namespace, prompts.fresh(), payload, put), times)

        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: puts(worker.put),
                "a sequence": lambda: puts(worker.put_by_sequence),
                "numpy copy": lambda: repeat(lambda: once(held.put), times),
                "memcpy": lambda: repeat(lambda: once(ring.copy), times),
                "memcpy + xxh3": lambda: repeat(lambda: once(ring.copy_and_check), times),
            },
        )
        blocks.check(namespace, prompts.last, payload)
    return measured.line(
        name,
        gigabytes_per_s(payload.nbytes),
        "tierkv",
        ["numpy copy", "memcpy", "memcpy + xxh3", "a sequence"],
        place,
        bars=[Reaches(BARS[spec.block_bytes], "numpy copy")],
        note=f"{len(payload)} blocks a call",
    )


def _one(bench: Bench, spec: KVSpec) -> Line:
    place, calls = bench.same_core, bench.pick(1000, 50)
    payload, prompts = blocks.some_payload(spec, 1), blocks.Prompts(spec, 1)
    name = f"put.one.{blocks.label(spec)}"
    settings = {"device.bytes": str(2 * PROMPTS * payload.nbytes)}
    with Daemon(bench, place, name, settings) as daemon, daemon.connect() as cache:
        namespace = cache.namespace(spec)
        held = blocks.HeldSlots(namespace, payload, PROMPTS)

        def puts(put: blocks.Put) -> F64:
            unseen = iter([prompts.fresh() for _ in range(calls)])
            return each_call(lambda: put(namespace, next(unseen), payload), calls)

        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: puts(worker.put),
                "a sequence": lambda: puts(worker.put_by_sequence),
                "numpy copy": lambda: each_call(held.put, calls),
            },
        )
        blocks.check(namespace, prompts.last, payload)
    return measured.line(name, MICROSECONDS, "tierkv", ["a sequence", "numpy copy"], place)
