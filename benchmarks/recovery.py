"""From kill -9 to serving again, by the size of the store; and how fast the log is replayed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import xxhash
from tierkv_wal import RealStorage, WalReader

from benchmarks.daemon import Daemon, spec_of
from benchmarks.harness import SECONDS, Bench, Line, child_environment, once, thousands_per_s
from benchmarks.lookup import fill
from benchmarks.rebuild import rebuild_line
from benchmarks.wal import SPEC as CYCLE_SPEC
from benchmarks.wal import cycle, prompts
from tierkv.core.ids import Tier
from tierkv.core.records import RECORD
from tierkv.core.state import State
from tierkv.service.store import read_format
from tierkv.tiers.sizes import slot_bytes

IMPORTS = "import tierkv.cli.serve, tierkv.service.daemon"
DEVICE_BYTES = 16 << 20


def run(bench: Bench) -> Iterator[Line]:
    """Blocks stay in the RAM tier, which outlives the process; index and log are on disk."""
    segment_mib = bench.pick(64, 1)
    settings = {"device.bytes": str(DEVICE_BYTES), "wal.segment_bytes": f"{segment_mib} MiB"}
    for blocks in (1000,) if bench.quick else (0, 10_000, 100_000):
        with Daemon(bench, bench.two_cores, f"recovery-{blocks}", settings) as daemon:
            with daemon.connect() as cache:
                fill(cache.namespace(spec_of(64, block_tokens=1)), blocks)
            daemon.kill()
            kept = Kept(daemon)
            yield _start(bench, daemon, kept, blocks)
        if blocks:
            yield _replay(bench, kept, f"recovery.replay.{blocks}.blocks")
    with Daemon(bench, bench.two_cores, "recovery-cycles", settings) as daemon:
        count = bench.pick(5000, 50)
        with daemon.connect() as cache:
            namespace = cache.namespace(CYCLE_SPEC)
            for tokens in prompts(count):
                cycle(namespace, tokens)
        daemon.kill()
        yield _replay(bench, Kept(daemon), f"recovery.replay.{count}.cycles")
    yield rebuild_line(bench)


class Kept:
    """What a killed daemon left, to be recovered again and again."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.folder = daemon.state.with_name(daemon.state.name + "-kept")
        self._copy(daemon.state, self.folder / "state")
        self._copy(daemon.arenas, self.folder / "arenas")

    def put_back(self) -> None:
        """Make it as it was when the daemon was killed."""
        self._daemon.kill()
        for kept, place in (("state", self._daemon.state), ("arenas", self._daemon.arenas)):
            shutil.rmtree(place)
            self._copy(self.folder / kept, place)

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        # The arenas are sparse: cp keeps the holes.
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def _start(bench: Bench, daemon: Daemon, kept: Kept, blocks: int) -> Line:
    place = bench.two_cores
    imports = [sys.executable, "-c", IMPORTS]

    def start() -> float:
        kept.put_back()
        spent = daemon.start()
        with daemon.connect() as cache:
            found = cache.stat()["recovery"]["blocks"]
        if found != blocks:
            raise RuntimeError(f"{found} of {blocks} blocks were recovered")
        return spent

    def imported() -> None:
        bench.reap(bench.spawn(place.server, imports, env=child_environment()))

    measured = bench.interleave(place, {"tierkv": start, "imports": lambda: once(imported)})
    return measured.line(f"recovery.start.{blocks}", SECONDS, "tierkv", ["imports"], place)


def _replay(bench: Bench, kept: Kept, name: str) -> Line:
    """All the log's records into an empty state, in this process."""
    place = bench.same_core
    directory = kept.folder / "state"
    stored = read_format(directory)
    if stored is None:
        raise RuntimeError(f"there is no store in {directory}")
    uuid = stored.store_uuid
    files = sorted((directory / "wal").glob("*.wal"))

    def replay() -> int:
        state = State({Tier.DEVICE: DEVICE_BYTES, Tier.HOST: 0, Tier.DISK: 0}, slot_bytes)
        records = 0
        for frame in WalReader(RealStorage(), str(directory / "wal"), uuid, 0).frames():
            state.apply(frame.records.view(RECORD).reshape(-1))
            records += len(frame.records)
        return records

    def decode() -> None:
        for _ in WalReader(RealStorage(), str(directory / "wal"), uuid, 0).frames():
            pass

    records = replay()
    used = records * RECORD.itemsize

    def read() -> None:
        left = used
        for path in files:
            with path.open("rb") as file:
                content = file.read(left)
            xxhash.xxh3_64_digest(content)
            left -= len(content)

    measured = bench.interleave(
        place,
        {
            "tierkv": lambda: once(replay),
            "frames alone": lambda: once(decode),
            "read + xxh3": lambda: once(read),
        },
    )
    return measured.line(
        name,
        thousands_per_s(records),
        "tierkv",
        ["frames alone", "read + xxh3"],
        place,
        note=f"{records} records",
    )
