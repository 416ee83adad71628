"""A few batches on a CPU kernel that sanitizers watch: ``-m tests.kernels.cpu.sanitized LIBRARY``.

Their runtime must be loaded before. What is read or written beside a tensor ends the process, as
does undefined behaviour. With a second argument "beside", lse is too small.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the helpers of the tests of attention

from attention_cases import FP8, Batch, Shape, check_output, make_batch
from tierkv_kernels import plan
from tierkv_kernels.call import Call, check_call
from tierkv_kernels.cpu import Kernel
from tierkv_kernels.cpu.library import Library

SHAPES = (
    Shape(lengths=((530, 1), (33, 4), (3, 5)), head_dim=64, group=3, dtype=torch.bfloat16),
    Shape(lengths=((50, 1), (0, 1)), head_dim=80, kv_dtype=FP8, layout="pool hnd", block_size=5),
    Shape(lengths=((150, 40),), head_dim=96, group=2, dtype=torch.float16, window=20, softcap=9.0),
)


def call_of(batch: Batch) -> Call:
    shape = batch.shape
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, **shape.mask, split=100)
    options = {"k_scale": 1.0, "v_scale": 1.0, **batch.options}
    return check_call(*batch.tensors, **options, plan=work, scale=None, out=None, return_lse=True)


def attend(library: Library) -> None:
    for level in library.levels():
        kernel = Kernel(level, 2, library=library)
        for shape in SHAPES:
            batch = make_batch(shape)
            call = call_of(batch)
            kernel.run(call)
            check_output(batch, call.out, call.lse)


def write_beside(library: Library) -> None:
    call = call_of(make_batch(SHAPES[0]))
    Kernel(library=library).run(dataclasses.replace(call, lse=torch.empty(1)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    what = write_beside if sys.argv[2:] == ["beside"] else attend
    what(Library(Path(sys.argv[1])))
