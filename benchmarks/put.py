"""Caching fresh blocks: begin, reserve, write in place, append; evicting as many old ones."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import blocks
from benchmarks.daemon import Daemon
from benchmarks.harness import Bench, Line, gigabytes_per_s, once, repeat
from tierkv.core.spec import KVSpec

BATCHES_RESIDENT = 4


def run(bench: Bench) -> Iterator[Line]:
    """With small and with large blocks."""
    for spec in blocks.specs(bench):
        yield _with(bench, spec)


def _with(bench: Bench, spec: KVSpec) -> Line:
    place = bench.same_core
    count = blocks.batch_blocks(bench, spec)
    payload = blocks.some_payload(spec, count)
    ring = blocks.Ring(payload, BATCHES_RESIDENT)
    prompts, times = blocks.Prompts(spec, count), blocks.repeats(bench)
    settings = {"device.bytes": str(BATCHES_RESIDENT * count * spec.block_bytes)}
    with (
        Daemon(bench, place, f"put-{blocks.label(spec)}", settings) as daemon,
        daemon.connect() as cache,
    ):
        namespace = cache.namespace(spec)
        for _ in range(BATCHES_RESIDENT):
            blocks.put(namespace, prompts.fresh(), payload)
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: repeat(
                    lambda: blocks.put(namespace, prompts.fresh(), payload), times
                ),
                "memcpy": lambda: repeat(lambda: once(ring.copy), times),
                "memcpy + xxh3": lambda: repeat(lambda: once(ring.copy_and_check), times),
            },
        )
    return measured.line(
        f"put.{blocks.label(spec)}",
        gigabytes_per_s(payload.nbytes),
        "tierkv",
        ["memcpy + xxh3", "memcpy"],
        place,
    )
