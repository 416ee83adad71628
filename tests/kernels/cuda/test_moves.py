"""Scattered pieces moved by one launch, over the stand-in, by the simulated kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tierkv_kernels import InvalidInput
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.cache import KernelCache
from tierkv_kernels.cuda.device import KernelDevice
from tierkv_kernels.cuda.driver import Driver, Stream
from tierkv_kernels.cuda.images import SOURCES, Images
from tierkv_kernels.cuda.moves import PIECE_DTYPE, SPAN_BYTES, THREADS, Mover
from tierkv_kernels.cuda.nvrtc import Nvrtc

from tests.kernels.sim.build import library

BYTES = 3 * SPAN_BYTES


@pytest.fixture
def device(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KernelDevice]:
    """With its context current."""
    (tmp_path / f"{variants.move().name}.so").symlink_to(library(variants.move()))
    monkeypatch.setenv("TIERKV_STANDIN_KERNELS", str(tmp_path))
    device = KernelDevice(driver, 0, Images(Nvrtc.find(), KernelCache(tmp_path / "cache")))
    with device.context:
        yield device
    device.close()


@pytest.fixture
def stream(device: KernelDevice) -> Iterator[Stream]:
    stream = device.context.stream()
    yield stream
    stream.close()


def piece_list(source: int, target: int, spans: list[tuple[int, int, int]]) -> np.ndarray:
    """From (offset in source, offset in target, bytes)."""
    return np.array([(source + a, target + b, n) for a, b, n in spans], PIECE_DTYPE)


@pytest.mark.parametrize("room", [1, 2, 100])
def test_pieces_go_where_they_are_wanted(room: int, device: KernelDevice, stream: Stream) -> None:
    data = np.random.default_rng(1).integers(0, 256, BYTES, np.uint8)
    target = np.zeros(BYTES, np.uint8)
    want = np.zeros(BYTES, np.uint8)
    spans = [(0, 4096, 64), (100, 5, 33), (8192, 16384, 2 * SPAN_BYTES - 16), (7, 0, 0)]
    mover = Mover(device, stream, room)
    pieces = piece_list(data.ctypes.data, target.ctypes.data, spans)
    mover.move(pieces)
    pieces["bytes"] = 1  # the launch has its own list by now
    mover.move(pieces[:0])
    assert not target.any()
    stream.synchronize()
    for a, b, n in spans:
        want[b : b + n] = data[a : a + n]
    assert np.array_equal(target, want)
    mover.close()


def test_lists_of_another_kind_are_refused(device: KernelDevice, stream: Stream) -> None:
    mover = Mover(device, stream)
    with pytest.raises(InvalidInput, match=r"pieces: got shape \(2, 3\) of uint64, want \[n\]"):
        mover.move(np.zeros((2, 3), np.uint64))
    huge = np.array([(0, 0, 2**62)], PIECE_DTYPE)
    with pytest.raises(InvalidInput, match="spans, want at most"):
        mover.move(huge)
    mover.close()


def test_what_is_said_twice_is_the_same() -> None:
    span = re.search(r"#define TKV_SPAN_BYTES (\d+)", (SOURCES / "params.h").read_text())
    threads = re.search(r"THREADS = (\d+);", (SOURCES / "move.cu").read_text())
    assert span is not None
    assert threads is not None
    assert (int(span[1]), int(threads[1])) == (SPAN_BYTES, THREADS)
