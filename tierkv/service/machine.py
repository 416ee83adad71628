"""The machine a daemon runs on, as recovery sees it: files, index, arenas, processes.

Everything that outlives the daemon, or tells what did, is reached through a ``Machine``. So a
simulation can give the very code of the daemon a machine that loses power.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tierkv_wal import RealStorage, Storage

from tierkv.core.ids import Tier
from tierkv.gpu import Gpu
from tierkv.service.fd_store import FdStore
from tierkv.service.process import boot_id, is_alive
from tierkv.tiers.arena import Arena, ArenaHome
from tierkv.tiers.arena_files import ArenaFiles
from tierkv.tiers.disk_io import Direct, DiskIO, ReadBy, open_disk_io
from tierkv.tiers.gpu_arena import gpu_arena
from tierkv.tiers.index import BlockRows, Index, IndexChanges, IndexContents
from tierkv.tiers.numa import NodePolicy
from tierkv.tiers.storage import BlockStorage


class CheckpointIndex(Protocol):
    """Where the last checkpoint lies. ``tierkv.tiers.index.Index`` is the real one."""

    def commit(self, changes: IndexChanges) -> None:
        """See Index."""

    def load(self) -> IndexContents:
        """See Index."""
        ...

    def blocks(self) -> Iterator[BlockRows]:
        """See Index."""
        ...

    @property
    def map_bytes(self) -> int:
        """See Index."""
        ...

    def close(self) -> None:
        """See Index."""


class Machine(Protocol):
    """What recovery asks of the machine. ``storage``: all files but the index and the arenas."""

    storage: Storage

    def open_index(self, path: Path, map_bytes: int) -> CheckpointIndex:
        """Open or make the index. Raises CorruptionError, TierFailed."""
        ...

    def open_disk_io(
        self, storage: BlockStorage, directory: str, read_by: ReadBy, direct: Direct
    ) -> DiskIO:
        """How to read and write files of the disk tier. Raises ConfigError."""
        ...

    def open_arena(self, directory: Path, name: str, budget_bytes: int, store: bytes) -> Arena:
        """Take over a RAM tier's arena, or make a new one. Raises TierFull, TierFailed."""
        ...

    def forget_arena(self, directory: Path, name: str) -> None:
        """Make sure that the next ``open_arena`` makes a new one."""

    def is_alive(self, pid: int, start_time: int) -> bool:
        """Whether that process is still running."""
        ...


class RealMachine:
    """This one."""

    def __init__(
        self,
        fd_store: FdStore | None = None,
        numa: NodePolicy | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """``fd_store``: what keeps the arenas, else they are files. ``numa``: where they lie.

        ``gpu``: what has the device tier, else it is an arena like the host tier.
        """
        self.storage: Storage = RealStorage()
        self._fd_store = fd_store
        self._numa = numa
        self._gpu = gpu

    def open_index(self, path: Path, map_bytes: int) -> CheckpointIndex:
        """See Machine."""
        return Index(path, map_bytes)

    def open_disk_io(
        self, storage: BlockStorage, directory: str, read_by: ReadBy, direct: Direct
    ) -> DiskIO:
        """See Machine."""
        return open_disk_io(storage, directory, read_by=read_by, direct=direct)

    def open_arena(self, directory: Path, name: str, budget_bytes: int, store: bytes) -> Arena:
        """See Machine."""
        home: ArenaHome = ArenaFiles(directory)
        if self._fd_store is not None:
            # A daemon that kept files there may have run before.
            home.drop(name)
            home = self._fd_store
        if self._gpu is not None and name == Tier.DEVICE.label:
            home.drop(name)
            return gpu_arena(self._gpu, name, budget_bytes)
        return Arena.open(home, name, budget_bytes, store, boot_id(), self._numa)

    def forget_arena(self, directory: Path, name: str) -> None:
        """See Machine."""
        ArenaFiles(directory).drop(name)
        if self._fd_store is not None:
            self._fd_store.drop(name)

    def is_alive(self, pid: int, start_time: int) -> bool:
        """See Machine."""
        return is_alive(pid, start_time)
