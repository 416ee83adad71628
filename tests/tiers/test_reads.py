"""Many reads at once: every way gives the same bytes, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tierkv_wal import RealStorage

from tests.tiers.conftest import require_ring
from tierkv.errors import ConfigError
from tierkv.tiers import uring
from tierkv.tiers.disk_io import open_disk_io
from tierkv.tiers.linux import takes_direct_io
from tierkv.tiers.pieces import pieces_of
from tierkv.tiers.reads import ReadList, Reads, SerialReads, ThreadReads
from tierkv.tiers.uring import DEPTH, REAP, Ring, RingReads

PAGE = 4096
PAGES = 300
STORAGE = RealStorage()

WAYS: dict[str, Callable[[], Reads]] = {
    "serial": lambda: SerialReads(STORAGE),
    "threads": lambda: ThreadReads(STORAGE, 4),
    "ring": lambda: RingReads(STORAGE, 2),
}


@pytest.fixture(
    params=["serial", "threads", pytest.param("ring", marks=pytest.mark.may_skip_in_ci)]
)
def reads(request: pytest.FixtureRequest) -> Iterator[Reads]:
    if request.param == "ring":
        require_ring()
    made = WAYS[request.param]()
    yield made
    made.close()


@pytest.fixture
def ring() -> Iterator[Ring]:
    require_ring()
    made = Ring()
    yield made
    made.close()


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (PAGES, PAGE), np.uint8)


@pytest.fixture
def file(tmp_path: Path, content: np.ndarray) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(content.tobytes())
    fd = STORAGE.open(str(path), direct=takes_direct_io(tmp_path))
    yield fd
    os.close(fd)


@pytest.fixture
def memory() -> np.ndarray:
    """As many pages as the file has, each of them aligned."""
    return np.frombuffer(mmap.mmap(-1, PAGES * PAGE), np.uint8).reshape(PAGES, PAGE)


Asked = tuple[int, int, list[int]]
"""File, page of the file, and the pages of memory that are filled from there on."""


def read_list(memory: np.ndarray, asked: list[Asked]) -> ReadList:
    """The reads into pages of memory."""
    return ReadList(
        np.array([fd for fd, _, _ in asked], np.int64),
        np.array([page * PAGE for _, page, _ in asked], np.int64),
        np.array([len(into) for _, _, into in asked], np.int64),
        pieces_of(memory, np.array([page for *_, into in asked for page in into], np.int64)),
    )


def single_pages(fd: int, memory: np.ndarray, order: list[int]) -> ReadList:
    """Page by page, in this order; the first one of the order goes to the first of memory."""
    return read_list(memory, [(fd, page, [at]) for at, page in enumerate(order)])


def everything(reads: Reads, asked: ReadList) -> dict[int, int]:
    """What each read got."""
    return {
        number: got
        for done in reads.read(asked)
        for number, got in zip(done.numbers.tolist(), done.got.tolist(), strict=True)
    }


def test_every_read_is_done_once_with_the_right_bytes(
    reads: Reads, file: int, memory: np.ndarray, content: np.ndarray
) -> None:
    order = random.Random(2).sample(range(PAGES), PAGES)
    batches = list(reads.read(single_pages(file, memory, order)))
    assert np.sort(np.concatenate([done.numbers for done in batches])).tolist() == [*range(PAGES)]
    assert {got for done in batches for got in done.got.tolist()} == {PAGE}
    np.testing.assert_array_equal(memory, content[order])
    assert everything(reads, read_list(memory, [])) == {}


def test_pieces_are_filled_one_after_the_other(
    reads: Reads, file: int, memory: np.ndarray, content: np.ndarray
) -> None:
    asked = [(file, 10, [7, 3, 5]), (file, 2, [0]), (file, 20, [9, 8])]
    done = everything(reads, read_list(memory, asked))
    assert done == {0: 3 * PAGE, 1: PAGE, 2: 2 * PAGE}
    into = [7, 3, 5, 0, 9, 8]
    np.testing.assert_array_equal(memory[into], content[[10, 11, 12, 2, 20, 21]])


@pytest.mark.parametrize("size", [0, 100, PAGE, 5 * PAGE + 700])
def test_a_file_that_ends_gives_what_it_has(
    reads: Reads, tmp_path: Path, memory: np.ndarray, content: np.ndarray, size: int
) -> None:
    path = tmp_path / "short"
    path.write_bytes(content.reshape(-1)[:size].tobytes())
    fd = STORAGE.open(str(path), direct=takes_direct_io(tmp_path))
    asked: list[Asked] = [(fd, page, [page]) for page in range(8)]
    asked.append((fd, 0, list(range(8, 20))))
    expected = {page: min(max(size - page * PAGE, 0), PAGE) for page in range(8)}
    assert everything(reads, read_list(memory, asked)) == {**expected, 8: size}
    assert memory[8:20].reshape(-1)[:size].tobytes() == path.read_bytes()
    os.close(fd)


def test_a_read_that_is_refused_leaves_the_others_alone(
    reads: Reads, file: int, memory: np.ndarray, content: np.ndarray
) -> None:
    asked = [(-1 if page == 40 else file, page, [page]) for page in range(100)]
    done = everything(reads, read_list(memory, asked))
    assert done.pop(40) == -errno.EBADF
    assert set(done.values()) == {PAGE}
    np.testing.assert_array_equal(np.delete(memory[:100], 40, 0), np.delete(content[:100], 40, 0))


def test_who_stops_early_gets_no_more_bytes(
    reads: Reads, file: int, memory: np.ndarray, content: np.ndarray
) -> None:
    with closing(reads.read(single_pages(file, memory, list(range(PAGES))))) as batches:
        next(batches)
    seen = memory.copy()
    memory[:] = 0
    # Whatever was still on its way would show up now, or spoil the next request.
    assert set(everything(reads, single_pages(file, memory, [5])).values()) == {PAGE}
    np.testing.assert_array_equal(memory[0], content[5])
    assert not memory[1:].any()
    assert len(np.flatnonzero(seen.any(axis=1))) < PAGES


def test_several_threads_share_it(reads: Reads, file: int, content: np.ndarray) -> None:
    def one(seed: int) -> bool:
        memory = np.frombuffer(mmap.mmap(-1, PAGES * PAGE), np.uint8).reshape(PAGES, PAGE)
        order = random.Random(seed).sample(range(PAGES), PAGES)
        done = everything(reads, single_pages(file, memory, order))
        return len(done) == PAGES and bool((memory == content[order]).all())

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(24)))


@pytest.mark.parametrize("way", ["threads", pytest.param("ring", marks=pytest.mark.may_skip_in_ci)])
def test_nothing_is_left_when_it_is_closed(way: str, file: int, memory: np.ndarray) -> None:
    if way == "ring":
        require_ring()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        made = WAYS[way]()
        everything(made, single_pages(file, memory, list(range(50))))
        made.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert "io_uring" not in Path("/proc/self/maps").read_text()


# --- the ring -------------------------------------------------------------------------------------


@pytest.mark.may_skip_in_ci
def test_the_ring_is_kept_full_and_drained_in_small_batches(
    ring: Ring, file: int, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, taken = uring._call, 0

    def counting(number: int, *arguments: int) -> int:
        nonlocal taken
        result = plain(number, *arguments)
        if number == uring._ENTER and arguments[1]:
            taken += result
        return result

    monkeypatch.setattr(uring, "_call", counting)
    done = 0
    for batch in ring.read(STORAGE, single_pages(file, memory, list(range(PAGES)))):
        assert 1 <= len(batch.numbers) <= REAP
        # What was done has been replaced before it is handed on.
        assert taken == min(PAGES, done + len(batch.numbers) + DEPTH)
        done += len(batch.numbers)
    assert done == PAGES


@pytest.mark.may_skip_in_ci
def test_large_reads_are_handed_on_as_they_come(
    ring: Ring,
    file: int,
    memory: np.ndarray,
    content: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uring, "REAP_BYTES", 3 * PAGE)
    asked = [(file, at, [at, at + 1]) for at in range(0, 100, 2)]
    batches = list(ring.read(STORAGE, read_list(memory, asked)))
    assert [len(batch.numbers) for batch in batches] == [1] * 50
    np.testing.assert_array_equal(memory[:100], content[:100])


@pytest.mark.may_skip_in_ci
def test_what_the_kernel_has_no_room_for_is_read_all_the_same(
    ring: Ring, file: int, memory: np.ndarray, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = uring._call, 0

    def short_of_memory(number: int, *arguments: int) -> int:
        nonlocal calls
        if number == uring._ENTER and arguments[1]:
            calls += 1
            if calls % 3 == 1:
                raise OSError(errno.EAGAIN, "try again")
            if calls % 3 == 2:  # a part of it
                return plain(number, arguments[0], 1, *arguments[2:])
        return plain(number, *arguments)

    monkeypatch.setattr(uring, "_call", short_of_memory)
    batches = list(ring.read(STORAGE, single_pages(file, memory, list(range(PAGES)))))
    assert np.sort(np.concatenate([done.numbers for done in batches])).tolist() == [*range(PAGES)]
    np.testing.assert_array_equal(memory, content)
    assert calls > PAGES // DEPTH


@pytest.mark.may_skip_in_ci
def test_a_signal_does_not_end_a_wait(
    ring: Ring, file: int, memory: np.ndarray, content: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc, interrupted = uring.libc(), 0

    class Interrupting:
        def syscall(self, number: ctypes.c_long, *words: ctypes.c_long) -> int:
            nonlocal interrupted
            interrupted += 1
            if interrupted % 2:
                ctypes.set_errno(errno.EINTR)
                return -1
            return int(libc.syscall(number, *words))

    monkeypatch.setattr(uring, "libc", Interrupting)
    for _ in ring.read(STORAGE, single_pages(file, memory, list(range(PAGES)))):
        pass
    np.testing.assert_array_equal(memory, content)
    assert interrupted > 2 * PAGES / DEPTH


@pytest.mark.may_skip_in_ci
def test_a_ring_is_used_far_beyond_its_places(
    ring: Ring, file: int, memory: np.ndarray, content: np.ndarray
) -> None:
    for _ in range(20):
        memory[:] = 0
        for _ in ring.read(STORAGE, single_pages(file, memory, list(range(PAGES)))):
            pass
        np.testing.assert_array_equal(memory, content)


# --- which way is taken ---------------------------------------------------------------------------


@pytest.mark.may_skip_in_ci
def test_where_there_is_a_ring_it_is_taken(tmp_path: Path) -> None:
    require_ring()
    for read_by in ("auto", "uring"):
        io = open_disk_io(STORAGE, str(tmp_path), read_by=read_by, direct="off")
        assert io.description == "io_uring, through the page cache"
        io.reads.close()
    io = open_disk_io(STORAGE, str(tmp_path), read_by="threads", direct="auto")
    assert ("direct" in io.description) == takes_direct_io(tmp_path)
    io.reads.close()


FORBIDDEN = """
import ctypes, logging, struct, sys
# What containers do: seccomp answers EPERM to io_uring_setup (425) and lets all else pass.
code = b"".join(struct.pack("HBBI", *one) for one in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)))
program = ctypes.create_string_buffer(code, len(code))
filter = struct.pack("HxxxxxxQ", 4, ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
logging.basicConfig(level=logging.INFO, format="%(message)s")
from tierkv_wal import RealStorage
from tierkv.errors import ConfigError
from tierkv.tiers.disk_io import open_disk_io
io = open_disk_io(RealStorage(), sys.argv[1], read_by="auto", direct="off")
print(io.description)
try:
    open_disk_io(RealStorage(), sys.argv[1], read_by="uring", direct="off")
except ConfigError as error:
    print(error.message)
io.reads.close()
"""


def test_where_io_uring_is_forbidden_threads_read(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FORBIDDEN, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused = "[Errno 1] Operation not permitted"
    assert done.stderr == f"no io_uring ({refused}): 4 threads read from disk\n"
    assert done.stdout.splitlines() == [
        "4 threads, through the page cache",
        f'disk.io is "uring", but there is none: {refused}',
    ]


def test_another_processor_reads_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with caplog.at_level(logging.INFO):
        io = open_disk_io(STORAGE, str(tmp_path), read_by="auto", direct="off")
    assert io.reads.name == "4 threads"
    assert "io_uring is not used on aarch64" in caplog.text
    io.reads.close()


def test_a_file_system_without_direct_io_is_read_through_the_page_cache() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tempfile.mkdtemp(prefix="tierkv-test-")
    # ramfs has no O_DIRECT; tmpfs had none before Linux 6.6.
    subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], check=True)
    try:
        io = open_disk_io(STORAGE, folder, read_by="threads", direct="auto")
        assert io.description == "4 threads, through the page cache"
        io.reads.close()
        with pytest.raises(ConfigError, match=r'disk.direct is "on", but files in'):
            open_disk_io(STORAGE, folder, read_by="threads", direct="on")
        assert os.listdir(folder) == []
    finally:
        subprocess.run(["umount", folder], check=True)
        os.rmdir(folder)
