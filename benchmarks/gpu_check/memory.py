"""Memory that two processes share, and how fast blocks move between it and the host."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from tierkv_kernels.cuda.cache import KernelCache
from tierkv_kernels.cuda.device import KernelDevice
from tierkv_kernels.cuda.driver import Driver
from tierkv_kernels.cuda.images import Images
from tierkv_kernels.cuda.moves import PIECE_DTYPE, Mover
from tierkv_kernels.cuda.nvrtc import Nvrtc

from benchmarks.gpu_check.options import GIB, KIB, MIB, Options
from benchmarks.gpu_check.report import Report
from tierkv.gpu import Gpu, GpuMemory, GpuRows

Bytes = npt.NDArray[np.uint8]
TORCH_SAYS = 0x5A


def run(report: Report, options: Options) -> None:
    """Sharing first, then speed."""
    gpu = Gpu.open(0)
    with report.trying("another process reads and writes the same memory"):
        _share(report, options, gpu)
    with report.trying("moves"):
        _moves(report, options, gpu)


# --- sharing --------------------------------------------------------------------------------------


def _share(report: Report, options: Options, gpu: Gpu) -> None:
    size, stride = options.pick(GIB, 2 * MIB), 64 * KIB
    memory = GpuMemory.make(gpu, size)
    rows = GpuRows(memory, 0, memory.size_bytes // stride, stride, stride)
    content = pattern(len(rows), stride)
    every = np.arange(len(rows))
    rows.store(every, content, every)
    fd = memory.export_fd()
    command = [
        sys.executable,
        "-c",
        "from benchmarks.gpu_check.memory import visit; visit()",
        options.device,
        str(fd),
        str(memory.size_bytes),
        str(stride),
        gpu.identity.hex(),
    ]
    began = time.perf_counter()
    said = subprocess.run(
        command, pass_fds=[fd], capture_output=True, text=True, timeout=90, check=False
    )
    took_s = time.perf_counter() - began
    os.close(fd)
    report.add(
        "another process reads the same memory",
        ok=said.returncode == 0,
        said=said.stdout.strip() or said.stderr.strip()[-400:],
        took_s=took_s,
    )
    back = np.zeros_like(content)
    rows.fetch(every, back, every)
    written = content[::-1].copy()
    if options.device == "cuda":
        written[0] = TORCH_SAYS
    report.add("and what it writes is seen here", ok=bool(np.array_equal(back, written)))
    if options.device == "cuda":
        there = torch.as_tensor(rows, device="cuda")
        same = torch.equal(there.cpu(), torch.from_numpy(written))
        report.add("torch sees the memory without a copy", ok=same, shape=list(there.shape))
        del there
    memory.close()


def visit() -> None:
    """The other process: checks all rows, and writes them in reverse order, and one by torch."""
    device, fd, size, stride, identity = sys.argv[1:]
    memory = GpuMemory.attach(Gpu.find(bytes.fromhex(identity)), int(fd), int(size))
    rows = GpuRows(memory, 0, int(size) // int(stride), int(stride), int(stride))
    every, content = np.arange(len(rows)), pattern(len(rows), int(stride))
    back = np.zeros_like(content)
    rows.fetch(every, back, every)
    if not np.array_equal(back, content):
        sys.exit("the bytes are others here")
    rows.store(every, content, every[::-1].copy())
    if device == "cuda":
        torch.as_tensor(rows, device="cuda")[0].fill_(TORCH_SAYS)
        memory.gpu.settle()
    print(f"{len(rows)} rows of {stride} bytes are the same")


def pattern(rows: int, width: int) -> Bytes:
    """Bytes that are others in every row."""
    words = np.arange(rows * width // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8).reshape(rows, width)


# --- speed ----------------------------------------------------------------------------------------


def _moves(report: Report, options: Options, gpu: Gpu) -> None:
    size = options.pick(GIB, 4 * MIB)
    memory = GpuMemory.make(gpu, size)
    host = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    host[:] = 1
    blocks = (2 * MIB, 256 * KIB, 64 * KIB, 16 * KIB)
    for block_bytes in blocks[:: options.pick(1, 3)]:
        _time_moves(report, memory, host, block_bytes, "not pinned")
    began = time.perf_counter()
    gpu.pin(host)
    report.add("pin host memory", gb_s=size / (time.perf_counter() - began) / 1e9)
    _ceilings(report, gpu, memory, host)
    for block_bytes in blocks[:: options.pick(1, 3)]:
        _time_moves(report, memory, host, block_bytes, "pinned")
    for block_bytes in (64 * KIB, 16 * KIB)[:: options.pick(1, 2)]:
        with report.trying(f"blocks of {block_bytes // KIB} KiB in one launch"):
            _time_launches(report, memory, host, block_bytes)
    gpu.unpin(host)
    memory.close()


def _ceilings(report: Report, gpu: Gpu, memory: GpuMemory, host: Bytes) -> None:
    """One copy of everything: what the bus carries."""

    def out() -> None:
        with gpu.copying() as stream:
            stream.copy_to_host(host.ctypes.data, memory.address, host.nbytes)

    def into() -> None:
        with gpu.copying() as stream:
            stream.copy_to_device(memory.address, host.ctypes.data, host.nbytes)

    report.add("one copy to the host", gb_s=host.nbytes / _best_s(out) / 1e9)
    report.add("one copy to the card", gb_s=host.nbytes / _best_s(into) / 1e9)


def _time_moves(
    report: Report, memory: GpuMemory, host: Bytes, block_bytes: int, kind: str
) -> None:
    """Blocks all over both memories, in batches as a daemon moves them."""
    rows = GpuRows(memory, 0, host.nbytes // block_bytes, block_bytes, block_bytes)
    here = host.reshape(-1, block_bytes)
    to, at = _scattered(len(here))
    count, moved = len(to), len(to) * block_bytes
    report.add(
        f"{count} blocks of {block_bytes // KIB} KiB, {kind}",
        to_host_gb_s=moved / _best_s(lambda: rows.fetch(to, here, at)) / 1e9,
        to_card_gb_s=moved / _best_s(lambda: rows.store(to, here, at)) / 1e9,
    )


def _time_launches(report: Report, memory: GpuMemory, host: Bytes, block_bytes: int) -> None:
    """The same by a kernel that reads and writes the host's memory itself."""
    device = KernelDevice(Driver(), memory.gpu.index, Images(Nvrtc.find(), KernelCache()))
    here = host.reshape(-1, block_bytes)
    to, at = _scattered(len(here))
    down, up = (np.zeros(len(to), PIECE_DTYPE) for _ in range(2))
    down["source"] = up["target"] = memory.address + to * block_bytes
    down["target"] = up["source"] = host.ctypes.data + at * block_bytes
    down["bytes"] = up["bytes"] = block_bytes
    rows = GpuRows(memory, 0, len(here), block_bytes, block_bytes)
    content = pattern(len(to), block_bytes)
    with device.context:
        stream = device.context.stream()
        mover = Mover(device, stream)

        def move(pieces: npt.NDArray[np.void]) -> None:
            mover.move(pieces)
            stream.synchronize()

        here[at] = content
        move(up)
        here[at] = 0
        rows.fetch(to, here, at)
        right = np.array_equal(here[at], content)
        here[at] = 0
        move(down)
        right &= np.array_equal(here[at], content)
        moved = len(to) * block_bytes
        report.add(
            f"{len(to)} blocks of {block_bytes // KIB} KiB in one launch",
            ok=bool(right),
            to_host_gb_s=moved / _best_s(lambda: move(down)) / 1e9,
            to_card_gb_s=moved / _best_s(lambda: move(up)) / 1e9,
        )
        mover.close()
        stream.close()
    device.close()


def _scattered(slots: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Slots on the card and in the host's memory, in no order: at most 1024, as in one move."""
    order = np.random.default_rng(0)
    to, at = (order.permutation(slots)[:1024] for _ in range(2))
    return to, at


def _best_s(work: Callable[[], None]) -> float:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)
