"""The same decode by others: gather and torch's attention, a Triton kernel, torch's paged one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from tierkv_kernels.cuda.backend import cuda_backend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.decode import KV_HEADS, Decode, Problem
from benchmarks.gpu_check.options import Options
from benchmarks.gpu_check.report import Report
from benchmarks.gpu_check.timing import flusher, median_s

TOLERANCE = 2e-2
"""Of outputs in bfloat16 among each other; the kernels part holds ours against float64."""


def run(report: Report, options: Options) -> None:
    """Each on the same tensors, in turn."""
    backend, flush = cuda_backend(), flusher(options)
    problems = [Problem(8, 4096), Problem(64, 8192), Problem(1, 4096)]
    if options.tiny:
        problems = [Problem(2, 64, head_dim=64)]
    for problem in problems:
        with report.trying(f"peers {problem.name}"):
            decode = Decode.make(problem, options, backend)
            ours = decode.run()
            ours_s = median_s(options, decode.run, before=flush)
            for name, find in PEERS.items():
                with report.trying(f"{name} {problem.name}"):
                    work, why = _ready(find, decode)
                    if work is None:
                        report.add(f"{name} {problem.name}", skipped=why)
                        continue
                    apart = (work().float() - ours.float()).abs().max().item()
                    seconds = median_s(options, work, before=flush)
                    report.add(
                        f"{name} {problem.name}",
                        ok=apart <= TOLERANCE,
                        took_us=seconds * 1e6,
                        times_ours=seconds / ours_s,
                        apart=apart,
                    )
            del decode


Work = Callable[[], Tensor]


def _ready(find: Callable[[Decode], Work | None], decode: Decode) -> tuple[Work | None, str]:
    """The peer's work, after a first run, or why there is none: that is no fault of ours."""
    work = find(decode)
    if work is None:
        return None, "not there"
    try:
        work()
    except Exception as error:
        return None, f"cannot run here: {type(error).__name__}: {error}"[:300]
    return work, ""


def _gather(decode: Decode) -> Work:
    """Copies of the blocks in order, then dense attention with a group's heads as rows."""
    problem = decode.problem
    table = decode.block_table.long()

    def dense(cache: Tensor) -> Tensor:
        rows = cache[table].flatten(1, 2)[:, : problem.context]
        return rows.transpose(1, 2).contiguous()

    def work() -> Tensor:
        q = decode.q.view(problem.batch, KV_HEADS, -1, problem.head_dim)
        out = scaled_dot_product_attention(q, dense(decode.k_cache), dense(decode.v_cache))
        return out.reshape(decode.q.shape)

    return work


def _triton(decode: Decode) -> Work | None:
    if importlib.util.find_spec("triton") is None or decode.q.device.type != "cuda":
        return None
    from benchmarks.gpu_check.triton_decode import decode as triton_decode

    return lambda: triton_decode(
        decode.q, decode.k_cache, decode.v_cache, decode.block_table, decode.seq_lens
    )


def _varlen(decode: Decode) -> Work | None:
    """torch's own, from 2.13 on; only its flash backend on CUDA takes block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in (varlen_attn.__doc__ or "") or decode.q.device.type != "cuda":
        return None
    problem = decode.problem
    starts = torch.arange(problem.batch + 1, dtype=torch.int32, device=decode.q.device)

    def work() -> Tensor:
        out: Tensor = varlen_attn(
            decode.q,
            decode.k_cache,
            decode.v_cache,
            starts,
            None,
            1,
            problem.context,
            enable_gqa=True,
            seqused_k=decode.seq_lens,
            block_table=decode.block_table,
        )
        return out

    return work


PEERS: dict[str, Callable[[Decode], Work | None]] = {
    "gather and SDPA": _gather,
    "Triton": _triton,
    "varlen_attn": _varlen,
}
