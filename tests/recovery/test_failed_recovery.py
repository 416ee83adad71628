"""A recovery that fails leaves nothing behind: it may be tried again any number of times."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recovery_harness import SIZE, Daemon, Machine, config_of

from tierkv.errors import TierFull
from tierkv.service.machine import RealMachine
from tierkv.service.progress import tell_nobody
from tierkv.service.recovery import recover
from tierkv.service.store import StateDirectory
from tierkv.tiers.index import Index, IndexChanges

A = list(range(100, 100 + 3 * SIZE))
Start = Callable[..., Daemon]


class FullIndex(Index):
    """No checkpoint fits."""

    def commit(self, changes: IndexChanges) -> None:
        raise TierFull("the index is full", path=str(self.path))


class FullMachine(RealMachine):
    def open_index(self, path: Path, map_bytes: int) -> Index:
        return FullIndex(path, map_bytes)


def open_files() -> list[str]:
    """What this process has open and mapped of the files of a store."""
    opened = []
    for name in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the listing's own
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted(opened) + sorted(line.split()[-1] for line in maps if "arena" in line)


@pytest.mark.parametrize("lose_index", [False, True])
def test_a_recovery_that_fails_at_its_checkpoint_leaves_nothing_behind(
    machine: Machine, start: Start, lose_index: bool
) -> None:
    daemon = start()
    daemon.store(daemon.hello(), 1, A)
    daemon.write_behind()
    daemon.write()
    machine.crash()
    if lose_index:
        (machine.folder / "state" / "index" / "data.mdb").unlink()
    config: Any = config_of(machine.folder)
    directory = StateDirectory.open(machine.folder / "state")
    try:
        gc.collect()  # what earlier tests left is not to go in between
        before = open_files()
        for _ in range(2):
            with pytest.raises(TierFull):
                recover(config, directory, tell_nobody, FullMachine())
            assert open_files() == before
            assert os.listdir(directory.quarantine) == []
    finally:
        directory.close()
    assert start().cached(A) == 3
