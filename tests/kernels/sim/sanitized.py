"""A few batches on kernels that sanitizers watch: ``python -m tests.kernels.sim.sanitized``.

Their runtime must be loaded before. What is read or written beside a tensor ends the process, as
does undefined behaviour. With the argument "beside", the merge is given too small an output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # the helpers of the tests of attention

from attention_cases import FP8, Shape, check_output, make_batch
from tierkv_kernels import plan
from tierkv_kernels.cuda import variants
from tierkv_kernels.cuda.driver import arguments_of
from tierkv_kernels.cuda.params import MergeParams

from tests.kernels.sim.build import SANITIZED
from tests.kernels.sim.simulator import SimulatedDevice, attention

SHAPES = (
    Shape(lengths=((70, 1), (33, 9), (3, 5)), head_dim=64, group=3, dtype=torch.bfloat16),
    Shape(lengths=((50, 1),), head_dim=80, dtype=torch.bfloat16, kv_dtype=FP8, layout="pool hnd"),
)


def attend() -> None:
    """Each shape on a schedule of its own."""
    for shape, schedule in zip(SHAPES, ("ring", "random"), strict=True):
        batch = make_batch(shape)
        work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, **shape.mask, split=32)
        device = SimulatedDevice(schedule, options=SANITIZED)
        out, lse = attention(device, *batch.tensors, **batch.options, plan=work, return_lse=True)
        check_output(batch, out, lse)


def write_beside() -> None:
    """A token more than there is room for."""
    states = torch.zeros(1, 1, 64), torch.zeros(1, 1)
    lists = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([1], [0, 1], [0])]
    out = torch.zeros(1, 1, 64, dtype=torch.float16)
    params = MergeParams(
        *(tensor.data_ptr() for tensor in states),
        *(numbers.data_ptr() for numbers in lists),
        out.data_ptr(),
        0,
        64,
        64,
        1,
        1,
    )
    function = SimulatedDevice(options=SANITIZED).function(variants.merge(bf16=False, head_dim=64))
    function.launch((1, 1, 1), 128, 0, 0, arguments_of(params))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["beside"]:
        write_beside()
    else:
        attend()
