"""Arenas with blocks in them, every way to read and write, and small file systems to fill up."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.sums import checksum
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk_io import DiskIO, open_disk_io, serial_io
from tierkv.tiers.entry import make_entries
from tierkv.tiers.linux import takes_direct_io
from tierkv.tiers.storage import BlockStorage
from tierkv.tiers.uring import Ring

STORE = bytes(range(16))
BOOT = "11111111-2222-3333-4444-555555555555"

OpenArena = Callable[..., Arena]
PutBlocks = Callable[..., np.ndarray]
MountTmpfs = Callable[..., Path]
OpenIO = Callable[[BlockStorage, str], DiskIO]

MAY_SKIP = pytest.mark.may_skip_in_ci


def require_ring() -> None:
    """Skip the test where the kernel gives no ring."""
    try:
        Ring().close()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


@pytest.fixture(
    scope="module",
    params=[
        "serial-off",
        "threads-off",
        pytest.param("threads-on", marks=MAY_SKIP),
        pytest.param("uring-off", marks=MAY_SKIP),
        pytest.param("uring-on", marks=MAY_SKIP),
    ],
)
def open_io(request: pytest.FixtureRequest) -> OpenIO:
    """Each way to read, past the page cache ("on") and through it."""
    read_by, direct = request.param.split("-")
    if read_by == "serial":
        return serial_io
    if read_by == "uring":
        require_ring()
    if direct == "on" and not takes_direct_io(tempfile.gettempdir()):
        pytest.skip(f"no O_DIRECT in {tempfile.gettempdir()}")
    return lambda storage, directory: open_disk_io(
        storage, directory, read_by=read_by, direct=direct
    )


@pytest.fixture
def open_arena(tmp_path: Path) -> Iterator[OpenArena]:
    """Opens arenas in the test's directory and closes them at its end."""
    opened: list[Arena] = []

    def make(
        name: str = "device",
        budget_bytes: int = 1 << 20,
        directory: Path = tmp_path,
        store: bytes = STORE,
        boot_id: str = BOOT,
    ) -> Arena:
        arena = Arena.open(ArenaFiles(directory), name, budget_bytes, store, boot_id)
        opened.append(arena)
        return arena

    yield make
    for arena in opened:
        arena.close()


@pytest.fixture
def put_blocks() -> PutBlocks:
    """Writes random blocks into an arena's slots; returns their payload, shape [n, block_bytes]."""

    def put(
        arena: Arena, pool: int, slots: list[int], ids: list[int], *, summed: bool = True
    ) -> np.ndarray:
        rng = np.random.default_rng(ids)
        size, tokens = arena.block_bytes(pool), arena.block_tokens(pool)
        payload = rng.integers(0, 256, (len(slots), size), np.uint8)
        arena.payload(pool)[slots] = payload
        sums = [checksum(block) if summed else (0, 0) for block in payload]
        arena.table(pool)[slots] = make_entries(
            ids=np.array(ids, np.uint64),
            parents=0,
            hash_hi=rng.integers(0, 2**63, len(slots)),
            hash_lo=rng.integers(0, 2**63, len(slots)),
            tokens=rng.integers(0, 2**32, (len(slots), tokens), np.uint32),
            length=size,
            digest=bytes(range(16)),
            sum_hi=np.array([high for high, _ in sums], np.uint64),
            sum_lo=np.array([low for _, low in sums], np.uint64),
        )
        return payload

    return put


@pytest.fixture
def mount_tmpfs() -> Iterator[MountTmpfs]:
    """Mounts tmpfs of a given size, with further options, and unmounts them at the end."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    mounted: list[Path] = []

    def mount(size_bytes: int, *options: str) -> Path:
        path = Path(tempfile.mkdtemp(prefix="tierkv-test-"))
        wanted = ",".join([f"size={size_bytes}", *options])
        command = ["mount", "-t", "tmpfs", "-o", wanted, "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            path.rmdir()
            pytest.skip(f"this machine mounts no tmpfs: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        shutil.rmtree(path, ignore_errors=True)
