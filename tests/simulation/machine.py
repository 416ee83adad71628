"""A machine that loses power: simulated files, an index that commits like LMDB, real arenas.

``crash`` gives the machine as it may look afterwards. After "kill" the arenas are there as they
were; after "power" they are gone, and of the files there is any legal part.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
from tierkv_wal import SimulatedStorage

from tierkv.core.blocks import VALUE
from tierkv.errors import CorruptionError
from tierkv.tiers.arena import Arena
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk_io import DiskIO, serial_io
from tierkv.tiers.index import BlockRows, IndexChanges, IndexContents
from tierkv.tiers.storage import BlockStorage

SHM = Path("/dev/shm")
STATE_DIR = Path("/state")
_FILE = "data"

CrashKind = Literal["kill", "power"]


@dataclass
class _Tables:
    """What LMDB would hold."""

    rows: dict[int, bytes] = field(default_factory=dict)
    named: dict[str, dict[int, bytes]] = field(
        default_factory=lambda: {"sequences": {}, "leases": {}, "namespaces": {}}
    )
    meta: dict[str, int | bytes] = field(default_factory=dict)

    def apply(self, changes: IndexChanges) -> None:
        for row in changes.deleted_rows.tolist():
            self.rows.pop(row, None)
        for row, value in zip(changes.rows.tolist(), changes.values, strict=True):
            self.rows[row] = value.tobytes()
        for name, table in self.named.items():
            _update(table, getattr(changes, name))
        _update(self.meta, changes.meta)


def _update(table: dict[Any, Any], changes: Any) -> None:
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value


class SimulatedIndex:
    """A ``CheckpointIndex`` on simulated files: a commit is one new file under the old name.

    LMDB has its own tests. What matters here is what it promises: a commit is there as a whole and
    durable once it has returned, and before that it is there as a whole or not at all.
    """

    map_bytes = 1 << 20

    def __init__(self, storage: SimulatedStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._tables = _Tables()
        if os.path.basename(path) not in storage.listdir(os.path.dirname(path)):
            storage.mkdir(path)
            storage.fsync_dir(os.path.dirname(path))
        if _FILE in storage.listdir(path):
            self._tables = pickle.loads(self._read(f"{path}/{_FILE}"))

    def commit(self, changes: IndexChanges) -> None:
        draft, path = f"{self._path}/{_FILE}.tmp", f"{self._path}/{_FILE}"
        after: _Tables = pickle.loads(pickle.dumps(self._tables))
        after.apply(changes)
        fd = self._storage.open(draft, create=True, truncate=True)
        body = pickle.dumps(after)
        self._storage.pwrite(fd, hashlib.sha256(body).digest() + body, 0)
        self._storage.fdatasync(fd)
        self._storage.close(fd)
        self._storage.rename(draft, path)
        self._storage.fsync_dir(self._path)
        self._tables = after

    def load(self) -> IndexContents:
        named = {name: dict(table) for name, table in self._tables.named.items()}
        return IndexContents(meta=dict(self._tables.meta), **named)

    def blocks(self) -> Iterator[BlockRows]:
        stored = self._tables.rows
        if stored:
            rows = sorted(stored)
            values = np.frombuffer(b"".join(stored[row] for row in rows), VALUE)
            yield BlockRows(np.array(rows, np.uint32), values.copy())

    def close(self) -> None:
        pass

    def _read(self, path: str) -> bytes:
        fd = self._storage.open(path, writable=False)
        data = self._storage.pread(fd, self._storage.size(path), 0)
        self._storage.close(fd)
        check, body = data[:32], data[32:]
        if hashlib.sha256(body).digest() != check:
            raise CorruptionError(f"the index {path} is damaged", path=path, offset=0)
        return body


class SimulatedMachine:
    """See ``tierkv.service.machine.Machine``. Close it to remove its arenas."""

    def __init__(self, storage: SimulatedStorage | None = None) -> None:
        if storage is None:
            storage = SimulatedStorage()
            storage.mkdir(str(STATE_DIR))
            storage.fsync_dir("/")
        self.storage = storage
        self._folder: Path | None = None
        self._arenas: list[Arena] = []

    def open_index(self, path: Path, map_bytes: int) -> SimulatedIndex:
        return SimulatedIndex(self.storage, str(path))

    def open_disk_io(
        self, storage: BlockStorage, directory: str, read_by: str, direct: str
    ) -> DiskIO:
        return serial_io(storage, directory)

    def open_arena(self, directory: Path, name: str, budget_bytes: int, store: bytes) -> Arena:
        arena = Arena.open(ArenaFiles(self.folder), name, budget_bytes, store, "boot")
        self._arenas.append(arena)
        return arena

    def forget_arena(self, directory: Path, name: str) -> None:
        ArenaFiles(self.folder).drop(name)

    def is_alive(self, pid: int, start_time: int) -> bool:
        return True

    @property
    def folder(self) -> Path:
        """Where the arenas lie; none are left behind by another machine."""
        if self._folder is None:
            shm = SHM if os.access(SHM, os.W_OK) else None
            self._folder = Path(tempfile.mkdtemp(prefix="tierkv-simulated-", dir=shm))
        return self._folder

    def crash(self, kind: CrashKind, rng: Random) -> SimulatedMachine:
        """The machine as it may look after a crash now; this one stays as it is."""
        after = SimulatedMachine(self.storage.crash(rng, kind))
        if kind == "kill" and self._folder is not None:
            for name in os.listdir(self._folder):
                _copy_sparse(self._folder / name, after.folder / name)
        return after

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy a file's data and size, leaving its holes holes."""
    with source.open("rb", 0) as old, target.open("wb", 0) as new:
        size = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), size)
        at = 0
        while at < size:
            try:
                start = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # nothing but a hole is left
            at = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), at - start, start), start)
