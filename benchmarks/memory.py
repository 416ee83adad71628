"""The memory of the device tier: its first fill, and what attaching to it costs a worker.

``python -m benchmarks.memory [--mib N] [--rounds N] [--json FILE]`` prints ratios of medians within
a round, like the other workloads, against a plain copy of the same blocks and against
``populate.c``. Every round has daemons of its own: an arena is fresh only once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import tierkv
from benchmarks.harness import child_environment
from tierkv.client.sync import Namespace
from tierkv.core.ids import U8

MIB = 1 << 20
SOURCE = Path(__file__).with_name("populate.c")
WAIT_S = 120.0

BLOCK_KIB = (64, 1024)
BATCH_BYTES = 16 * MIB


def spec(block_kib: int) -> tierkv.KVSpec:
    """A model with blocks of that size."""
    return tierkv.KVSpec(
        model="memory", layers=block_kib // 16, kv_heads=4, head_dim=64, dtype="bfloat16"
    )


class Daemon:
    """``tierkv serve`` with an empty arena in memory; a context manager."""

    def __init__(self, device_bytes: int, *, prefault: bool, huge: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tierkv-memory-"))
        self.arenas = Path(tempfile.mkdtemp(prefix="tierkv-memory-", dir="/dev/shm"))
        self._huge = huge
        if huge:
            mount = ["mount", "-t", "tmpfs", "-o", "huge=advise", "tmpfs", str(self.arenas)]
            subprocess.run(mount, check=True)
        self.socket = self._folder / "s"
        settings = {
            "server.socket": self.socket,
            "server.state_dir": self._folder / "state",
            "arena.dir": self.arenas,
            "arena.prefault": "on" if prefault else "off",
            "device.bytes": device_bytes,
            "host.bytes": 0,
            "disk.bytes": 0,
            "metrics.tcp": "",
            "metrics.socket": "",
        }
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tierkv", "serve", *flags],
            env=child_environment(),
            stdout=self._log,
            stderr=self._log,
        )

    def connect(self, *, populate: bool) -> tierkv.Client:
        """A client; waits for the daemon."""
        return tierkv.connect(self.socket, timeout_s=WAIT_S, populate=populate)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        if self._huge:
            subprocess.run(["umount", "--lazy", str(self.arenas)], check=True)
        shutil.rmtree(self.arenas)
        shutil.rmtree(self._folder)


@dataclass
class Samples:
    """What was measured, seconds by variant, one a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, variant: str, seconds: float) -> None:
        """One more."""
        self.seconds.setdefault(variant, []).append(seconds)

    def ratio(self, variant: str, reference: str) -> float:
        """How much longer ``variant`` took than ``reference``, the median of the rounds."""
        pairs = zip(self.seconds[variant], self.seconds[reference], strict=True)
        return statistics.median(one / other for one, other in pairs)

    def median(self, variant: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[variant])


def wait_until(ready: Callable[[], bool], pause_s: float = 0.001) -> None:
    """Wait for background work."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError("the memory did not get ready")
        time.sleep(pause_s)


def prefaulted(cache: tierkv.Client) -> bool:
    """Whether the daemon has taken the device tier's memory."""
    return bool(cache.stat()["memory"]["device"]["prefault"] == "done")


def fill(namespace: Namespace, payload: U8, batches: int) -> float:
    """Put ``batches`` times ``payload`` (u8 [blocks, bytes]) into free slots, in place; seconds."""
    tokens = namespace.spec.block_tokens * len(payload)
    slots = payload.shape[1]
    start = time.perf_counter()
    for batch in range(batches):
        with namespace.begin([]) as sequence:
            sequence.reserve(tokens)
            namespace.pool[sequence.block_table, :slots] = payload
            sequence.append(np.arange(tokens, dtype=np.uint32) + batch * tokens)
    return time.perf_counter() - start


def copy(payload: U8, target: U8, batches: int) -> float:
    """The same by a plain copy into private memory that was written before; seconds."""
    start = time.perf_counter()
    for batch in range(batches):
        at = batch % len(target)
        target[at] = payload
    return time.perf_counter() - start


def measure_fill(block_kib: int, size_bytes: int, *, huge: bool, rounds: int) -> Samples:
    """Fill a fresh arena: untouched, with the daemon's prefault, and with the worker's mapping."""
    block_bytes = block_kib * 1024
    payload = np.random.default_rng(1).integers(
        0, 256, (BATCH_BYTES // block_bytes, block_bytes), np.uint8
    )
    target = np.zeros((8, *payload.shape), np.uint8)
    batches = size_bytes // BATCH_BYTES
    found = Samples()
    for _ in range(rounds):
        found.add("copy", copy(payload, target, batches))
        for variant, prefault, populate in (
            ("untouched", False, False),
            ("taken by the daemon", True, False),
            ("taken and mapped", True, True),
        ):
            with (
                Daemon(size_bytes, prefault=prefault, huge=huge) as daemon,
                daemon.connect(populate=populate) as cache,
            ):
                namespace = cache.namespace(spec(block_kib))
                if prefault:
                    wait_until(lambda: prefaulted(cache), 0.05)
                wait_until(lambda: not cache.populating)
                found.add(variant, fill(namespace, payload, batches))
                if variant == "taken and mapped":
                    found.add("again", fill(namespace, payload[:, ::-1].copy(), batches))
    return found


def measure_attach(size_bytes: int, *, huge: bool, rounds: int, program: Path) -> Samples:
    """Connect, map and populate an arena whose memory exists, against the same in C."""
    found = Samples()
    with Daemon(size_bytes, prefault=True, huge=huge) as daemon:
        with daemon.connect(populate=False) as cache:
            cache.namespace(spec(64))
            wait_until(lambda: prefaulted(cache), 0.05)
            print("memory", cache.stat()["memory"]["device"], file=sys.stderr)
        arena = daemon.arenas / "device.arena"
        for _ in range(rounds):
            command = [program, arena, "0", str(size_bytes)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.add("C", int(done.stdout) / 1e9)
            start = time.perf_counter()
            with daemon.connect(populate=True) as cache:
                namespace = cache.namespace(spec(64))
                found.add("usable", time.perf_counter() - start)
                wait_until(lambda: not cache.populating)
                found.add("populated", time.perf_counter() - start)
                del namespace
            with daemon.connect(populate=False) as cache:
                pool = cache.namespace(spec(64)).pool
                start = time.perf_counter()
                pool[:, ::4096] = 0
                found.add("first touch", time.perf_counter() - start)
                start = time.perf_counter()
                pool[:, ::4096] = 0
                found.add("second touch", time.perf_counter() - start)
    return found


@contextmanager
def compiled() -> Iterator[Path]:
    """The C program."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "populate"
        subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True)
        yield program


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the arena")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--huge", action="store_true", help="on a tmpfs with huge=advise (root)")
    parser.add_argument("--only", choices=("fill", "attach"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size_bytes, kind = options.mib * MIB, "huge" if options.huge else "4k"
    document: dict[str, dict[str, list[float]]] = {}
    if options.only != "attach":
        for block_kib in BLOCK_KIB:
            found = measure_fill(block_kib, size_bytes, huge=options.huge, rounds=options.rounds)
            name = f"fill.{block_kib}k.{kind}"
            document[name] = found.seconds
            for variant in found.seconds:
                speed = size_bytes / found.median(variant) / 1e9
                share = 1 / found.ratio(variant, "copy")
                print(f"{name:20} {variant:20} {speed:7.2f} GB/s  {share:.2f} of copy")
    if options.only != "fill":
        with compiled() as program:
            found = measure_attach(
                size_bytes, huge=options.huge, rounds=options.rounds, program=program
            )
        name = f"attach.{options.mib}m.{kind}"
        document[name] = found.seconds
        for variant in found.seconds:
            milliseconds, times = found.median(variant) * 1e3, found.ratio(variant, "C")
            print(f"{name:20} {variant:20} {milliseconds:8.2f} ms  {times:.2f}x of C")
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
