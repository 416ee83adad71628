"""Beginning on a prefix that has to come up: from host memory, or from disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tierkv.bench import blocks, raw, worker
from tierkv.bench.bars import Bar, Reaches
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import Bench, Line, Sample, gigabytes_per_s, repeat
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8, U32, Tier
from tierkv.core.spec import KVSpec
from tierkv.tiers.sizes import slot_bytes
from tierkv.units import KiB, MiB

SIZES = (64 * KiB, 2 * MiB)
SHARE = 0.9


def run(bench: Bench) -> Iterator[Line]:
    """Two prompts take turns in a device tier that has room for one of them."""
    for spec in blocks.specs(bench, SIZES):
        yield _from_host(bench, spec)
        yield from _from_disk(bench, spec)


class _Turns:
    """The two prompts; each ``bring`` brings one up, and the other one has to leave."""

    def __init__(self, namespace: Namespace, payload: U8) -> None:
        prompts = blocks.Prompts(namespace.spec, len(payload))
        self._namespace = namespace
        self.payload = payload
        self._prompts = [prompts.fresh(), prompts.fresh()]
        for tokens in self._prompts:
            worker.put(namespace, tokens, payload)

    def bring(self) -> float:
        """Seconds until the prompt is in the device tier."""
        tokens: U32 = self._prompts[0]
        self._prompts.reverse()
        began = time.perf_counter()
        sequence = self._namespace.begin(tokens, keep=0)
        spent = time.perf_counter() - began
        found = sequence.cached_from
        sequence.end()
        if found.tokens != len(tokens) or found.device:
            raise RuntimeError(f"the prompt was to come up from below, but: {found}")
        return spent

    def check(self) -> None:
        """Raise CorruptionError unless both prompts come up with every byte as it was put."""
        for tokens in self._prompts:
            blocks.check(self._namespace, tokens, self.payload)


def _from_host(bench: Bench, spec: KVSpec) -> Line:
    place = bench.two_cores
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    ring, times = blocks.Ring(payload, 2), blocks.repeats(bench)
    settings = {"device.bytes": str(payload.nbytes), "host.bytes": str(2 * payload.nbytes)}
    name = f"promote.host.{blocks.label(spec)}"
    with Daemon(bench, place, name, settings) as daemon, daemon.connect() as cache:
        turns = _Turns(cache.namespace(spec), payload)
        turns.bring()
        measured = bench.interleave(
            place,
            {
                "tierkv": lambda: repeat(turns.bring, times),
                "memcpy": lambda: repeat(lambda: bench.on(place.server, ring.copy), times),
                "memcpy + xxh3": lambda: repeat(
                    lambda: bench.on(place.server, ring.copy_and_check), times
                ),
            },
        )
        turns.check()
    unit = gigabytes_per_s(payload.nbytes)
    return measured.line(name, unit, "tierkv", ["memcpy + xxh3", "memcpy"], place)


def _from_disk(bench: Bench, spec: KVSpec) -> Iterator[Line]:
    payload = blocks.some_payload(spec, blocks.batch_blocks(bench, spec))
    slot = slot_bytes(Tier.DISK, blocks.shape_of(spec))
    on_disk = len(payload) * slot
    settings = {"device.bytes": str(payload.nbytes), "disk.bytes": str(2 * on_disk)}
    name = f"promote.disk.{blocks.label(spec)}"
    with Daemon(bench, bench.two_cores, name, settings) as daemon, daemon.connect() as cache:
        turns = _Turns(cache.namespace(spec), payload)
        cache.flush()
        files = sorted((daemon.state / "data").glob("*.seg"))
        yield _warm(bench, name, turns, files, on_disk)
        slots = raw.first_slots(files, slot, len(payload))
        yield _cold(bench, name, turns, raw.RingFile(bench, slots, slot), files)
        turns.check()


def _warm(bench: Bench, name: str, turns: _Turns, files: list[Path], on_disk: int) -> Line:
    """From the page cache, if the daemon reads through it."""
    place, times = bench.two_cores, blocks.repeats(bench)
    ring = blocks.Ring(turns.payload, 2)
    read = _preadv(bench, files, on_disk)
    measured = bench.interleave(
        place,
        {
            "tierkv": lambda: repeat(turns.bring, times),
            "preadv": lambda: repeat(read, times),
            "memcpy": lambda: repeat(lambda: bench.on(place.server, ring.copy), times),
        },
    )
    unit = gigabytes_per_s(turns.payload.nbytes)
    return measured.line(f"{name}.warm", unit, "tierkv", ["preadv", "memcpy"], place)


def _cold(bench: Bench, name: str, turns: _Turns, ring: raw.RingFile, files: list[Path]) -> Line:
    """From the device."""
    place, times = bench.two_cores, blocks.repeats(bench)
    read = _preadv(bench, files, ring.bytes)

    def after_dropping(call: Callable[[], float]) -> float:
        raw.drop_page_cache(files)
        return call()

    variants: dict[str, Callable[[], Sample]] = {
        "tierkv": lambda: repeat(lambda: after_dropping(turns.bring), times),
        "preadv": lambda: repeat(lambda: after_dropping(read), times),
    }
    bars: list[Bar] = []
    if ring.is_there():
        variants[ring.name] = lambda: repeat(lambda: after_dropping(ring.read), times)
        if turns.payload.shape[1] == SIZES[0]:
            bars = [Reaches(SHARE, ring.name)]
    measured = bench.interleave(place, variants)
    unit = gigabytes_per_s(turns.payload.nbytes)
    return measured.line(f"{name}.cold", unit, "tierkv", list(variants)[1:], place, bars=bars)


def _preadv(bench: Bench, files: list[Path], size_bytes: int) -> Callable[[], float]:
    buffer = memoryview(bytearray(raw.CALL_BYTES))
    return lambda: bench.on(bench.two_cores.server, lambda: raw.read(files, size_bytes, buffer))
