"""The operator for torch.compile: the same numbers, traced without a break."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_batches import Shape, check_output, make_batch
from tierkv_kernels import InvalidInput
from tierkv_kernels.torch_op import paged_attention
from torch import Tensor

SHAPE = Shape(lengths=((70, 1), (33, 9), (12, 12)), dtype=torch.bfloat16, softcap=30.0)


@pytest.fixture
def compiled() -> Iterator[Callable[..., object]]:
    """Compiles a function whole; needs no C++ compiler."""
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize("return_lse", [False, True])
def test_it_matches_the_definition(return_lse: bool) -> None:
    batch = make_batch(SHAPE)
    out, lse = paged_attention(*batch.tensors, **batch.options, return_lse=return_lse)
    assert lse.shape == (out.shape[:2] if return_lse else (0,))
    check_output(batch, out, lse if return_lse else None)


@pytest.mark.parametrize("return_lse", [False, True])
def test_torch_finds_nothing_wrong_with_it(return_lse: bool) -> None:
    batch = make_batch(dataclasses.replace(SHAPE, layout="pool nhd"))
    options = {**batch.options, "return_lse": return_lse}
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    with torch.no_grad():
        torch.library.opcheck(paged_attention, batch.tensors, options, test_utils=checks)


def test_a_model_is_compiled_whole(compiled: Callable[..., Callable[..., Tensor]]) -> None:
    batch = make_batch(SHAPE)
    _, *rest = batch.tensors

    def layer(q: Tensor, weight: Tensor) -> Tensor:
        out, _ = torch.ops.tierkv.paged_attention(q, *rest, **batch.options)
        return (out.flatten(1) @ weight).relu()

    weight = torch.randn(batch.q.shape[1] * batch.q.shape[2], 8).to(SHAPE.dtype)
    with torch.no_grad():
        got = compiled(layer)(batch.q, weight)
        assert torch.equal(got, layer(batch.q, weight))


def test_other_lengths_do_not_compile_again() -> None:
    graphs = []

    def compile_graph(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(torch.ops.tierkv.paged_attention, fullgraph=True, backend=compile_graph)
    plain = dataclasses.replace(SHAPE, softcap=0.0)
    for seed in range(4):
        lengths = tuple((seq_len + 5 * seed, q_len) for seq_len, q_len in plain.lengths)
        batch = make_batch(dataclasses.replace(plain, lengths=lengths, seed=seed))
        with torch.no_grad():
            out, _ = fast(*batch.tensors, q_indptr=batch.q_indptr)
        check_output(batch, out, None)
    torch.compiler.reset()
    assert len(graphs) <= 2  # for one shape, then for any


def test_bad_arguments_are_named() -> None:
    batch = make_batch(SHAPE)
    with pytest.raises(InvalidInput, match=r"q: got shape \(22, 64\), want"):
        paged_attention(batch.q.flatten(1), *batch.tensors[1:])
