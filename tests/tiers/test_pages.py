"""Pages are taken and mapped without a byte changing, and without a signal where there is none."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.memory import mapped_bytes, memory_bytes
from tierkv.pages import PIECE_BYTES, ask_for_huge_pages, backed_ranges, huge_bytes, populate

MIB = 1 << 20


class Shared:
    """A sparse file in memory and a mapping of it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        os.ftruncate(fd, size_bytes)
        self.data = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)

    @property
    def memory_bytes(self) -> int:
        """Memory that the file takes."""
        return memory_bytes(self.fd)

    @property
    def mapped_bytes(self) -> int:
        """Memory that this process has mapped of it."""
        return mapped_bytes(self.data)


@pytest.fixture
def shared() -> Iterator[Shared]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    yield Shared(fd, 16 * MIB)
    os.close(fd)


def test_pages_exist_and_are_mapped_afterwards(shared: Shared) -> None:
    populate(shared.data, 0, 5 * MIB)
    assert shared.memory_bytes == shared.mapped_bytes == 5 * MIB
    assert not shared.data.any()


def test_whole_pages_are_taken(shared: Shared) -> None:
    populate(shared.data, 5000, 9000)
    assert shared.memory_bytes == 2 * 4096
    assert list(backed_ranges(shared.fd, 0, 16 * MIB)) == [(4096, 12288)]


def test_no_byte_changes(shared: Shared) -> None:
    content = np.random.default_rng(1).integers(0, 256, 3 * MIB, np.uint8)
    shared.data[MIB : 4 * MIB] = content
    populate(shared.data, 0, 16 * MIB)
    assert np.array_equal(shared.data[MIB : 4 * MIB], content)
    assert not shared.data[:MIB].any()
    assert not shared.data[4 * MIB :].any()


def test_it_can_be_stopped(shared: Shared) -> None:
    answers = iter([False, True])
    populate(shared.data, 0, 16 * MIB, lambda: next(answers))
    assert shared.memory_bytes == PIECE_BYTES


def test_memory_that_exists_is_mapped_by_another_process_too(shared: Shared) -> None:
    shared.data[: 8 * MIB] = 7
    other = Shared(shared.fd, 16 * MIB)
    assert other.mapped_bytes == 0
    for first, stop in backed_ranges(other.fd, 0, 16 * MIB):
        populate(other.data, first, stop)
    assert other.mapped_bytes == shared.memory_bytes == 8 * MIB


@pytest.mark.parametrize(
    ("start", "stop", "ranges"),
    [
        (0, 16 * MIB, [(MIB, 2 * MIB), (5 * MIB, 5 * MIB + 4096)]),
        (0, MIB, []),
        (MIB + 4096, 5 * MIB, [(MIB + 4096, 2 * MIB)]),
        (0, 5 * MIB + 4096, [(MIB, 2 * MIB), (5 * MIB, 5 * MIB + 4096)]),
        (6 * MIB, 16 * MIB, []),
        (3 * MIB, 3 * MIB, []),
    ],
)
def test_parts_that_have_memory(
    shared: Shared, start: int, stop: int, ranges: list[tuple[int, int]]
) -> None:
    shared.data[MIB : 2 * MIB] = 1
    shared.data[5 * MIB] = 1
    assert list(backed_ranges(shared.fd, start, stop)) == ranges


def test_a_full_file_system_is_an_error_and_no_signal(mount_tmpfs: Callable[..., Path]) -> None:
    fd = os.open(mount_tmpfs(4 * MIB) / "file", os.O_RDWR | os.O_CREAT)
    try:
        full = Shared(fd, 16 * MIB)
        with pytest.raises(OSError, match="Bad address") as refused:
            populate(full.data, 0, 16 * MIB)
        assert refused.value.errno == errno.EFAULT
        assert full.memory_bytes == 4 * MIB
    finally:
        os.close(fd)


@pytest.mark.may_skip_in_ci  # before Linux 6.7 nobody can tell, and huge pages may be built out
def test_huge_pages_are_had_where_they_are_offered(mount_tmpfs: Callable[..., Path]) -> None:
    fd = os.open(mount_tmpfs(64 * MIB, "huge=advise") / "file", os.O_RDWR | os.O_CREAT)
    try:
        shared = Shared(fd, 16 * MIB)
        assert ask_for_huge_pages(shared.data)
        try:
            assert huge_bytes(shared.data, 0, 16 * MIB) == 0
        except OSError as error:
            pytest.skip(f"the kernel does not tell: {error}")
        populate(shared.data, 0, 16 * MIB)
        assert huge_bytes(shared.data, 0, 16 * MIB) == 16 * MIB
        assert huge_bytes(shared.data, 4 * MIB, 6 * MIB) == 2 * MIB
    finally:
        os.close(fd)
