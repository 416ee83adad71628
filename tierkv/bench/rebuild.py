"""How fast an index is made anew from slot headers, in this process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from tierkv_wal import RealStorage

from tierkv.bench.harness import Bench, Line, once, thousands_per_s
from tierkv.core.ids import Tier
from tierkv.core.prefix import chain_hashes
from tierkv.core.spec import PAGE
from tierkv.core.state import PoolShape, State
from tierkv.service.rebuild import FoundCopies, LastWords, read_disk, rebuild
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.entry import make_entries, split_hashes
from tierkv.tiers.sizes import slot_bytes

SHAPE = PoolShape(block_bytes=64, block_tokens=16)
CHAIN_BLOCKS = 512
SEGMENT_BYTES = 64 << 20


def rebuild_line(bench: Bench) -> Line:
    """All headers of a disk tier into an empty state; the payload is small, as nobody reads it."""
    blocks, place = bench.pick(100_000, 1000), bench.same_core
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        folder = Path(name)
        _fill(folder, blocks)
        files = sorted((folder / "data").iterdir())

        def ours() -> None:
            disk = _disk(folder, blocks)
            found = FoundCopies()
            read_disk(found, disk, lambda _done, _all: None)
            state = State(dict.fromkeys(Tier, 1 << 50), slot_bytes)
            for records in rebuild(found.all(), found.shapes, LastWords()).records:
                state.apply(records)
            disk.close()
            if len(state.live_rows()) != blocks:
                raise RuntimeError(f"{len(state.live_rows())} of {blocks} blocks were found")

        def pread() -> None:
            for path in files:
                fd = os.open(path, os.O_RDONLY)
                for at in range(0, os.fstat(fd).st_size, 2 * PAGE):
                    os.pread(fd, PAGE, at)
                os.close(fd)

        measured = bench.interleave(
            place, {"tierkv": lambda: once(ours), "pread": lambda: once(pread)}
        )
    unit = thousands_per_s(blocks)
    return measured.line(f"replay.rebuild.{blocks}", unit, "tierkv", ["pread"], place)


def _disk(folder: Path, blocks: int) -> DiskTier:
    budget = blocks * slot_bytes(Tier.DISK, SHAPE)
    return DiskTier(str(folder / "data"), budget, SEGMENT_BYTES, bytes(16), RealStorage())


def _fill(folder: Path, blocks: int) -> None:
    """Blocks in every slot of a disk tier, in chains."""
    arena = Arena.open(
        ArenaFiles(folder), "source", CHAIN_BLOCKS * SHAPE.block_bytes, bytes(16), ""
    )
    disk = _disk(folder, blocks)
    for tier in (arena, disk):
        tier.add_pool(0, SHAPE.block_bytes, SHAPE.block_tokens)
    generator = np.random.default_rng(blocks)
    for first in range(0, blocks, CHAIN_BLOCKS):
        count = min(CHAIN_BLOCKS, blocks - first)
        tokens = generator.integers(0, 2**31, (count, SHAPE.block_tokens)).astype(np.uint32)
        hashes = chain_hashes(bytes(16), tokens.reshape(-1), SHAPE.block_tokens)
        hash_hi, hash_lo = split_hashes(hashes.tobytes())
        ids = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
        slots = np.arange(count, dtype=np.uint32)
        arena.table(0)[:count] = make_entries(
            ids=ids,
            parents=np.where(slots == 0, 0, ids - 1),
            hash_hi=hash_hi,
            hash_lo=hash_lo,
            tokens=tokens,
            length=SHAPE.block_bytes,
            digest=b"of the namespace",
        )
        disk.write(0, slots + np.uint32(first), arena, slots)
    disk.close()
    arena.close()
