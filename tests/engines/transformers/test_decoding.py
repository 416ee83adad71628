"""Every way of decoding gives the tokens that it gives without tierkv: cold, and warm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierkv
from examples.demo_daemon import DemoDaemon
from tests.engines.transformers.conftest import Attach
from tests.engines.transformers.running import GREEDY, Tokens, by_hand, held, stored
from tests.engines.transformers.tiny import llama, prompt, ragged
from tierkv.integrations.transformers import Attached, attach

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "beam search": {"num_beams": 4},
    "all beams": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "repetition penalty": {"repetition_penalty": 1.3},
    "prefill in chunks": {"prefill_chunk_size": 30},
}


def tokens(model: Any, inputs: dict[str, torch.Tensor], way: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(7)
    found: torch.Tensor = model.generate(**inputs, **{**GREEDY, **way})
    return found


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("padding", [[0], [0, 9, 33]], ids=["one row", "ragged rows"])
def test_tokens_are_those_of_the_plain_model(
    attach_here: Attach, client: tierkv.Client, padding: list[int], way: dict[str, Any]
) -> None:
    inputs = ragged(70, padding)
    expected = tokens(llama(), inputs, way)
    model = llama()
    attach_here(model)
    for _ in ("cold", "warm"):
        assert torch.equal(tokens(model, inputs, way), expected)
    assert held(client) == 0


def test_prompt_lookup_rolls_back(attach_here: Attach) -> None:
    repeated = {"input_ids": prompt(20).repeat(1, 4)}
    way = {"prompt_lookup_num_tokens": 5}
    expected = tokens(llama(), repeated, {})
    model = llama()
    attach_here(model)
    for _ in ("cold", "warm"):
        assert torch.equal(tokens(model, repeated, way), expected)


@pytest.mark.parametrize("assistant_attached", [False, True], ids=["plain", "attached"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_an_assistant_drafts(
    attach_here: Attach, assistant_attached: bool, do_sample: bool
) -> None:
    """A model of other weights drafts: most of its tokens are refused and rolled back."""
    inputs = ragged(70, [0])
    plain = {"assistant_model": llama(seed=5), "do_sample": do_sample}
    expected = tokens(llama(), inputs, plain)
    model, assistant = llama(), llama(seed=5)
    attach_here(model)
    if assistant_attached:
        attach_here(assistant)
    for _ in ("cold", "warm"):
        got = tokens(model, inputs, {"assistant_model": assistant, "do_sample": do_sample})
        assert torch.equal(got, expected)


def test_a_streamer_gets_each_token(model: Any, attached: Attached) -> None:
    streamer = Tokens()
    got = model.generate(prompt(50), streamer=streamer, **GREEDY)
    assert streamer.tokens == got[0, 50:].tolist()


def test_only_what_is_not_cached_is_computed(model: Any, attached: Attached) -> None:
    """48 of 49 tokens are cached: one is computed, and the whole prompt is never taken."""
    first = model.generate(prompt(48), **GREEDY)
    fed: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    again = attached.cache()
    assert torch.equal(model.generate(prompt(48), **by_hand(attached, again), **GREEDY), first)
    assert (again.cached_tokens, fed[0]) == (32, 16)
    assert again.get_seq_length() == 48 + 39
    longer = torch.cat((prompt(48), torch.tensor([[9]])), 1)
    cache = attached.cache()
    model.generate(longer, **by_hand(attached, cache), **GREEDY)
    assert cache.cached_tokens == 48


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_short_prompts(model: Any, attached: Attached, length: int) -> None:
    expected = llama().generate(prompt(length), **GREEDY)
    for _ in ("cold", "warm"):
        assert torch.equal(model.generate(prompt(length), **GREEDY), expected)


def test_inference_mode_and_none(model: Any, attach_here: Attach) -> None:
    """Whatever mode it was attached in, and is used in."""
    expected = llama().generate(prompt(40), **GREEDY)
    with torch.inference_mode():
        attach_here(model)
    assert torch.equal(model.generate(prompt(40), **GREEDY), expected)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt(40), **GREEDY), expected)


def test_rows_of_a_batch_find_what_each_has(model: Any, attached: Attached) -> None:
    """The columns that all rows have are left out; the others are computed, and stored once."""
    model.generate(prompt(64, seed=1), **GREEDY)
    both = torch.cat((prompt(64, seed=1), prompt(64, seed=2)))
    expected = llama().generate(both, **GREEDY)
    cache = attached.cache()
    assert torch.equal(model.generate(both, **by_hand(attached, cache), **GREEDY), expected)
    assert cache.cached_tokens == 0
    cache = attached.cache()
    assert torch.equal(model.generate(both, **by_hand(attached, cache), **GREEDY), expected)
    assert cache.cached_tokens == 2 * 48


def test_a_conversation_goes_on_in_one_cache(model: Any, attached: Attached) -> None:
    plain = llama()
    cache = attached.cache()
    ids = prompt(40)
    for turn in range(3):
        answer = model.generate(ids, **by_hand(attached, cache), **GREEDY)
        assert torch.equal(answer, plain.generate(ids, **GREEDY))
        ids = torch.cat((answer, prompt(11, seed=turn)), 1)
    cache.end()


def test_a_conversation_goes_on_in_new_caches(model: Any, attached: Attached) -> None:
    plain = llama()
    ids = prompt(40)
    for turn in range(3):
        cache = attached.cache()
        answer = model.generate(ids, **by_hand(attached, cache), **GREEDY)
        assert torch.equal(answer, plain.generate(ids, **GREEDY))
        assert cache.cached_tokens == (0 if not turn else (ids.shape[1] - 12) // 16 * 16)
        ids = torch.cat((answer, prompt(11, seed=turn)), 1)


def test_logits_of_the_whole_prompt_are_all_computed(model: Any, attached: Attached) -> None:
    model.generate(prompt(64), **GREEDY)
    with torch.no_grad():
        expected = llama()(prompt(64)).logits
        cache = attached.cache()
        got = model(prompt(64), **by_hand(attached, cache)).logits
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 1e-4
        hidden = model(
            prompt(64),
            logits_to_keep=1,
            output_hidden_states=True,
            **by_hand(attached, attached.cache()),
        ).hidden_states
    assert {states.shape[1] for states in hidden} == {64}


def test_scores_and_the_cache_are_returned(model: Any, attached: Attached) -> None:
    got = model.generate(prompt(50), return_dict_in_generate=True, output_scores=True, **GREEDY)
    cache = got[attached.cache_name]
    assert len(got.scores) == 40
    more = model.generate(got.sequences, **by_hand(attached, cache), **GREEDY)
    assert torch.equal(more, llama().generate(got.sequences, **GREEDY))


def test_other_caches_stay_what_they_are(own_daemon: DemoDaemon) -> None:
    """An attached model computes as ever when it is not asked to use tierkv."""
    inputs = ragged(60, [0, 20])
    expected = llama().generate(**inputs, **GREEDY)
    model = llama()
    with tierkv.connect(own_daemon.socket) as client:
        attached = attach(model, client)
        for way in ({"use_cache": False}, {"cache_implementation": "static"}):
            assert torch.equal(model.generate(**inputs, **way, **GREEDY), expected)
        assert stored(client) == 0
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
        assert (before := stored(client)) > 0
        attached.detach()
        assert torch.equal(model.generate(**ragged(60, [0, 9]), **GREEDY)[0], expected[0])
        assert stored(client) == before
        attach(model, client).detach()
