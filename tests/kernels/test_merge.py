"""merge_states alone; merged attention is tested in test_attention.py."""

from __future__ import annotations

import pytest
import torch
from tierkv_kernels import InvalidInput, merge_states
from torch import Tensor


def state(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(5, 3, 8, generator=generator).to(dtype)
    return out, torch.randn(5, 3, generator=generator) * 20


def test_weights_are_the_sums_of_exponentials() -> None:
    states = [state(seed) for seed in range(4)]
    out, lse = merge_states(states)
    weights = torch.stack([lse for _, lse in states]).double().exp()
    outs = torch.stack([out for out, _ in states]).double()
    want = (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), weights.sum(0).log(), rtol=1e-6, atol=1e-5)


def test_grouping_does_not_matter() -> None:
    a, b, c = state(1), state(2), state(3)
    left = merge_states([merge_states([a, b]), c])
    right = merge_states([a, merge_states([b, c])])
    torch.testing.assert_close(left, right)


def test_large_scores_do_not_overflow() -> None:
    out, lse = state(1)
    merged, merged_lse = merge_states([(out, lse + 5000), (out, lse + 5000)])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse + 5000 + torch.tensor(2.0).log())


def test_a_state_without_keys_changes_nothing() -> None:
    out, lse = state(1)
    blind = (torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    merged, merged_lse = merge_states([blind, (out, lse), blind])
    torch.testing.assert_close((merged, merged_lse), (out, lse))
    nothing, nothing_lse = merge_states([blind, blind])
    assert (nothing == 0).all()
    assert (nothing_lse == -torch.inf).all()


def test_the_dtype_stays() -> None:
    out, lse = merge_states([state(1, torch.bfloat16), state(2, torch.bfloat16)])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_bad_states_are_named() -> None:
    good = state(1)
    for states, message in [
        ([], "states: got none"),
        ([good, (good[0][:4], good[1][:4])], "states[1]: got out (4, 3, 8)"),
        ([good, state(1, torch.float16)], "states[1]: got out (5, 3, 8) of torch.float16"),
        ([(good[0], good[1][:4])], "states[0]: got lse (4, 3)"),
        ([(good[0], good[1].double())], "states[0]: got lse (5, 3) of torch.float64"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            merge_states(states)
        assert message in str(caught.value)
