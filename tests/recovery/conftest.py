from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recovery_harness import Daemon, Machine

RAM = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory on a RAM file system where there is one: a sync costs nothing there."""
    path = Path(tempfile.mkdtemp(prefix="tierkv-test-", dir=RAM if RAM.is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def machine(folder: Path) -> Iterator[Machine]:
    """One host: a store on disk, and daemons that come and go."""
    machine = Machine(folder)
    yield machine
    machine.crash()


@pytest.fixture
def start(machine: Machine) -> Callable[..., Daemon]:
    """Starts a daemon on the store, with settings such as ``disk=4`` (blocks)."""
    return machine.start
