"""The disk tier alone, in this process: blocks in slots all over a segment, none beside another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
from tierkv_wal import RealStorage

from tierkv.bench import raw
from tierkv.bench.bars import Bar, Reaches
from tierkv.bench.daemon import SHM
from tierkv.bench.harness import Bench, Line, Sample, gigabytes_per_s
from tierkv.core.ids import U32, U64
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk_io import open_disk_io
from tierkv.tiers.entry import make_entries
from tierkv.units import KiB, MiB

BLOCK_BYTES = 64 * KiB
BLOCK_TOKENS = 16
SEGMENT_BYTES = 256 * MiB
SHARE = 0.9


def run(bench: Bench) -> Iterator[Line]:
    """Random reads into an arena, each block checked, against the same reads in C, unchecked."""
    in_memory = SHM if SHM.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=bench.folder) as folder,
        tempfile.TemporaryDirectory(dir=in_memory) as memory,
        closing(_disk(folder)) as disk,
        closing(_arena(memory, bench.pick(1024, 32))) as arena,
    ):
        yield _read(bench, disk, arena)


def _disk(folder: str) -> DiskTier:
    disk = DiskTier(
        f"{folder}/data",
        SEGMENT_BYTES,
        SEGMENT_BYTES,
        bytes(16),
        RealStorage(),
        lambda storage, directory: open_disk_io(storage, directory, read_by="auto", direct="auto"),
    )
    disk.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    return disk


def _arena(folder: str, blocks: int) -> Arena:
    arena = Arena.open(ArenaFiles(Path(folder)), "target", blocks * BLOCK_BYTES, bytes(16), "")
    arena.add_pool(0, BLOCK_BYTES, BLOCK_TOKENS)
    return arena


def _read(bench: Bench, disk: DiskTier, arena: Arena) -> Line:
    place, count = bench.two_cores, len(arena.slots(0))
    slots, ids = _write(disk, arena)
    into = np.arange(count, dtype=np.uint32)
    path, slot = Path(disk.place(0, 0)[0]), disk.slot_bytes(0)

    def ours() -> None:
        if not disk.read(0, slots, ids, arena, into).ok.all():
            raise RuntimeError("a block did not come back")

    def after_dropping(call: Callable[[], float]) -> float:
        raw.drop_page_cache([path])
        return call()

    variants: dict[str, Callable[[], Sample]] = {
        "tierkv": lambda: after_dropping(lambda: bench.on(place.server, ours))
    }
    bars: list[Bar] = []
    # In the order in which the tier asks for them.
    ring = raw.RingFile(bench, {path: np.sort(slots)}, slot)
    if ring.is_there():
        variants[ring.name] = lambda: after_dropping(ring.read)
        bars = [Reaches(SHARE, ring.name)]
    measured = bench.interleave(place, variants)
    unit, references = gigabytes_per_s(count * BLOCK_BYTES), list(variants)[1:]
    name = "promote.read.64k.d32"
    return measured.line(name, unit, "tierkv", references, place, bars=bars, note=disk.io)


def _write(disk: DiskTier, arena: Arena) -> tuple[U32, U64]:
    """Fill slots, of which none lies beside another; returns them and their blocks' ids."""
    count = len(arena.slots(0))
    random = np.random.default_rng(count)
    slots = (2 * random.permutation(disk.slot_count(0) // 2)[:count]).astype(np.uint32)
    ids = np.arange(1, count + 1, dtype=np.uint64)
    arena.payload(0)[:] = random.integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    arena.table(0)[:] = make_entries(
        ids=ids,
        parents=0,
        hash_hi=ids,
        hash_lo=ids,
        tokens=np.zeros((count, BLOCK_TOKENS), np.uint32),
        length=BLOCK_BYTES,
        digest=b"of the namespace",
    )
    result = disk.write(0, slots, arena, np.arange(count, dtype=np.uint32))
    if result.error is not None:
        raise result.error
    disk.sync()
    return slots, ids
