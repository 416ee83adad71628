"""Which models are served, each with its own tokens, and which are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import tierkv
from tests.engines.transformers.conftest import Attach
from tests.engines.transformers.running import GREEDY
from tests.engines.transformers.tiny import REFUSED, SERVED, build, llama, prompt, ragged
from tests.service.running import until
from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers import attach


@pytest.mark.parametrize(("config", "items"), SERVED.values(), ids=SERVED)
def test_tokens_are_those_of_the_plain_model(
    attach_here: Attach, config: str, items: dict[str, Any]
) -> None:
    """Also beyond a sliding window, of which blocks are kept that no query sees any more."""
    # torch's own attention leaves soft caps out.
    attention = "eager" if "Gemma2" in config else None
    inputs = ragged(70, [0, 9, 33])
    expected = build(config, items, attention=attention).generate(**inputs, **GREEDY)
    model = build(config, items, attention=attention)
    attach_here(model)
    for _ in ("cold", "warm"):
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_16_bit_are_close(attach_here: Attach, dtype: torch.dtype) -> None:
    model, plain = llama().to(dtype), llama().to(dtype)
    attached = attach_here(model)
    with torch.no_grad():
        expected = plain(prompt(80)).logits.float()
        for _ in ("cold", "warm"):
            cache = attached.cache()
            got = model(prompt(80), **{attached.cache_name: cache}).logits.float()
            cache.end()
            assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize(("config", "items", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_model_is_refused(
    client: tierkv.Client, config: str, items: dict[str, Any], reason: str
) -> None:
    model = build(config, items)
    attention = model.config._attn_implementation
    with pytest.raises(InvalidArgument, match=reason):
        attach(model, client)
    assert model.config._attn_implementation == attention
    assert "generate" not in vars(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_encoder_and_decoder_is_refused(client: tierkv.Client) -> None:
    shape = {"vocab_size": 300, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 64}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, d_kv=16))
    with pytest.raises(InvalidArgument, match="decoder-only"):
        attach(model, client)


def test_what_computes_something_else_is_refused(client: tierkv.Client) -> None:
    """Whatever a model does that nobody thought of shows in its logits."""
    model = llama()
    layer = model.model.layers[1].self_attn
    plain = layer.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        past = kwargs.get("past_key_values", kwargs.get("cache"))
        out, weights = plain(*args, **kwargs)
        return (out if past is None else 2 * out), weights

    layer.forward = scaled
    with pytest.raises(InvalidArgument, match="does not know of"):
        attach(model, client)


def test_the_two_lines_that_switch_it_on(
    monkeypatch: pytest.MonkeyPatch, client: tierkv.Client
) -> None:
    """With no client it finds the daemon as any worker does, and leaves no connection behind."""
    monkeypatch.setenv("TIERKV_SOCKET", str(client._path))
    expected = llama().generate(prompt(50), **GREEDY)
    model = llama()
    attached = attach(model)
    assert torch.equal(model.generate(prompt(50), **GREEDY), expected)
    attached.client.close()
    config, items, _ = REFUSED["sinks"]
    with pytest.raises(InvalidArgument):
        attach(build(config, items))
    until(lambda: [worker["name"] for worker in client.stat()["workers"]] == ["test"])


def test_a_model_is_attached_once(attach_here: Attach) -> None:
    model = llama()
    attach_here(model)
    with pytest.raises(InvalidArgument, match="attached already"):
        attach_here(model)


def test_an_odd_head_is_computed_by_torch(attach_here: Attach) -> None:
    """The compiled kernel takes head sizes that are multiples of 16; others go to torch."""
    shape = {"head_dim": 10, "hidden_size": 40}
    expected = llama(**shape).generate(prompt(50), **GREEDY)
    model = llama(**shape)
    attach_here(model)
    for _ in ("cold", "warm"):
        assert torch.equal(model.generate(prompt(50), **GREEDY), expected)
