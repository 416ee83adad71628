"""The CUDA kernels' own source, in the simulator, against the definition of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_batches import FP8, Shape, check_output, make_batch, shapes
from attention_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_kernels import plan

from tests.kernels.sim.build import compiler
from tests.kernels.sim.simulator import SCHEDULES, SimulatedDevice, attention

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler ($CXX, else g++)")

BASE = Shape(
    lengths=((70, 1), (33, 9), (0, 0), (12, 12), (129, 2), (3, 5)),
    head_dim=64,
    dtype=torch.bfloat16,
)
BEFORE_SM_89 = ("-DTKV_HAS_E4M3=0",)


def run(
    shape: Shape, device: SimulatedDevice, *, split: str | int = 0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of the shape's batch, checked."""
    batch = make_batch(shape)
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, **shape.mask, split=split)
    out, lse = attention(
        device, *batch.tensors, **batch.options, plan=work, return_lse=True, **options
    )
    check_output(batch, out, lse)
    return out, lse


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_each_case_on_each_schedule(case: str, schedule: str) -> None:
    shape = dataclasses.replace(BASE, **CASES[case])
    device = SimulatedDevice(schedule)
    run(shape, device)
    run(shape, device, split=32)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_each_variant(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    _check_variant(head_dim, dtype, kv_dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float8_before_there_was_an_instruction_for_it(dtype: torch.dtype) -> None:
    _check_variant(80, dtype, FP8, macros=BEFORE_SM_89)


def _check_variant(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, macros: tuple[str, ...] = ()
) -> None:
    shape = dataclasses.replace(BASE, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, group=4)
    device = SimulatedDevice(SCHEDULES[head_dim // 16 % 3], macros=macros)
    run(shape, device, split=48)
    names = [variant.name for variant in device.functions]
    assert len(names) == 3  # few rows, many rows, merge
    for name, function in zip(names, device.functions.values(), strict=True):
        assert function.bank_conflicts == 0, name
        if name.startswith("paged_attention"):
            # All but the padding of the last row.
            assert 0 <= function.shared_given - function.shared_used <= 32, name


def test_queries_beyond_float16_meet_float8_keys() -> None:
    shape = dataclasses.replace(BASE, kv_dtype=FP8)
    batch = make_batch(shape)
    device = SimulatedDevice()
    batch.q[0] = 1e5
    batch.q[1] = torch.nan
    out, _ = attention(device, *batch.tensors, **batch.options)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2:].isfinite().all()


@settings(deadline=None, max_examples=40)
@given(
    shape=shapes(),
    split=st.one_of(st.sampled_from((0, "auto")), st.integers(1, 100)),
    tile_rows=st.integers(0, 40),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 2**30),
)
def test_any_plan_matches_the_definition(
    shape: Shape, split: str | int, tile_rows: int, schedule: str, seed: int
) -> None:
    shape = _in_16_bits(shape)
    batch = make_batch(shape)
    work = plan(
        shape.seq_lens,
        shape.q_lens,
        **shape.geometry,
        **shape.mask,
        split=split,
        tile_rows=tile_rows,
        num_workers=100,
    )
    device = SimulatedDevice(schedule, seed)
    out, lse = attention(device, *batch.tensors, **batch.options, plan=work, return_lse=True)
    check_output(batch, out, lse)


@settings(deadline=None, max_examples=20)
@given(
    shape=shapes(shared=True),
    split=st.sampled_from((0, 16, "auto")),
    schedule=st.sampled_from(SCHEDULES),
    data=st.data(),
)
def test_a_cascade_equals_the_flat_plan(
    shape: Shape, split: str | int, schedule: str, data: st.DataObject
) -> None:
    shape = _in_16_bits(shape)
    batch = make_batch(shape)
    first = data.draw(st.integers(0, len(shape.lengths) - 1))
    count = data.draw(st.integers(1, len(shape.lengths) - first))
    in_full_blocks = shape.shared_tokens // shape.block_size * shape.block_size
    work = plan(
        shape.seq_lens,
        shape.q_lens,
        **shape.geometry,
        **shape.mask,
        split=split,
        shared_prefix=[(first, count, data.draw(st.integers(0, in_full_blocks)))],
    )
    device = SimulatedDevice(schedule)
    out, lse = attention(device, *batch.tensors, **batch.options, plan=work, return_lse=True)
    check_output(batch, out, lse)


def _in_16_bits(shape: Shape) -> Shape:
    if shape.dtype != torch.float32:
        return shape
    return dataclasses.replace(shape, dtype=torch.float16)


def test_the_schedule_changes_no_bit() -> None:
    shape = dataclasses.replace(BASE, group=5)
    results = [run(shape, SimulatedDevice(schedule), split=32) for schedule in SCHEDULES]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("split", [0, 32])
def test_a_fixed_split_does_not_depend_on_the_batch(
    split: int, kv_dtype: torch.dtype | None
) -> None:
    shape = dataclasses.replace(BASE, kv_dtype=kv_dtype, group=3)
    batch = make_batch(shape)
    device = SimulatedDevice()

    def run_rows(rows: slice) -> torch.Tensor:
        work = plan(*zip(*shape.lengths[rows], strict=True), **shape.geometry, split=split)
        tokens = slice(int(batch.q_indptr[rows.start]), int(batch.q_indptr[rows.stop]))
        out, _ = attention(
            device,
            batch.q[tokens],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[rows],
            batch.seq_lens[rows],
            q_indptr=batch.q_indptr[rows.start : rows.stop + 1] - batch.q_indptr[rows.start],
            plan=work,
        )
        return out

    alone = torch.cat([run_rows(slice(row, row + 1)) for row in range(len(shape.lengths))])
    assert torch.equal(run_rows(slice(0, len(shape.lengths))), alone)


def test_keys_that_no_query_sees_change_nothing() -> None:
    shape = dataclasses.replace(BASE, lengths=((100, 1), (64, 1)), window=20)
    batch = make_batch(shape)
    device = SimulatedDevice()
    want, _ = attention(device, *batch.tensors, **batch.options)
    for row, (seq_len, _) in enumerate(shape.lengths):
        for position in range(seq_len - 1 - 20):
            slot = int(batch.block_table[row, position // shape.block_size])
            batch.k_cache[slot, position % shape.block_size] = torch.nan
            batch.v_cache[slot, position % shape.block_size] = torch.nan
    got, _ = attention(device, *batch.tensors, **batch.options)
    assert torch.equal(got, want)


def test_strided_queries_and_outputs() -> None:
    batch = make_batch(BASE)
    heads = batch.q.shape[1]
    fused = torch.cat((batch.q, batch.q, batch.q), dim=1)
    room = torch.full((batch.q.shape[0], 3 * heads, 64), torch.nan, dtype=torch.bfloat16)
    device = SimulatedDevice()
    want, _ = attention(device, *batch.tensors, **batch.options)
    for split in (0, 32):
        work = plan(BASE.seq_lens, BASE.q_lens, **BASE.geometry, split=split)
        given_out = room[:, heads : 2 * heads]
        q = fused[:, heads : 2 * heads]
        attention(device, q, *batch.tensors[1:], **batch.options, plan=work, out=given_out)
        torch.testing.assert_close(given_out, want, rtol=0.01, atol=0.01)
        assert room[:, :heads].isnan().all()
        assert room[:, 2 * heads :].isnan().all()


def test_offsets_past_two_to_the_31() -> None:
    # Only the pages of three blocks are ever touched; the rest of the 4 GiB stays unmapped.
    num_blocks = 2**31 // (16 * 2 * 64) + 8
    cache = torch.empty(num_blocks, 16, 2, 64, dtype=torch.float16)
    slots = [num_blocks - 1, 0, num_blocks - 3]
    small = torch.randn(3, 16, 2, 64).to(torch.float16)
    cache[slots] = small
    q = torch.randn(1, 4, 64).to(torch.float16)
    seq_lens = torch.tensor([41], dtype=torch.int32)
    table = torch.tensor([slots], dtype=torch.int32)
    device = SimulatedDevice()
    got, _ = attention(device, q, cache, cache, table, seq_lens)
    in_order = torch.arange(3, dtype=torch.int32)[None]
    want, _ = attention(device, q, small, small, in_order, seq_lens)
    assert torch.equal(got, want)
