"""The simulator itself: what it computes, and what it must notice and say."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from tierkv_kernels.cuda.driver import arguments_of

from tests.kernels.sim.build import compiler, library_of
from tests.kernels.sim.simulator import SCHEDULES, Simulated, SimulatorError

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler ($CXX, else g++)")

PROBES = Path(__file__).with_name("probe.cu")
THREADS = 64

WRONG = {
    "rotate_without_barrier": "without a barrier in between",
    "overwrite_without_barrier": "without a barrier in between",
    "copy_and_read_at_once": "is read while a copy of thread",
    "copy_and_leave": "it ends with 1 copies on their way",
    "copy_to_odd_place": "shared address",
    "copy_from_odd_place": "global address",
    "store_past_the_end": "4 bytes of shared memory at offset",
    "store_before_the_begin": "4 bytes of shared memory at offset -",
    "shuffle_in_half_a_warp": "deadlocked: thread",
    "shuffle_here_and_there": "diverged: shuffle_xor here, while other lanes of the warp are at",
    "vote_while_others_shuffle": "diverged:",
    "barrier_in_one_warp": "a barrier",
    "barriers_at_two_lines": "diverged: other threads of the block are in the barrier at",
    "barrier_while_others_shuffle": "a barrier",
}


class Params(ctypes.Structure):
    _fields_ = (("source", ctypes.c_uint64), ("target", ctypes.c_uint64))


def probe(
    name: str, schedule: str = "ring", *, grid: int = 1, threads: int = THREADS, shared: int = 8192
) -> tuple[np.ndarray, np.ndarray, Simulated]:
    """Run one on a few numbers: its input, its output, and the kernel."""
    function = Simulated(library_of(PROBES), name, schedule, seed=1)
    source = _aligned(1024)
    source[:] = np.arange(1024)
    target = _aligned(1024)
    params = Params(source.ctypes.data, target.ctypes.data)
    function.launch((grid, 1, 1), threads, shared, 0, arguments_of(params))
    return source, target, function


def _aligned(count: int) -> np.ndarray:
    room = np.zeros(count + 4, np.float32)
    begin = -room.ctypes.data % 16 // 4
    return room[begin : begin + count]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_meet_at_a_barrier(schedule: str) -> None:
    source, target, _ = probe("rotate", schedule, grid=2, shared=4 * THREADS)
    for block in range(2):
        got = target[block * THREADS : (block + 1) * THREADS]
        assert np.array_equal(got, np.roll(source[:THREADS], -1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_bring_data_or_zeros(schedule: str) -> None:
    source, target, _ = probe("copy", schedule)
    for thread in range(THREADS):
        four = slice(4 * thread, 4 * thread + 4)
        assert np.array_equal(target[four], 0 * source[four] if thread % 2 else source[four])


def test_shared_memory_begins_as_nan() -> None:
    _, target, _ = probe("read_nothing")
    assert np.isnan(target[:THREADS]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, schedule: str) -> None:
    shared = 4 * THREADS if name == "store_past_the_end" else 8192
    with pytest.raises(SimulatorError) as caught:
        probe(name, schedule, shared=shared)
    message = str(caught.value)
    assert WRONG[name] in message
    assert "block 0" in message
    assert "thread" in message
    assert "probe.cu:" in message


def test_the_line_of_a_mistake_is_that_of_the_kernel() -> None:
    lines = PROBES.read_text().splitlines()
    wanted = next(i for i, line in enumerate(lines, 1) if "in + 8, true" in line)
    with pytest.raises(SimulatorError, match=f"block 0, thread 0, probe.cu:{wanted}: "):
        probe("copy_from_odd_place")


def test_a_launch_after_a_failed_one_is_whole() -> None:
    for _ in range(2):
        with pytest.raises(SimulatorError):
            probe("barrier_in_one_warp")
        source, target, _ = probe("rotate")
        assert np.array_equal(target[:THREADS], np.roll(source[:THREADS], -1))


def test_a_wrong_launch_is_refused() -> None:
    for change, message in (
        ({"threads": 32}, "launched with 32 threads, made for 64"),
        ({"grid": 0}, "a grid of 0 blocks"),
        ({"shared": 228 * 1024}, "the most is 232448"),
    ):
        with pytest.raises(SimulatorError, match=message):
            probe("rotate", **change)
    with pytest.raises(SimulatorError, match="there is no kernel turn"):
        probe("turn")


def test_rows_that_share_banks_are_counted() -> None:
    _, _, function = probe("plain_rows")
    before = function.bank_conflicts
    probe("plain_rows")
    assert function.bank_conflicts - before == 2 * 4 * 7  # warps, matrices, rows that wait
    before = function.bank_conflicts
    probe("padded_rows")
    assert function.bank_conflicts == before
