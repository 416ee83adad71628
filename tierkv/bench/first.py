"""The first fill: puts right after a daemon has started on memory that nobody has touched yet."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from tierkv.bench import blocks, worker
from tierkv.bench.bars import Reaches
from tierkv.bench.daemon import Daemon, shared_file
from tierkv.bench.harness import Bench, Line, gigabytes_per_s, once
from tierkv.core.spec import KVSpec
from tierkv.pages import populate
from tierkv.units import KiB, MiB

SIZES = (MiB, 64 * KiB)
CALL_BYTES = 32 * MiB
SHARE = 0.25


def run(bench: Bench) -> Iterator[Line]:
    """512 MiB into an arena of 1 GiB, from the first connection of a worker."""
    for spec in blocks.specs(bench, SIZES):
        yield _fill(bench, spec)


def _fill(bench: Bench, spec: KVSpec) -> Line:
    place = bench.two_cores
    payload = blocks.some_payload(spec, CALL_BYTES // spec.block_bytes)
    calls = bench.pick(16, 1)
    filled = calls * payload.nbytes
    ring, prompts = blocks.Ring(payload, 4), blocks.Prompts(spec, len(payload))
    settings = {"device.bytes": str(2 * filled)}

    def fill() -> float:
        with Daemon(bench, place, "first", settings) as daemon, daemon.connect() as cache:
            namespace = cache.namespace(spec)
            fresh = [prompts.fresh() for _ in range(calls)]

            def puts() -> None:
                for tokens in fresh:
                    worker.put(namespace, tokens, payload)

            spent = once(puts)
            for tokens in fresh:
                blocks.check(namespace, tokens, payload)
        return spent

    def new_pages() -> float:
        with shared_file() as file:
            file.truncate(filled)
            mapped = np.frombuffer(mmap.mmap(file.fileno(), filled), np.uint8)
            return once(lambda: populate(mapped, 0, filled))

    def copies() -> None:
        for _ in range(calls):
            ring.copy()

    variants = {"tierkv": fill, "memcpy": lambda: once(copies), "taking new pages": new_pages}
    measured = bench.interleave(place, variants)
    return measured.line(
        f"put.first.{blocks.label(spec)}",
        gigabytes_per_s(filled),
        "tierkv",
        ["memcpy", "taking new pages"],
        place,
        bars=[Reaches(SHARE, "memcpy")],
        note=f"{len(payload)} blocks a call",
    )
