"""Bad arguments of paged_attention: each error names the argument, what was got, what is wanted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_batches import GARBAGE, Shape, check_output, make_batch
from tierkv_kernels import BackendUnavailable, InvalidInput, KernelError, paged_attention, plan

SHAPE = Shape(lengths=((20, 1), (9, 3)), block_size=8)
NAMES = ("q", "k_cache", "v_cache", "block_table", "seq_lens")


def arguments() -> dict[str, Any]:
    batch = make_batch(SHAPE)
    return {**dict(zip(NAMES, batch.tensors, strict=True)), "q_indptr": batch.q_indptr}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q: got shape (4, 64), want [tokens,", {"q": torch.zeros(4, 64)}),
        ("q: got torch.float64, want one of", {"q": torch.zeros(4, 4, 16).double()}),
        ("q: got strides", {"q": torch.zeros(4, 16, 4).transpose(1, 2)}),
        ("want [num_blocks, block_size, num_kv_heads, head_dim=16]", {"k_cache": cache(9, 8, 2)}),
        ("k_cache: got shape (9, 8, 2, 8), want", {"k_cache": cache(9, 8, 2, 8)}),
        ("k_cache: got torch.float16, want torch.float32", {"k_cache": cache(9, 8, 2, 16).half()}),
        ("k_cache: got 3 KV heads, want a divisor of q's 4", {"k_cache": cache(9, 8, 3, 16)}),
        ("k_cache: got strides", {"k_cache": cache(8, 8, 16, 2).transpose(2, 3)}),
        ("v_cache: got shape (5, 8, 2, 16), want (8, 8, 2, 16)", {"v_cache": cache(5, 8, 2, 16)}),
        ("v_cache: got torch.float16", {"v_cache": cache(8, 8, 2, 16).half()}),
        ("v_cache: got device meta, want q's, cpu", {"v_cache": cache(8, 8, 2, 16).to("meta")}),
        ("seq_lens: got shape (2, 1), want [batch]", {"seq_lens": int32(20, 9)[:, None]}),
        ("seq_lens: got torch.int64, want torch.int32", {"seq_lens": torch.tensor([20, 9])}),
        ("seq_lens: got values outside", {"seq_lens": int32(20, -9)}),
        ("block_table: got shape (3,), want [batch=2,", {"block_table": int32(1, 2, 3)}),
        ("block_table: got shape (1, 3), want (2, 3)", {"block_table": int32(1, 2, 3)[None]}),
        ("block_table: got torch.int64", {"block_table": torch.zeros(2, 3).long()}),
        (
            "block_table: got 2 blocks of 8 tokens per sequence, want at least 3",
            {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
        ),
        ("q_indptr: got shape (2,), want (3,)", {"q_indptr": int32(0, 4)}),
        ("q_indptr: got [0, 1, 3], want ascending from 0 to q's 4", {"q_indptr": int32(0, 1, 3)}),
        ("q_indptr: got [1, 1, 4], want ascending", {"q_indptr": int32(1, 1, 4)}),
        ("q_indptr: got [0, 5, 4], want ascending", {"q_indptr": int32(0, 5, 4)}),
        ("q: got 4 tokens, want 2, one per sequence", {"q_indptr": None}),
        ("scale: got nan", {"scale": float("nan")}),
        ("k_scale: got inf", {"k_scale": float("inf")}),
        ("v_scale: got nan", {"v_scale": float("nan")}),
        ("softcap: got -1.0, want 0 (none) or more", {"softcap": -1.0}),
        ("window: got -2", {"window": -2}),
        ("out: got shape (3, 4, 16), want (4, 4, 16)", {"out": torch.zeros(3, 4, 16)}),
        ("out: got torch.float16, want torch.float32", {"out": torch.zeros(4, 4, 16).half()}),
        ("out: got strides", {"out": torch.zeros(4, 16, 4).transpose(1, 2)}),
        ("backend: got 'numpy', want", {"backend": "numpy"}),
    ],
)
def test_bad_arguments_are_named(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        paged_attention(**{**arguments(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("entry", [*GARBAGE, 8])
def test_a_table_entry_outside_the_cache_is_named(entry: int, backend: str) -> None:
    got = {**arguments(), "backend": backend}
    assert got["k_cache"].shape[0] == 8
    got["block_table"][1, 1] = entry
    with pytest.raises(InvalidInput) as caught:
        paged_attention(**got)
    assert f"block_table: got {entry} at [1, 1], want a block of the cache, 0 to 7" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("made for num_q_heads=8", {"num_q_heads": 8}),
        ("made for num_kv_heads=4", {"num_kv_heads": 4}),
        ("made for head_dim=32", {"head_dim": 32}),
        ("made for block_size=16", {"block_size": 16}),
        ("made for causal=False, the call has True", {"causal": False}),
        ("made for window=3, the call has -1", {"window": 3}),
        ("made for q tokens=5, the call has 4", {"q_lens": [1, 4]}),
        ("made for sequences=1, the call has 2", {"seq_lens": [20], "q_lens": [4]}),
        ("made for seq_lens=[20, 8], the call has [20, 9]", {"seq_lens": [20, 8]}),
        ("made for q_indptr=[0, 2, 4], the call has [0, 1, 4]", {"q_lens": [2, 2]}),
    ],
)
def test_a_plan_for_something_else_is_refused(message: str, change: dict[str, Any]) -> None:
    options = {"seq_lens": SHAPE.seq_lens, "q_lens": SHAPE.q_lens, **SHAPE.geometry, **change}
    with pytest.raises(InvalidInput) as caught:
        paged_attention(**arguments(), plan=plan(**options))
    assert f"plan: {message}" in str(caught.value)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_shared_prefix_that_is_not_shared_is_refused(backend: str) -> None:
    work = plan(SHAPE.seq_lens, [1, 1], **SHAPE.geometry, shared_prefix=[(0, 2, 8)])
    got = {**arguments(), "q": torch.zeros(2, 4, 16), "q_indptr": None, "plan": work}
    got["backend"] = backend
    with pytest.raises(InvalidInput, match=r"block_table: got different blocks in the first 1"):
        paged_attention(**got)


def test_without_a_driver_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(BackendUnavailable, match="no CUDA driver: /nowhere/libcuda"):
        paged_attention(**arguments(), backend="cuda")


def test_a_head_dim_that_only_torch_takes() -> None:
    batch = make_batch(dataclasses.replace(SHAPE, head_dim=40))
    with pytest.raises(BackendUnavailable, match=r"takes a head_dim that is a multiple of 16"):
        paged_attention(*batch.tensors, **batch.options, backend="cpu")
    out, lse = paged_attention(*batch.tensors, **batch.options, return_lse=True)
    check_output(batch, out, lse)


def test_all_errors_have_one_base() -> None:
    assert issubclass(InvalidInput, KernelError)
    assert issubclass(BackendUnavailable, KernelError)


def test_auto_and_torch_agree() -> None:
    automatic, _ = paged_attention(**arguments(), backend="auto")
    by_name, _ = paged_attention(**arguments(), backend="torch")
    torch.testing.assert_close(automatic, by_name)
