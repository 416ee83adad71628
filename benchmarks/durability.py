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
WORKERS = (1, 4)


def run(bench: Bench) -> Iterator[Line]:
    """With small and with large blocks."""
    for spec in blocks.specs(bench):
        yield _kill(bench, spec)
        for workers in WORKERS:
            yield _power(bench, spec, workers)


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


def _power(bench: Bench, spec: KVSpec, workers: int) -> Line:
    """Workers that put without a pause: while one's blocks are synced, others' are written."""
    place = bench.two_cores
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    slot = slot_bytes(Tier.DISK, PoolShape(spec.block_bytes, spec.block_tokens))
    # A batch in work and one to evict for each worker. The disk holds more than memory does, or
    # blocks would have to be written again before they leave memory.
    resident = 2 * workers
    settings = {
        "wal.durability": "power",
        "device.bytes": str(resident * payload.nbytes),
        "disk.bytes": str((resident + 1) * len(payload) * slot),
    }
    name = f"durability.put.{blocks.label(spec)}.power.x{workers}"
    with ExitStack() as leaving:
        daemon = leaving.enter_context(Daemon(bench, place, name, settings))
        raw = leaving.enter_context(RawFile(bench, payload, slot, batches=resident + 1))
        all_workers = [
            _Worker(leaving.enter_context(daemon.connect()).namespace(spec), spec, payload, number)
            for number in range(workers)
        ]
        # Until every slot was written once, the file system still allocates.
        for _ in range(resident + 1):
            raw.write()
        for _ in range(3):
            _together(all_workers, 1)
        puts = bench.pick(12, 4) // workers
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: _together(all_workers, puts),
                "pwritev + fdatasync": lambda: repeat(raw.write, blocks.repeats(bench)),
            },
        )
    unit = gigabytes_per_s(payload.nbytes)
    return measured.line(name, unit, "tierkv", ["pwritev + fdatasync"], place)


class _Worker:
    def __init__(self, namespace: Namespace, spec: KVSpec, payload: U8, number: int) -> None:
        self._namespace = namespace
        self._payload = payload
        self._prompts = blocks.Prompts(spec, len(payload), first_seed=number << 32)

    def put(self, times: int) -> None:
        """Cache fresh batches, one after the other, each acknowledged as durable."""
        for _ in range(times):
            blocks.put(self._namespace, self._prompts.fresh(), self._payload)


def _together(workers: list[_Worker], puts: int) -> float:
    """Each worker puts so many batches; seconds for one batch on average."""
    threads = [threading.Thread(target=worker.put, args=[puts]) for worker in workers]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / (puts * len(workers))
