"""Where a store is recovered or looked at: its FORMAT, and the opening of its parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace
from tierkv_wal import WalReader, WalVersion

from tierkv.config.schema import Config
from tierkv.core.ids import Tier
from tierkv.core.state import PoolShape
from tierkv.errors import ConfigError
from tierkv.service.machine import CheckpointIndex, Machine
from tierkv.service.progress import Tell
from tierkv.service.store import StateDirectory, StoreFormat, new_store
from tierkv.tiers.arena import Arena
from tierkv.tiers.disk import DiskTier

log = logging.getLogger(__name__)

T = TypeVar("T", Arena, DiskTier)


@dataclass(frozen=True)
class Site:
    """Where a store is recovered.

    ``is_new``: its FORMAT was made just now. ``progress`` is told what goes on.
    """

    config: Config
    directory: StateDirectory
    stored: StoreFormat
    is_new: bool
    machine: Machine
    progress: Tell

    @property
    def has_index(self) -> bool:
        """Whether a real machine has an index to open; else opening would make one."""
        return (self.directory.index / "data.mdb").exists()

    def open_index(self) -> CheckpointIndex:
        """Open or make the index. Raises CorruptionError, TierFailed."""
        return self.machine.open_index(self.directory.index, self.config.index.map_bytes)

    def open_log(self, after_lsn: int | None) -> WalReader:
        """A reader of the log behind ``after_lsn``; None: of all there is."""
        path, uuid = str(self.directory.wal), self.stored.store_uuid
        return WalReader(self.machine.storage, path, uuid, after_lsn)

    def open_disk(self, pools: Iterable[PoolShape] = ()) -> DiskTier | None:
        """The disk tier with these pools, None if there is none.

        Raises TierFull, TierFailed, ConfigError.
        """
        disk, stored = self.config.disk, self.stored
        if not disk.bytes:
            return None
        segment_bytes, uuid = stored.disk_segment_bytes, stored.store_uuid
        tier = DiskTier(
            disk.dir,
            disk.bytes,
            segment_bytes,
            uuid,
            self.machine.storage,
            lambda storage, directory: self.machine.open_disk_io(
                storage, directory, disk.io, disk.direct
            ),
        )
        return _with_pools(tier, pools)

    def open_arena(self, tier: Tier, pools: Iterable[PoolShape] = ()) -> Arena:
        """A RAM tier's arena with these pools. Raises TierFull, TierFailed."""
        folder, uuid = Path(self.config.arena.dir), self.stored.store_uuid
        budget_bytes = budgets_of(self.config)[tier]
        arena = self.machine.open_arena(folder, tier.label, budget_bytes, uuid)
        return _with_pools(arena, pools)

    def forget_arena(self, tier: Tier) -> None:
        """Make sure that the next ``open_arena`` makes a new one. Raises TierFailed, OSError."""
        self.machine.forget_arena(Path(self.config.arena.dir), tier.label)


def _with_pools(tier: T, pools: Iterable[PoolShape]) -> T:
    try:
        for pool, shape in enumerate(pools):
            tier.add_pool(pool, shape.block_bytes, shape.block_tokens)
    except BaseException:
        tier.close()
        raise
    return tier


@contextlib.contextmanager
def refusing_newer_logs() -> Iterator[None]:
    """A log that a newer version wrote becomes a ConfigError.

    Not damage: to forget it would throw away what that version can read.
    """
    try:
        yield
    except WalVersion as error:
        raise ConfigError(f"the log was written by a newer tierkv: {error}") from error


def open_site(
    config: Config,
    directory: StateDirectory,
    progress: Tell,
    machine: Machine,
) -> Site:
    """Read or make the store's FORMAT. Raises CorruptionError, ConfigError, OSError."""
    found = directory.read_format()
    if found is None:
        stored = _fresh_format(config)
        directory.write_format(stored)
    else:
        stored = _with_sizes_of(config, directory, found)
    return Site(config, directory, stored, found is None, machine, progress)


def _with_sizes_of(config: Config, directory: StateDirectory, stored: StoreFormat) -> StoreFormat:
    """The store's FORMAT with the configured sizes, written if they have changed."""
    if config.disk.bytes and stored.disk_segment_bytes != config.disk.segment_bytes:
        log.info(
            "disk.segment_bytes is %d, but this store keeps the %d bytes it was made with",
            config.disk.segment_bytes,
            stored.disk_segment_bytes,
        )
    current = replace(
        stored,
        device_bytes=config.device.bytes,
        host_bytes=config.host.bytes,
        disk_bytes=config.disk.bytes,
    )
    if current != stored:
        directory.write_format(current)
    return current


def _fresh_format(config: Config) -> StoreFormat:
    return new_store(
        disk_segment_bytes=config.disk.segment_bytes,
        device_bytes=config.device.bytes,
        host_bytes=config.host.bytes,
        disk_bytes=config.disk.bytes,
    )


def budgets_of(config: Config) -> dict[Tier, int]:
    """The tiers' budgets, bytes."""
    return {
        Tier.DEVICE: config.device.bytes,
        Tier.HOST: config.host.bytes,
        Tier.DISK: config.disk.bytes,
    }
