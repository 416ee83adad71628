"""Are the kernels right on the card? The table of cases, against attention in float64."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tierkv_kernels import plan
from tierkv_kernels.call import check_call
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.backend import CudaBackend, cuda_backend
from tierkv_kernels.cuda.driver import Driver
from tierkv_kernels.cuda.images import compile_variant
from tierkv_kernels.cuda.nvrtc import Nvrtc
from torch import Tensor

from benchmarks.gpu_check.options import Options
from benchmarks.gpu_check.report import Report

sys.path.append(str(Path(__file__).parents[2] / "tests" / "kernels"))
from attention_cases import CASES, FP8, Batch, Shape, check_output, make_batch

BASE = Shape(
    lengths=((70, 1), (33, 9), (0, 0), (12, 12), (129, 2), (3, 5)),
    head_dim=64,
    dtype=torch.bfloat16,
)
LSE_WITHIN = 1e-3
"""A card adds up in its own way, and its exponentials are approximate."""

SPLITS: tuple[str | int, ...] = (0, 64, "auto")


def run(report: Report, options: Options) -> None:
    """Compile, then compute all cases."""
    _compile(report, options)
    backend = cuda_backend()
    failed = done = 0
    for name, shape, split in _shapes(options):
        try:
            _case(backend, options, shape, split)
        except Exception as error:
            failed += 1
            told = f"{type(error).__name__}: {error}"[:400]  # an assertion says the numbers
            report.add(f"case: {name}", ok=False, failed=told)
            if "CUDA" in told or failed > 20:
                break  # after such an error the driver answers nothing more
        done += 1
    report.add("cases", ok=failed == 0 and done > 0, computed=done, wrong=failed)
    with report.trying("a fixed split does not depend on the batch"):
        _same_bits(report, backend, options)


def _compile(report: Report, options: Options) -> None:
    """Compile what decode of head_dim 128 takes, past any cache; what it takes of the card."""
    arch, nvrtc = Driver().device(0).arch, Nvrtc.find()
    head_dim = options.pick(128, 64)
    for kv_fp8 in (False, True):
        variant = variants.attention(bf16=True, kv_fp8=kv_fp8, head_dim=head_dim, row_warps=1)
        with report.trying(f"compile {variant.name}"):
            began = time.perf_counter()
            compiled = compile_variant(variant, arch, nvrtc)
            took_s = time.perf_counter() - began
            for usage in compiled.usage().values():
                spills = usage.spill_bytes + usage.stack_bytes
                report.add(
                    f"compile {variant.name}",
                    ok=spills == 0,
                    arch=arch,
                    took_s=took_s,
                    registers=usage.registers,
                    spilled_bytes=spills,
                )


def _shapes(options: Options) -> Iterator[tuple[str, Shape, str | int]]:
    if options.tiny:
        yield "decode", dataclasses.replace(BASE, **CASES["decode"]), 0
        return
    for name, fields in CASES.items():
        for dtype, head_dim in ((torch.bfloat16, 64), (torch.float16, 128)):
            for kv_dtype in (None, FP8):
                shape = dataclasses.replace(
                    BASE, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, **fields
                )
                for split in SPLITS if kv_dtype is None else SPLITS[:1]:
                    kind = f"{dtype} D={head_dim}{' fp8' if kv_dtype else ''} split={split}"
                    yield f"{name}, {kind}", shape, split
    for head_dim in (80, 96, 256):
        shape = dataclasses.replace(BASE, head_dim=head_dim, block_size=16, layout="pool nhd")
        yield f"D={head_dim}", shape, "auto"
    long = dataclasses.replace(BASE, head_dim=128, kv_heads=8, group=4, block_size=16)
    yield "long", dataclasses.replace(long, lengths=((5000, 1), (3001, 1), (7, 1))), "auto"


def _case(backend: CudaBackend, options: Options, shape: Shape, split: str | int) -> None:
    batch = make_batch(shape)
    workers = backend.num_workers(torch.device(options.device), shape.head_dim)
    work = plan(
        shape.seq_lens,
        shape.q_lens,
        **shape.geometry,
        **shape.mask,
        split=split,
        num_workers=workers,
    )
    out, lse = attend(backend, options.device, batch, plan=work)
    told = None if lse is None else lse.cpu()
    check_output(batch, out.cpu(), told, lse_within=LSE_WITHIN)


def attend(
    backend: CudaBackend, device: str, batch: Batch, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """The batch's attention on the device."""
    tensors = [_as_it_lies(tensor, device) for tensor in batch.tensors]
    given = {**batch.options, "q_indptr": batch.q_indptr.to(device), **more}
    defaults = {"plan": None, "scale": None, "k_scale": 1.0, "v_scale": 1.0, "out": None}
    call = check_call(*tensors, **{**defaults, **given}, return_lse=True)
    with torch.no_grad():
        backend.run(call)
    return call.out, call.lse


def _as_it_lies(tensor: Tensor, device: str) -> Tensor:
    """The tensor with the same strides and the same memory around it."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    there = whole.view(torch.uint8).to(device).view(tensor.dtype)
    return there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _same_bits(report: Report, backend: CudaBackend, options: Options) -> None:
    lengths = ((70, 1), (33, 1), (300, 1)) if not options.tiny else ((70, 1), (33, 1))
    together = dataclasses.replace(BASE, lengths=lengths, seed=3)
    batch = make_batch(together)
    work = plan(together.seq_lens, together.q_lens, **together.geometry, split=64)
    out, _ = attend(backend, options.device, batch, plan=work)
    same = True
    for row, length in enumerate(lengths):
        alone = dataclasses.replace(
            batch,
            shape=dataclasses.replace(together, lengths=(length,)),
            q=batch.q[row : row + 1],
            block_table=batch.block_table[row : row + 1],
            seq_lens=batch.seq_lens[row : row + 1],
            q_indptr=torch.tensor([0, 1], dtype=torch.int32),
        )
        single = plan([length[0]], [1], **together.geometry, split=64)
        got, _ = attend(backend, options.device, alone, plan=single)
        same &= torch.equal(got[0], out[row])
    report.add("a fixed split does not depend on the batch", ok=same)
