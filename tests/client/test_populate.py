"""Background mapping: what exists, what is added meanwhile, and nothing else."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.memory import mapped_bytes, memory_bytes
from tierkv.client import populate as module
from tierkv.client.populate import Populator

MIB = 1 << 20
WAIT_S = 30.0


class Shared:
    """A sparse file in memory, and two mappings of it: the daemon's and the worker's."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.ftruncate(fd, 16 * MIB)
        self.daemon = np.frombuffer(mmap.mmap(fd, 16 * MIB), np.uint8)
        self.worker = np.frombuffer(mmap.mmap(fd, 16 * MIB), np.uint8)

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self.fd)

    @property
    def mapped_bytes(self) -> int:
        return mapped_bytes(self.worker)


@pytest.fixture
def shared() -> Iterator[Shared]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    yield Shared(fd)
    os.close(fd)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a failing test waits so long for a thread that does not end by itself."""
    monkeypatch.setattr(module, "PATIENCE_S", 10 * WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("patient")
def test_what_exists_is_mapped(shared: Shared) -> None:
    shared.daemon[:] = 7
    populator = Populator(shared.fd, shared.worker)
    populator.start(2 * MIB, 10 * MIB)
    until(lambda: not populator.busy)
    assert shared.mapped_bytes == 8 * MIB
    assert (shared.daemon == 7).all()


@pytest.mark.usefixtures("patient")
def test_what_is_added_meanwhile_is_mapped_and_nothing_is_made(shared: Shared) -> None:
    populator = Populator(shared.fd, shared.worker)
    populator.start(0, 4 * MIB)
    for piece in range(4):
        assert populator.busy
        shared.daemon[piece * MIB : (piece + 1) * MIB] = 7
        until(lambda: shared.mapped_bytes == shared.memory_bytes)
        assert shared.memory_bytes == (piece + 1) * MIB
    until(lambda: not populator.busy)
    assert shared.mapped_bytes == shared.memory_bytes == 4 * MIB


@pytest.mark.usefixtures("patient")
def test_it_can_be_stopped(shared: Shared) -> None:
    populator = Populator(shared.fd, shared.worker)
    populator.start(0, 16 * MIB)
    assert populator.busy
    populator.stop()
    until(lambda: not populator.busy)
    assert shared.memory_bytes == 0


def test_it_does_not_wait_for_ever(shared: Shared) -> None:
    shared.daemon[:MIB] = 7
    populator = Populator(shared.fd, shared.worker)
    populator.start(0, 16 * MIB)
    until(lambda: not populator.busy)
    assert shared.mapped_bytes == shared.memory_bytes == MIB


def test_its_descriptor_goes_with_it(shared: Shared) -> None:
    before = len(os.listdir("/proc/self/fd"))
    populator = Populator(shared.fd, shared.worker)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del populator
    until(lambda: len(os.listdir("/proc/self/fd")) == before)
