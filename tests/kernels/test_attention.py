"""paged_attention against the definition, and against itself in other guises."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_batches import Shape, check_output, make_batch, shapes
from backends import Attend, each_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_kernels import merge_states, paged_attention, plan

BASE = Shape(lengths=((70, 1), (33, 9), (0, 0), (12, 12), (129, 2)))


@each_backend
@settings(deadline=None, max_examples=25)
@given(shape=shapes(), return_lse=st.booleans())
def test_any_batch_matches_the_definition(attend: Attend, shape: Shape, return_lse: bool) -> None:
    batch = make_batch(shape)
    out, lse = attend(*batch.tensors, **batch.options, return_lse=return_lse)
    assert (lse is not None) == return_lse
    check_output(batch, out, lse)


@each_backend
@settings(deadline=None, max_examples=25)
@given(
    shape=shapes(),
    split=st.one_of(st.just("auto"), st.integers(1, 100)),
    tile_rows=st.integers(0, 40),
    num_workers=st.sampled_from((1, 200)),
    return_lse=st.booleans(),
)
def test_any_plan_matches_the_definition(
    attend: Attend,
    shape: Shape,
    split: str | int,
    tile_rows: int,
    num_workers: int,
    return_lse: bool,
) -> None:
    batch = make_batch(shape)
    work = plan(
        shape.seq_lens,
        shape.q_lens,
        **shape.geometry,
        **shape.mask,
        split=split,
        tile_rows=tile_rows,
        num_workers=num_workers,
    )
    for _ in range(2):  # as for two layers: what a plan keeps must not leak into the next call
        out, lse = attend(*batch.tensors, **batch.options, plan=work, return_lse=return_lse)
        check_output(batch, out, lse)


@each_backend
@settings(deadline=None, max_examples=25)
@given(shape=shapes(shared=True), split=st.sampled_from((0, 16, "auto")), data=st.data())
def test_a_cascade_equals_the_flat_plan(
    attend: Attend, shape: Shape, split: str | int, data: st.DataObject
) -> None:
    batch = make_batch(shape)
    first = data.draw(st.integers(0, len(shape.lengths) - 1))
    count = data.draw(st.integers(1, len(shape.lengths) - first))
    in_full_blocks = shape.shared_tokens // shape.block_size * shape.block_size
    tokens = data.draw(st.integers(0, in_full_blocks))
    work = plan(
        shape.seq_lens,
        shape.q_lens,
        **shape.geometry,
        **shape.mask,
        split=split,
        shared_prefix=[(first, count, tokens)],
    )
    out, lse = attend(*batch.tensors, **batch.options, plan=work, return_lse=True)
    check_output(batch, out, lse)
    flat, flat_lse = attend(*batch.tensors, **batch.options, return_lse=True)
    check_output(batch, flat, flat_lse)


@each_backend
@pytest.mark.parametrize("block_size", [1, 16, 21])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "pool nhd", "pool hnd"])
def test_where_the_blocks_lie_changes_nothing(attend: Attend, layout: str, block_size: int) -> None:
    shape = dataclasses.replace(BASE, layout=layout, block_size=block_size)
    results = []
    for in_order in (False, True):
        batch = make_batch(dataclasses.replace(shape, in_order=in_order))
        results.append(attend(*batch.tensors, **batch.options, return_lse=True))
    torch.testing.assert_close(results[0], results[1])

    batch = make_batch(shape)
    moved = torch.randperm(batch.k_cache.shape[0])
    table = batch.block_table.clone()
    used = (table >= 0) & (table < len(moved))
    table[used] = moved[table[used].long()].to(torch.int32)
    k_cache, v_cache = torch.empty_like(batch.k_cache), torch.empty_like(batch.v_cache)
    k_cache[moved], v_cache[moved] = batch.k_cache, batch.v_cache
    tensors = (batch.q, k_cache, v_cache, table, batch.seq_lens)
    permuted = attend(*tensors, **batch.options, return_lse=True)
    torch.testing.assert_close(permuted, results[0])


@pytest.mark.parametrize(
    ("layout", "in_order", "copies"),
    [("nhd", True, False), ("nhd", False, True), ("pool nhd", True, True)],
)
def test_only_evenly_spaced_tokens_are_read_in_place(
    layout: str, in_order: bool, copies: bool
) -> None:
    shape = dataclasses.replace(BASE, layout=layout, in_order=in_order)
    batch = make_batch(shape)
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry)
    paged_attention(*batch.tensors, **batch.options, plan=work, backend="torch")
    assert ("torch keys" in work.scratch) == copies


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_halves_merge_into_the_whole(attend: Attend, dtype: torch.dtype) -> None:
    shape = Shape(lengths=((96, 3), (200, 3)), block_size=16, dtype=dtype, causal=False)
    batch = make_batch(shape)
    options = {"causal": False, "q_indptr": batch.q_indptr, "return_lse": True}
    q, k_cache, v_cache, table, seq_lens = batch.tensors
    whole, whole_lse = attend(*batch.tensors, **options)
    half = torch.tensor([48, 64], dtype=torch.int32)
    left = attend(q, k_cache, v_cache, table, half, **options)
    rest = torch.stack((table[0].roll(-3), table[1].roll(-4)))
    right = attend(q, k_cache, v_cache, rest, seq_lens - half, **options)
    merged, merged_lse = merge_states([left, right])
    check_output(batch, whole, whole_lse)
    check_output(batch, merged, merged_lse)


@each_backend
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("split", [0, 32])
def test_a_fixed_split_does_not_depend_on_the_batch(
    attend: Attend, split: int, return_lse: bool
) -> None:
    shape = dataclasses.replace(BASE, dtype=torch.bfloat16)
    batch = make_batch(shape)

    def run(rows: slice) -> torch.Tensor:
        lengths = shape.lengths[rows]
        work = plan(*zip(*lengths, strict=True), **shape.geometry, split=split)
        tokens = slice(int(batch.q_indptr[rows.start]), int(batch.q_indptr[rows.stop]))
        out, _ = attend(
            batch.q[tokens],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[rows],
            batch.seq_lens[rows],
            q_indptr=batch.q_indptr[rows.start : rows.stop + 1] - batch.q_indptr[rows.start],
            plan=work,
            return_lse=return_lse,
        )
        return out

    alone = torch.cat([run(slice(row, row + 1)) for row in range(len(shape.lengths))])
    assert torch.equal(run(slice(0, len(shape.lengths))), alone)


@each_backend
def test_keys_that_no_query_sees_change_nothing(attend: Attend) -> None:
    shape = Shape(lengths=((100, 1), (64, 1)), window=20)
    batch = make_batch(shape)
    want, _ = attend(*batch.tensors, **batch.options)
    for row, (seq_len, _) in enumerate(shape.lengths):
        for position in range(seq_len - 1 - 20):
            slot = int(batch.block_table[row, position // shape.block_size])
            batch.k_cache[slot, position % shape.block_size] = torch.nan
            batch.v_cache[slot, position % shape.block_size] = torch.nan
    got, _ = attend(*batch.tensors, **batch.options)
    assert torch.equal(got, want)


@each_backend
def test_one_query_per_sequence_is_the_default(attend: Attend) -> None:
    shape = Shape(lengths=((70, 1), (9, 1), (1, 1)))
    batch = make_batch(shape)
    out, lse = attend(*batch.tensors)
    assert lse is None
    check_output(batch, out, lse)


@each_backend
def test_the_output_can_be_given(attend: Attend) -> None:
    batch = make_batch(BASE)
    want, _ = attend(*batch.tensors, **batch.options)
    room = torch.full((batch.q.shape[0], 9, 16), torch.nan)
    given_out = room[:, 2:6]
    out, _ = attend(*batch.tensors, **batch.options, out=given_out)
    assert out is given_out
    assert torch.equal(out, want)
    assert room[:, :2].isnan().all()
    assert room[:, 6:].isnan().all()


@each_backend
def test_a_strided_query_and_a_scale_of_ones_own(attend: Attend) -> None:
    batch = make_batch(BASE)
    fused = torch.cat((batch.q, batch.q, batch.q), dim=1)
    q = fused[:, 4:8]
    got, _ = attend(q, *batch.tensors[1:], **batch.options, scale=0.5)
    want, _ = attend(batch.q * 2.0, *batch.tensors[1:], **batch.options)
    torch.testing.assert_close(got, want)


@each_backend
@pytest.mark.parametrize("return_lse", [False, True])
def test_queries_without_a_key_give_zero_and_minus_infinity(
    attend: Attend, return_lse: bool
) -> None:
    batch = make_batch(Shape(lengths=((3, 5), (0, 2), (5, 6))))
    out, lse = attend(*batch.tensors, **batch.options, return_lse=return_lse)
    blind = [0, 1, 5, 6, 7]
    assert (out[blind] == 0).all()
    if return_lse:
        assert (lse[blind] == -torch.inf).all()
    check_output(batch, out, lse)


@each_backend
def test_an_empty_batch(attend: Attend) -> None:
    batch = make_batch(Shape(lengths=()))
    out, lse = attend(*batch.tensors, **batch.options, return_lse=True)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


@each_backend
@pytest.mark.parametrize("window", [-1, 700])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_long_extend_is_worked_off_in_tiles(
    attend: Attend, window: int, return_lse: bool
) -> None:
    shape = Shape(lengths=((3500, 1300),), kv_heads=1, group=1, window=window)
    batch = make_batch(shape)
    out, lse = attend(*batch.tensors, **batch.options, return_lse=return_lse)
    check_output(batch, out, lse)


@each_backend
def test_a_prefill_without_a_past(attend: Attend) -> None:
    for q_len in (2, 64, 257):
        for window in (-1, q_len - 1, q_len // 2):
            batch = make_batch(Shape(lengths=((q_len, q_len),), window=window))
            out, lse = attend(*batch.tensors, **batch.options)
            check_output(batch, out, lse)


@each_backend
def test_a_few_queries_over_a_past(attend: Attend) -> None:
    for q_len in (2, 5, 16, 40):
        for group in (1, 3, 8):
            for window in (-1, 20):
                shape = Shape(lengths=((60 + q_len, q_len),), group=group, window=window)
                batch = make_batch(shape)
                out, lse = attend(*batch.tensors, **batch.options)
                check_output(batch, out, lse)


@each_backend
def test_offsets_past_two_to_the_31(attend: Attend) -> None:
    # Only the pages of three blocks are ever touched; the rest of the 4 GiB stays unmapped.
    num_blocks = 2**31 // (16 * 2 * 64) + 8
    cache = torch.empty(num_blocks, 16, 2, 64, dtype=torch.float16)
    slots = [num_blocks - 1, 0, num_blocks - 3]
    small = torch.randn(3, 16, 2, 64).to(torch.float16)
    cache[slots] = small
    q = torch.randn(1, 4, 64).to(torch.float16)
    seq_lens = torch.tensor([41], dtype=torch.int32)
    table = torch.tensor([slots], dtype=torch.int32)
    got, _ = attend(q, cache, cache, table, seq_lens)
    want, _ = attend(q, small, small, torch.arange(3, dtype=torch.int32)[None], seq_lens)
    torch.testing.assert_close(got, want)
