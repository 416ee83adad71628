"""Copies between a GPU's memory and the host's, over the stand-in driver: every byte goes where it
belongs, and is there when the call returns."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tierkv_kernels.errors import BackendUnavailable

from tierkv.errors import InvariantViolation
from tierkv.gpu import Gpu, GpuFailed, GpuMemory, GpuRows

PAGE = 4096


@pytest.fixture
def driver(standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of this test's own: others count what is left in theirs."""
    own = shutil.copy(standin_driver, tmp_path / "own.so")
    monkeypatch.setenv("TIERKV_LIBCUDA", str(own))
    return own


@pytest.fixture
def gpu(driver: Path) -> Gpu:
    return Gpu.open(0)


def host_memory(rows: int, width: int) -> np.ndarray:
    """Random bytes in whole pages."""
    memory = np.frombuffer(mmap.mmap(-1, rows * width), np.uint8).reshape(rows, width)
    memory[:] = np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)
    return memory


def shown(rows: GpuRows) -> np.ndarray:
    """The stand-in's device memory as the host memory that it is."""
    memory = (ctypes.c_ubyte * (rows.count * rows.stride)).from_address(rows.address)
    return np.frombuffer(memory, np.uint8).reshape(rows.count, rows.stride)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("width", [PAGE, PAGE - 64])
def test_rows_go_there_and_back(gpu: Gpu, pinned: bool, width: int) -> None:
    memory = GpuMemory.make(gpu, 1)
    rows = GpuRows(memory, 8 * PAGE, 40, PAGE, width)
    host, back = host_memory(40, PAGE), host_memory(40, PAGE)
    if pinned:
        gpu.pin(host.reshape(-1))
        gpu.pin(back.reshape(-1))
    to, at = np.array([3, 4, 5, 30, 7, 6]), np.array([10, 11, 12, 13, 20, 19])
    before = shown(rows).copy()
    rows.store(to, host[:, :width], at)
    before[to, :width] = host[at, :width]
    assert np.array_equal(shown(rows), before)
    expected = back.copy()
    rows.fetch(to, back[:, :width], at[::-1].copy())
    expected[at[::-1], :width] = host[at, :width]
    assert np.array_equal(back, expected)
    rows.fetch(to[:0], back[:, :width], at[:0])
    if pinned:
        gpu.unpin(host.reshape(-1))
        gpu.unpin(back.reshape(-1))
    assert gpu.edges == []
    memory.close()


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example unpins and unmaps
)
@given(data=st.data())
def test_no_copy_is_half_in_pinned_memory(gpu: Gpu, data: st.DataObject) -> None:
    """The driver refuses those, and who copies does not know when pieces are pinned."""
    cuts = sorted(data.draw(st.sets(st.integers(0, 32), max_size=6)))
    spans = [span for span in pairwise(cuts) if data.draw(st.booleans())]
    first = data.draw(st.integers(0, 15))
    count = data.draw(st.integers(1, 16 - first))
    at = np.arange(first, first + count)
    to = at if data.draw(st.booleans()) else at[::-1].copy()
    # From here on nothing is drawn: an example that is given up midway would leave memory pinned.
    memory = GpuMemory.make(gpu, 1)
    rows = GpuRows(memory, 0, 16, 2 * PAGE, 2 * PAGE)
    host = host_memory(16, 2 * PAGE)
    pieces = [host.reshape(-1)[start * PAGE : stop * PAGE] for start, stop in spans]
    for piece in pieces:
        gpu.pin(piece)
    rows.store(to, host, at)
    for piece in pieces:
        gpu.unpin(piece)
    assert np.array_equal(shown(rows)[to], host[at])
    memory.close()


def test_another_mapping_has_the_same_bytes(gpu: Gpu) -> None:
    memory = GpuMemory.make(gpu, 3 << 20)
    assert memory.size_bytes == 4 << 20
    fd = memory.export_fd()
    other = GpuMemory.attach(Gpu.find(gpu.identity), fd, memory.size_bytes)
    os.close(fd)
    assert other.address != memory.address
    host = host_memory(4, PAGE)
    GpuRows(memory, 0, 4, PAGE, PAGE).store(np.arange(4), host, np.arange(4))
    memory.close()
    back = host_memory(4, PAGE)
    GpuRows(other, 0, 4, PAGE, PAGE).fetch(np.arange(4), back, np.arange(4))
    assert np.array_equal(back, host)
    other.close()


def test_memory_that_nobody_uses_is_unmapped(gpu: Gpu, driver: Path) -> None:
    count = ctypes.CDLL(str(driver)).standin_live_objects
    before = count()
    memory = GpuMemory.make(gpu, 1)
    rows = GpuRows(memory, 0, 1, PAGE, PAGE)
    assert count() > before
    del memory
    gc.collect()
    assert count() > before, "its rows are in use"
    del rows
    gc.collect()
    assert count() == before


def test_rows_that_are_not_there(gpu: Gpu) -> None:
    memory = GpuMemory.make(gpu, 1)
    with pytest.raises(InvariantViolation):
        GpuRows(memory, PAGE, memory.size_bytes // PAGE, PAGE, PAGE)
    rows, host = GpuRows(memory, 0, 4, PAGE, PAGE), host_memory(4, PAGE)
    for to, at in (([4], [0]), ([-1], [0]), ([0], [4]), ([0], [-1]), ([0, 1], [0])):
        with pytest.raises(InvariantViolation):
            rows.store(np.array(to), host, np.array(at))
        with pytest.raises(InvariantViolation):
            rows.fetch(np.array(to), host, np.array(at))
    with pytest.raises(InvariantViolation):
        rows.store(np.array([0]), host[:, 1:], np.array([0]))
    memory.close()


def test_what_fails_says_so(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GpuMemory.make(gpu, 1)
    rows, host = GpuRows(memory, 0, 4, PAGE, PAGE), host_memory(4, PAGE)
    monkeypatch.setenv("TIERKV_STANDIN_FAIL", "cuMemcpyHtoDAsync_v2=700")
    with pytest.raises(GpuFailed, match=r"cannot copy blocks .*cuMemcpyHtoDAsync_v2: CUDA_ERROR_I"):
        rows.store(np.array([0]), host, np.array([0]))
    monkeypatch.setenv("TIERKV_STANDIN_FAIL", "cuCtxSynchronize=700")
    with pytest.raises(GpuFailed, match="cannot wait for the GPU"):
        gpu.settle()
    monkeypatch.delenv("TIERKV_STANDIN_FAIL")
    rows.store(np.array([0]), host, np.array([0]))
    memory.close()


def test_which_gpu(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_DEVICES", "2")
    second = Gpu.open(1)
    assert Gpu.find(second.identity).index == 1
    with pytest.raises(BackendUnavailable, match="there is no GPU 2; this process sees 2"):
        Gpu.open(2)
    with pytest.raises(BackendUnavailable, match="CUDA_VISIBLE_DEVICES"):
        Gpu.find(bytes(16))
