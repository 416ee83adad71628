"""Times of work on the device, and of giving it to the device; seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_check.options import GIB, MIB, Options

Work = Callable[[], object]


def median_s(
    options: Options, work: Work, *, rounds: int = 30, warm: int = 5, before: Work | None = None
) -> float:
    """How long the device is at work. ``before`` runs before each round and is not counted.

    With a ``before`` that takes long, what the host takes to launch the work is not counted either.
    """
    rounds, warm = options.pick(rounds, 2), options.pick(warm, 1)
    if options.device == "cpu":
        return statistics.median(_host_s(work, before) for _ in range(warm + rounds))
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(warm + rounds)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(warm + rounds)]
    for begin, end in zip(begins, ends, strict=True):
        if before is not None:
            before()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    pairs = list(zip(begins, ends, strict=True))[warm:]
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def host_call_s(options: Options, work: Work, *, calls: int = 500) -> float:
    """How long the host takes to give one piece of small work to the device: best of some runs."""
    best = float("inf")
    for _ in range(options.pick(7, 2)):
        count = options.pick(calls, 5)
        if options.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        best = min(best, (time.perf_counter() - began) / count)
    return best


def flusher(options: Options) -> Work:
    """Work that leaves nothing of what was read before in the device's caches.

    It only reads: what it wrote would go out to memory while the next work is timed.
    """
    memory = torch.zeros(options.pick(GIB, MIB) // 4, dtype=torch.float32, device=options.device)
    return memory.sum


def _host_s(work: Work, before: Work | None) -> float:
    if before is not None:
        before()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
