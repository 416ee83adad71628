"""Caching fresh blocks by copy, many in a call; evicting as many old ones."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.bench import blocks
from tierkv.bench.bars import Reaches
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import Bench, Line, gigabytes_per_s, once, repeat
from tierkv.client.stock import STOCK_BYTES_MAX
from tierkv.core.spec import KVSpec
from tierkv.units import KiB, MiB

BARS = {64 * KiB: 0.75, 256 * KiB: 0.85, 2 * MiB: 0.9}
"""Block bytes, and which share of a plain copy's speed a put has to reach."""

BATCHES, BATCHES_LARGE = 8, 3
"""So many cached ones, and as many slots for the plain copy: a worker keeps room for its next put
if that is a small part of the tier. Not for large ones."""


def run(bench: Bench) -> Iterator[Line]:
    """With small, medium and large blocks."""
    for spec in blocks.specs(bench, list(BARS)):
        yield _with(bench, spec)


def _with(bench: Bench, spec: KVSpec) -> Line:
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
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: repeat(
                    lambda: blocks.timed_put(namespace, prompts.fresh(), payload), times
                ),
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
        ["numpy copy", "memcpy", "memcpy + xxh3"],
        place,
        bars=[Reaches(BARS[spec.block_bytes], "numpy copy")],
        note=f"{len(payload)} blocks a call",
    )
