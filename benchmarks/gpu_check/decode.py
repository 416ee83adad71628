"""How near decode comes to what the card can read, and what a launch costs the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tierkv_kernels import Plan, paged_attention, plan
from tierkv_kernels.call import check_call
from tierkv_kernels.cuda.backend import CudaBackend, cuda_backend
from torch import Tensor

from benchmarks.gpu_check.options import GIB, MIB, Options
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.timing import flusher, host_call_s, median_s

KV_HEADS, HEAD_DIM = 8, 128
LAYERS, LAYER = 2, 1
"""The pool has two layers, so that one layer is a strided view as in a daemon's pool."""

SHARE_LARGE, SHARE_SMALL, LARGE_BYTES, SMALL_BYTES = 0.85, 0.70, GIB, 128 * MIB
PAGED_OVER_CONTIGUOUS = 1.03
LAUNCH_S = 6e-6


@dataclass(frozen=True)
class Problem:
    """Decode of ``batch`` sequences of ``context`` tokens each."""

    batch: int
    context: int
    q_heads: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    head_dim: int = HEAD_DIM
    shuffled: bool = True

    @property
    def kv_bytes(self) -> int:
        """What must be read."""
        item = torch.empty(0, dtype=self.kv_dtype).element_size()
        return 2 * self.batch * self.context * KV_HEADS * self.head_dim * item

    @property
    def name(self) -> str:
        kv = "fp8" if self.kv_dtype == torch.float8_e4m3fn else "bf16"
        return (
            f"B={self.batch} S={self.context} {self.q_heads}/{KV_HEADS} {kv} "
            f"block {self.block_size}"
        )


@dataclass
class Decode:
    """A problem's tensors on the device, and its plan."""

    problem: Problem
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    work: Plan

    @classmethod
    def make(cls, problem: Problem, options: Options, backend: CudaBackend) -> Decode:
        """Slots in random order, unless the problem says otherwise."""
        device, size = options.device, problem.block_size
        width = -(-problem.context // size)
        shape = (problem.batch * width, LAYERS, 2, size, KV_HEADS, problem.head_dim)
        pool = torch.empty(shape, dtype=problem.dtype, device=device).normal_()
        pool = pool.to(problem.kv_dtype)
        slots = torch.arange(problem.batch * width)
        if problem.shuffled:
            slots = torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))
        lens = torch.full((problem.batch,), problem.context, dtype=torch.int32)
        q = torch.empty(
            (problem.batch, problem.q_heads, problem.head_dim), dtype=problem.dtype, device=device
        )
        item = pool.element_size()
        return cls(
            problem,
            q.normal_(),
            pool[:, LAYER, 0],
            pool[:, LAYER, 1],
            slots.to(torch.int32).view(problem.batch, width).to(device),
            lens.to(device),
            plan(
                lens.numpy(),
                num_q_heads=problem.q_heads,
                num_kv_heads=KV_HEADS,
                head_dim=problem.head_dim,
                block_size=size,
                split="auto",
                num_workers=backend.num_workers(
                    torch.device(device), problem.head_dim, kv_bytes=item
                ),
            ),
        )

    def run(self) -> Tensor:
        """One layer's attention."""
        out, _ = paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            plan=self.work,
            backend="cuda",
        )
        return out


def run(report: Report, options: Options) -> None:
    """Ceiling, grid, tables, launches."""
    ceiling = read_ceiling(report, options)
    backend, flush = cuda_backend(), flusher(options)
    for problem in _grid(options):
        with report.trying(f"decode {problem.name}"):
            decode = Decode.make(problem, options, backend)
            seconds = median_s(options, decode.run, before=flush)
            rate = problem.kv_bytes / seconds
            report.add(
                f"decode {problem.name}",
                **_verdict(problem.kv_bytes, rate / ceiling, options),
                took_us=seconds * 1e6,
                kv_gb_s=rate / 1e9,
                share=rate / ceiling,
                kv_mib=problem.kv_bytes / MIB,
            )
            del decode
    with report.trying("shuffled tables against tables in order"):
        _tables(report, options, backend)
    with report.trying("a launch"):
        _launches(report, options, backend)


def read_ceiling(report: Report, options: Options) -> float:
    """The most bytes a second that a plain reduction reads."""
    room = options.free_bytes() * 6 // 10
    size = options.pick(next(size for size in (8 * GIB, 4 * GIB, GIB, 0) if size <= room), 4 * MIB)
    memory = torch.zeros(size // 4, dtype=torch.float32, device=options.device)
    best = 0.0
    for name, work in (("sum", memory.sum), ("max", memory.max)):
        rate = size / median_s(options, work, rounds=15)
        report.add(f"read ceiling, {name}", gb_s=rate / 1e9, mib=size / MIB)
        best = max(best, rate)
    left, right = memory.chunk(2)
    seconds = median_s(options, lambda: left.copy_(right), rounds=15)
    report.add("copy on the card, read and written", gb_s=size / seconds / 1e9)
    return best


def _grid(options: Options) -> list[Problem]:
    if options.tiny:
        return [Problem(2, 64, head_dim=64)]
    problems = [Problem(batch, context) for batch in (1, 8, 64) for context in (1024, 8192, 32768)]
    problems += [Problem(1, 4096), Problem(8, 4096)]
    problems += [Problem(batch, 8192, q_heads=64) for batch in (8, 64)]
    problems += [Problem(batch, 8192, block_size=64) for batch in (8, 64)]
    problems += [
        Problem(batch, context, kv_dtype=torch.float8_e4m3fn)
        for batch in (8, 64)
        for context in (8192, 32768)
    ]
    room = options.free_bytes() * 6 // 10
    # Made in 16 bits first.
    return [one for one in problems if 2 * LAYERS * one.kv_bytes < room]


def _verdict(kv_bytes: int, share: float, options: Options) -> dict[str, bool]:
    if options.device == "cpu" or kv_bytes < SMALL_BYTES:
        return {}
    return {"ok": share >= (SHARE_LARGE if kv_bytes >= LARGE_BYTES else SHARE_SMALL)}


def _tables(report: Report, options: Options, backend: CudaBackend) -> None:
    flush, took = flusher(options), []
    for shuffled in (True, False):
        problem = Problem(
            options.pick(64, 2),
            options.pick(8192, 64),
            head_dim=options.pick(HEAD_DIM, 64),
            shuffled=shuffled,
        )
        decode = Decode.make(problem, options, backend)
        took.append(median_s(options, decode.run, before=flush))
        del decode
    ratio = took[0] / took[1]
    checked = {} if options.device == "cpu" else {"ok": ratio <= PAGED_OVER_CONTIGUOUS}
    report.add("shuffled tables against tables in order", **checked, times=ratio)


def _launches(report: Report, options: Options, backend: CudaBackend) -> None:
    decode = Decode.make(Problem(1, 16, head_dim=options.pick(HEAD_DIM, 64)), options, backend)
    call_s = host_call_s(options, decode.run)
    call = check_call(
        decode.q,
        decode.k_cache,
        decode.v_cache,
        decode.block_table,
        decode.seq_lens,
        q_indptr=None,
        plan=decode.work,
        scale=None,
        causal=True,
        window=-1,
        softcap=0.0,
        k_scale=1.0,
        v_scale=1.0,
        out=None,
        return_lse=False,
    )
    launch_s = host_call_s(options, lambda: backend.run(call))
    checked = {} if options.device == "cpu" else {"ok": launch_s <= LAUNCH_S}
    report.add("a launch", **checked, host_us=launch_s * 1e6, whole_call_host_us=call_s * 1e6)
