"""The kernel on aarch64, of which there need not be one."""

from __future__ import annotations

import pytest
import torch
from attention_batches import FP8, Shape, check_output, make_batch
from attention_cases import CASES
from backends import with_kernel
from tierkv_kernels import InvalidInput, plan

from tests.kernels.cpu.emulated import EmulatedKernel, compile_for_aarch64, why_not


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernel:
    if reason := why_not():
        pytest.skip(reason)
    program = tmp_path_factory.mktemp("aarch64") / "attention"
    compile_for_aarch64(program)
    return EmulatedKernel(program)


def check(kernel: EmulatedKernel, shape: Shape, **options: object) -> None:
    batch = make_batch(shape)
    attend = with_kernel(kernel)
    check_output(batch, *attend(*batch.tensors, **batch.options, return_lse=True, **options))


@pytest.mark.parametrize("case", CASES)
def test_each_case(kernel: EmulatedKernel, case: str) -> None:
    lengths = ((70, 1), (33, 9), (0, 0), (12, 12), (2, 5), (129, 40))
    check(kernel, Shape(**{"lengths": lengths, "head_dim": 64, **CASES[case]}))


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_dtype_and_head_dim(
    kernel: EmulatedKernel, dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int
) -> None:
    lengths = ((530, 1), (37, 2), (40, 9))
    shape = Shape(lengths=lengths, group=6, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    check(kernel, shape)


def test_split_keys(kernel: EmulatedKernel) -> None:
    shape = Shape(lengths=((1100, 1), (300, 3)), head_dim=64)
    check(kernel, shape, plan=plan(shape.seq_lens, shape.q_lens, **shape.geometry, split=100))


def test_a_bad_block_table_is_named(kernel: EmulatedKernel) -> None:
    batch = make_batch(Shape(lengths=((20, 1),), head_dim=64))
    batch.block_table[0, 0] = 1000
    with pytest.raises(InvalidInput, match="block_table"):
        with_kernel(kernel)(*batch.tensors, **batch.options)
