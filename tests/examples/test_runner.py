"""The runner on a tiny random model: the KV's place must not change a single token."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

from examples import generate as runner
from examples.generate import DenseKV, PooledKV, extend, generate, prefill
from examples.llama import Llama
from examples.smollm2 import CONFIG, TINY_CONFIG, random_model
from tests.examples.paged_fake import namespace_for
from tests.service.running import running
from tierkv.errors import InvalidArgument, InvariantViolation


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(1, TINY_CONFIG)[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TINY_CONFIG.vocab_size, (length,), generator=generator).tolist()


def run(model: Llama, kv: runner.SequenceCache, ids: list[int], count: int = 24) -> list[int]:
    return generate(model, kv, ids, count, stop_at_end=False).tokens


def test_every_token_of_the_context_matters(model: Llama) -> None:
    """Otherwise equal tokens would prove nothing about the KV."""
    ids = prompt(100)
    changed = [ids[0] + 1, *ids[1:]]
    tokens = run(model, DenseKV(model, 200), ids)
    assert len(set(tokens)) >= 8
    assert run(model, DenseKV(model, 200), changed) != tokens


def test_prefill_in_pieces_gives_the_same_tokens(
    model: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(100)
    whole = run(model, DenseKV(model, 200), ids)
    whole_logits = prefill(model, DenseKV(model, 200), ids, 0)
    monkeypatch.setattr(runner, "PREFILL_TOKENS", 7)
    assert run(model, DenseKV(model, 200), ids) == whole
    pieces_logits = prefill(model, DenseKV(model, 200), ids, 0)
    torch.testing.assert_close(pieces_logits, whole_logits, rtol=1e-4, atol=1e-4)


def test_decoding_equals_prefilling_the_longer_prompt(model: Llama) -> None:
    ids = prompt(40)
    tokens = run(model, DenseKV(model, 100), ids, 10)
    for count in range(10):
        logits = prefill(model, DenseKV(model, 100), ids + tokens[:count], 0)
        assert int(logits.argmax()) == tokens[count]


@pytest.mark.parametrize("block_tokens", [1, 5, 16])
def test_tokens_do_not_depend_on_where_the_kv_lies(model: Llama, block_tokens: int) -> None:
    ids = prompt(33)
    dense = run(model, DenseKV(model, 100), ids)
    assert run(model, PooledKV(namespace_for(model, block_tokens)), ids) == dense


def test_tokens_do_not_depend_on_who_computes_attention(model: Llama) -> None:
    """Prefill, extension of a cached prefix, and decoding, all over blocks of a real daemon."""
    document, question = prompt(80), prompt(19, seed=1)
    dense = run(model, DenseKV(model, 200), document + question)
    with running({"device.bytes": "64MiB"}) as daemon, daemon.connect() as client:
        for where in ("worker", "daemon"):
            spec = msgspec.structs.replace(model.spec(), salt=where)
            kv = PooledKV(client.namespace(spec), where)
            run(model, kv, document, 1)
            warm = generate(model, kv, document + question, 24, stop_at_end=False)
            assert warm.cached_tokens == 80
            assert warm.tokens == dense


def test_cached_prefix_is_not_computed_again(model: Llama) -> None:
    namespace = namespace_for(model)
    document, question = prompt(80), prompt(19, seed=1)
    run(model, PooledKV(namespace), document, 1)
    namespace.query_rows = 0

    warm = generate(model, PooledKV(namespace), document + question, 24, stop_at_end=False)

    assert warm.cached_tokens == 80
    assert namespace.query_rows == TINY_CONFIG.layers * (19 + 23)
    assert warm.tokens == run(model, DenseKV(model, 200), document + question)


def test_a_prompt_cached_to_its_end_still_gives_the_right_tokens(model: Llama) -> None:
    namespace = namespace_for(model)
    ids = prompt(64)
    cold = generate(model, PooledKV(namespace), ids, 24, stop_at_end=False)
    warm = generate(model, PooledKV(namespace), ids, 24, stop_at_end=False)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 48)
    assert warm.tokens == cold.tokens


def test_the_answer_is_cached_for_the_next_turn(model: Llama) -> None:
    namespace = namespace_for(model)
    ids = prompt(30)
    answer = run(model, PooledKV(namespace), ids, 40)
    next_turn = ids + answer + prompt(10, seed=2)
    # The last token of the answer was never computed, so 69 tokens have their KV: 4 full blocks.
    assert generate(model, PooledKV(namespace), next_turn, 1).cached_tokens == 64


def test_a_cache_that_covers_the_whole_prompt_is_refused(model: Llama) -> None:
    with pytest.raises(InvariantViolation, match="no token of the prompt"):
        prefill(model, DenseKV(model, 8), prompt(8), 8)


def test_generation_stops_at_the_end_token(model: Llama) -> None:
    ids = prompt(40)
    tokens = run(model, DenseKV(model, 100), ids)
    end_token = tokens[5]
    config = dataclasses.replace(model.config, end_token=end_token)
    ending = Llama(config, model.token_embedding, model.layers, model.final_norm, "")
    seen: list[int] = []
    result = generate(ending, DenseKV(model, 100), ids, 24, seen.append)
    assert result.tokens == seen == tokens[: tokens.index(end_token) + 1]
    assert len(result.token_times_s) == len(seen)
    assert result.ttft_s == min(result.token_times_s) > 0


def test_the_sequence_ends_even_when_the_model_fails(model: Llama) -> None:
    namespace = namespace_for(model)

    def fail(token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, PooledKV(namespace), prompt(20), 5, fail)
    assert namespace.open_sequences == 0


@pytest.mark.parametrize(("length", "count"), [(0, 1), (10, 0), (8_000, 193)])
def test_prompts_that_cannot_be_continued_are_refused(
    model: Llama, length: int, count: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"the prompt has {length} tokens"):
        generate(model, DenseKV(model, 1), [5] * length, count)


def test_random_weights_follow_from_the_seed_alone(model: Llama) -> None:
    same, other = (random_model(seed, TINY_CONFIG)[0] for seed in (1, 2))
    logits = [extend(m, DenseKV(m, 8), [5, 6, 7], 0) for m in (model, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert model.spec().digest == same.spec().digest != other.spec().digest


def test_the_spec_describes_smollm2() -> None:
    empty = torch.empty(0)
    spec = Llama(CONFIG, empty, [], empty, "sha").spec()
    spec.check()
    assert (spec.token_bytes, spec.block_bytes) == (46_080, 737_280)
    assert (spec.vocab_size, spec.fingerprint) == (49_152, "sha")
