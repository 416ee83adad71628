"""What durability costs: caching fresh blocks, against mode ``none`` and against the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from benchmarks import blocks
from benchmarks.daemon import Daemon
from benchmarks.harness import Bench, Line, gigabytes_per_s, repeat
from benchmarks.raw import RawFile
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8, Tier
from tierkv.core.spec import KVSpec
from tierkv.core.state import PoolShape
from tierkv.tiers.sizes import slot_bytes

BATCHES_RESIDENT = 4
BATCHES_ON_DISK = 3
WORKERS = 4


def run(bench: Bench) -> Iterator[Line]:
    """With small and with large blocks."""
    for spec in blocks.specs(bench):
        yield _kill(bench, spec)
        yield _power(bench, spec)


def _kill(bench: Bench, spec: KVSpec) -> Line:
    """The same puts by two daemons that differ in nothing but the mode, turn by turn."""
    place = bench.same_core
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    prompts, times = blocks.Prompts(spec, len(payload)), 2 * blocks.repeats(bench)
    with ExitStack() as leaving:

        def puts(mode: str) -> Callable[[], float]:
            settings = {
                "device.bytes": str(BATCHES_RESIDENT * payload.nbytes),
                "wal.durability": mode,
            }
            daemon = leaving.enter_context(Daemon(bench, place, f"durability-{mode}", settings))
            namespace = leaving.enter_context(daemon.connect()).namespace(spec)
            for _ in range(BATCHES_RESIDENT):
                blocks.put(namespace, prompts.fresh(), payload)
            return lambda: blocks.put(namespace, prompts.fresh(), payload)

        none, kill = puts("none"), puts("kill")
        measured = bench.interleave(
            place, {"none": lambda: repeat(none, times), "kill": lambda: repeat(kill, times)}
        )
    name = f"durability.put.{blocks.label(spec)}.kill"
    return measured.line(name, gigabytes_per_s(payload.nbytes), "kill", ["none"], place)


def _power(bench: Bench, spec: KVSpec) -> Line:
    """Several workers at once, as one's blocks are copied while another's are synced."""
    place = bench.two_cores
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    slot = slot_bytes(Tier.DISK, PoolShape(spec.block_bytes, spec.block_tokens))
    settings = {
        "wal.durability": "power",
        "device.bytes": str(BATCHES_RESIDENT * payload.nbytes),
        "disk.bytes": str(BATCHES_ON_DISK * len(payload) * slot),
    }
    name, times = f"durability.put.{blocks.label(spec)}.power", blocks.repeats(bench)
    with ExitStack() as leaving:
        daemon = leaving.enter_context(Daemon(bench, place, name, settings))
        raw = leaving.enter_context(RawFile(bench, len(payload) * slot, payload, slot))
        workers = [
            _Worker(leaving.enter_context(daemon.connect()).namespace(spec), spec, share, number)
            for number, share in enumerate(_shares(payload))
        ]
        # Until every slot was written once, the file system still allocates.
        for _ in range(BATCHES_ON_DISK):
            _together(workers)
            raw.write()
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: repeat(lambda: _together(workers), times),
                "pwritev + fdatasync": lambda: repeat(raw.write, times),
            },
        )
    unit = gigabytes_per_s(payload.nbytes)
    note = f"{len(workers)} workers"
    return measured.line(name, unit, "tierkv", ["pwritev + fdatasync"], place, note=note)


def _shares(payload: U8) -> list[U8]:
    """The payload in equal parts, one for each worker."""
    size = len(payload) // WORKERS
    ends = [*range(size, len(payload), size)][: WORKERS - 1]
    return [payload[at:end] for at, end in zip([0, *ends], [*ends, len(payload)], strict=True)]


class _Worker:
    def __init__(self, namespace: Namespace, spec: KVSpec, payload: U8, number: int) -> None:
        self._namespace = namespace
        self._payload = payload
        self._prompts = blocks.Prompts(spec, len(payload), first_seed=number << 32)

    def put(self) -> None:
        """Cache the worker's share, acknowledged as durable."""
        blocks.put(self._namespace, self._prompts.fresh(), self._payload)


def _together(workers: list[_Worker]) -> float:
    threads = [threading.Thread(target=worker.put) for worker in workers]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began
