"""Beginning on a prefix that has to come up: from host memory, or from disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from tierkv.bench import blocks, raw, worker
from tierkv.bench.daemon import Daemon
from tierkv.bench.harness import Bench, Line, Unit, gigabytes_per_s, repeat
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8, U32, Tier
from tierkv.core.spec import KVSpec
from tierkv.tiers.sizes import slot_bytes
from tierkv.units import KiB, MiB

SIZES = (64 * KiB, 2 * MiB)


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
        self._payload = payload
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
            blocks.check(self._namespace, tokens, self._payload)


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
    on_disk = len(payload) * slot_bytes(Tier.DISK, blocks.shape_of(spec))
    settings = {"device.bytes": str(payload.nbytes), "disk.bytes": str(2 * on_disk)}
    name = f"promote.disk.{blocks.label(spec)}"
    unit = gigabytes_per_s(payload.nbytes)
    with Daemon(bench, bench.two_cores, name, settings) as daemon, daemon.connect() as cache:
        turns = _Turns(cache.namespace(spec), payload)
        cache.flush()
        files = sorted((daemon.state / "data").glob("*.seg"))
        ring = blocks.Ring(payload, 2)
        for warm in (True, False):
            yield _read(bench, name, unit, turns, ring, files, on_disk, warm=warm)
        turns.check()


def _read(
    bench: Bench,
    name: str,
    unit: Unit,
    turns: _Turns,
    ring: blocks.Ring,
    files: list[Path],
    on_disk: int,
    *,
    warm: bool,
) -> Line:
    place, times = bench.two_cores, blocks.repeats(bench)
    buffer = memoryview(bytearray(raw.CALL_BYTES))

    def prepared() -> None:
        if not warm:
            raw.drop_page_cache(files)

    def ours() -> float:
        prepared()
        return turns.bring()

    def plain() -> float:
        prepared()
        return bench.on(place.server, lambda: raw.read(files, on_disk, buffer))

    measured = bench.interleave(
        place,
        {
            "tierkv": lambda: repeat(ours, times),
            "preadv": lambda: repeat(plain, times),
            "memcpy": lambda: repeat(lambda: bench.on(place.server, ring.copy), times),
        },
    )
    against = ["preadv", "memcpy"] if warm else ["preadv"]
    cache = "warm" if warm else "cold"
    return measured.line(f"{name}.{cache}", unit, "tierkv", against, place)
