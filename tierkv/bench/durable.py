"""What durability costs: puts by copy, against mode ``none`` and against the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from tierkv.bench import blocks, worker
from tierkv.bench.bars import AtLeast, Either, Reaches
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import Bench, Line, gigabytes_per_s, once, repeat
from tierkv.bench.raw import RawFile
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8, Tier
from tierkv.core.spec import KVSpec
from tierkv.tiers.sizes import slot_bytes
from tierkv.units import KiB, MiB

SIZES = (MiB, 64 * KiB)
BATCHES = 3
WORKERS = (1, 4)
KILL_GB_S, KILL_SHARE = 5.0, 0.9
POWER_GB_S, POWER_SHARE = 2.3, 0.8


def run(bench: Bench) -> Iterator[Line]:
    """With blocks of 1 MiB and 64 KiB."""
    for spec in blocks.specs(bench, SIZES):
        yield _kill(bench, spec)
        for workers in WORKERS:
            yield _power(bench, spec, workers)


def _kill(bench: Bench, spec: KVSpec) -> Line:
    """The same puts by two daemons that differ in nothing but the mode, turn by turn."""
    place = bench.same_core
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    prompts, times = blocks.Prompts(spec, len(payload)), 2 * blocks.repeats(bench)
    with ExitStack() as leaving:

        def namespace_of(mode: str) -> Namespace:
            settings = {
                "device.bytes": str(2 * BATCHES * payload.nbytes),
                "wal.durability": mode,
            }
            daemon = leaving.enter_context(Daemon(bench, place, f"durable-{mode}", settings))
            return leaving.enter_context(daemon.connect()).namespace(spec)

        def puts(namespace: Namespace) -> Callable[[], float]:
            for _ in range(BATCHES):
                worker.put(namespace, prompts.fresh(), payload)
            return lambda: blocks.timed_put(namespace, prompts.fresh(), payload)

        none, kill = namespace_of("none"), namespace_of("kill")
        held = [blocks.HeldSlots(namespace, payload, BATCHES) for namespace in (none, kill)]
        none_puts, kill_puts = puts(none), puts(kill)
        measured = bench.interleave(
            place,
            {
                "none": lambda: repeat(none_puts, times),
                "kill": lambda: repeat(kill_puts, times),
                "numpy copy": lambda: repeat(lambda: once(held[1].put), times),
            },
        )
        tokens = prompts.fresh()
        worker.put(kill, tokens, payload)
        blocks.check(kill, tokens, payload)
    return measured.line(
        f"put.{blocks.label(spec)}.kill",
        gigabytes_per_s(payload.nbytes),
        "kill",
        ["none", "numpy copy"],
        place,
        bars=[AtLeast(KILL_GB_S), Reaches(KILL_SHARE, "none")] if spec.block_bytes == MiB else (),
        note=f"{len(payload)} blocks a call",
    )


def _power(bench: Bench, spec: KVSpec, workers: int) -> Line:
    """Workers that put without a pause: while one's blocks are synced, others' are written."""
    place = bench.two_cores
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    slot = slot_bytes(Tier.DISK, blocks.shape_of(spec))
    # A batch in work and one to evict for each worker. The disk holds more than memory does, or
    # blocks would have to be written again before they leave memory.
    resident = 2 * workers
    settings = {
        "wal.durability": "power",
        "device.bytes": str(resident * payload.nbytes),
        "disk.bytes": str((resident + 1) * len(payload) * slot),
    }
    name = f"put.{blocks.label(spec)}.power.x{workers}"
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
        for one in all_workers:
            one.check()
    return measured.line(
        name,
        gigabytes_per_s(payload.nbytes),
        "tierkv",
        ["pwritev + fdatasync"],
        place,
        bars=[Either(AtLeast(POWER_GB_S), Reaches(POWER_SHARE, "pwritev + fdatasync"))]
        if spec.block_bytes == MiB
        else (),
        note=f"{len(payload)} blocks a call",
    )


class _Worker:
    def __init__(self, namespace: Namespace, spec: KVSpec, payload: U8, number: int) -> None:
        self._namespace = namespace
        self._payload = payload
        self._prompts = blocks.Prompts(spec, len(payload), first_seed=number << 32)

    def put(self, times: int) -> None:
        """Cache fresh batches, one after the other, each acknowledged as durable."""
        for _ in range(times):
            worker.put(self._namespace, self._prompts.fresh(), self._payload)

    def check(self) -> None:
        """Raise CorruptionError unless the last batch is there, byte by byte."""
        blocks.check(self._namespace, self._prompts.last, self._payload)


def _together(workers: list[_Worker], puts: int) -> float:
    """Each worker puts so many batches; seconds for one batch on average."""
    threads = [threading.Thread(target=worker.put, args=[puts]) for worker in workers]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - began) / (puts * len(workers))
