"""Write-behind: from the moment blocks are sealed until all of them are on disk and synced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tierkv.bench import blocks, worker
from tierkv.bench.bars import Bar, Reaches
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import Bench, Line, Sample, gigabytes_per_s, repeat
from tierkv.bench.raw import DirectFile, Fio, RawFile
from tierkv.client.sync import Client, Namespace
from tierkv.core.ids import U8, Tier
from tierkv.core.spec import KVSpec
from tierkv.tiers.sizes import slot_bytes
from tierkv.units import KiB, MiB

SIZES = (64 * KiB, 2 * MiB)
BATCHES_ON_DISK = 3
SHARE = 0.8


def run(bench: Bench) -> Iterator[Line]:
    """With small and with large blocks."""
    for spec in blocks.specs(bench, SIZES):
        yield _with(bench, spec)


def _with(bench: Bench, spec: KVSpec) -> Line:
    place = bench.two_cores
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    slot = slot_bytes(Tier.DISK, blocks.shape_of(spec))
    settings = {
        "device.bytes": str(2 * payload.nbytes),
        "disk.bytes": str(BATCHES_ON_DISK * len(payload) * slot),
    }
    prompts, times = blocks.Prompts(spec, len(payload)), blocks.repeats(bench)
    name = f"spill.{blocks.label(spec)}"
    with (
        Daemon(bench, place, name, settings) as daemon,
        daemon.connect() as cache,
        RawFile(bench, payload, slot, batches=BATCHES_ON_DISK) as raw,
        DirectFile(bench, payload.nbytes, batches=BATCHES_ON_DISK) as direct,
    ):
        namespace = cache.namespace(spec)
        # Until every slot was written once, the file system still allocates.
        for _ in range(BATCHES_ON_DISK):
            _spill(cache, namespace, prompts, payload)
            raw.write()
            direct.write()
        variants: dict[str, Callable[[], Sample]] = {
            "tierkv": lambda: repeat(lambda: _spill(cache, namespace, prompts, payload), times),
            "pwritev": lambda: repeat(raw.write, times),
            direct.name: lambda: repeat(direct.write, times),
        }
        if Fio.is_there():
            variants[Fio.name] = Fio(bench, payload.nbytes).write
        measured = bench.interleave(place, variants)
        blocks.check(namespace, prompts.last, payload)
    references = list(variants)[1:]
    bars: list[Bar] = [Reaches(SHARE, references[-1])] if spec.block_bytes == SIZES[-1] else []
    unit = gigabytes_per_s(payload.nbytes)
    return measured.line(name, unit, "tierkv", references, place, bars=bars)


def _spill(cache: Client, namespace: Namespace, prompts: blocks.Prompts, payload: U8) -> float:
    worker.put(namespace, prompts.fresh(), payload)
    began = time.perf_counter()
    cache.flush()
    return time.perf_counter() - began
