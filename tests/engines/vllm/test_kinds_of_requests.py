"""Prompts that are more than tokens, and engines that guess tokens or run ahead of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

from tests.engines.vllm.checks import hits_all, nothing_held, same, stored, until
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import BLOCK, Engine, Engines, ask
from tests.engines.vllm.prompts import distinct_blocks, prompt
from tests.service.running import Daemon
from tierkv import KVSpec
from tierkv.core.prefix import chain_hashes, extra_digests
from tierkv.integrations.vllm.chain import Chain, ChainOf

SPEC = KVSpec(model="any", packing="any", packed_bytes=64, block_tokens=BLOCK)


def goes_on(
    engine: Engine, daemon: Daemon, truth: Truth, asks: list[dict[str, Any]], seed: int
) -> None:
    """What an engine has stored of its answers is found, to the token, by questions after them."""
    right = truth(asks)
    turns = [
        ask(asked["tokens"] + answer.tokens[0] + prompt(40, seed), max_tokens=30)
        for asked, answer in zip(asks, right, strict=True)
    ]
    # The last token of an answer has no KV yet.
    known = [
        asked["tokens"] + answer.tokens[0][:-1] for asked, answer in zip(asks, right, strict=True)
    ]
    stored(daemon, distinct_blocks(known))
    engine.forget()
    answers = engine.generate(turns)
    same(answers, truth(turns))
    assert [answer.cached for answer in answers] == [
        len(tokens) // BLOCK * BLOCK for tokens in known
    ]
    nothing_held(engine)


def test_rejected_drafts(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    """KV of guessed tokens is in the engine's blocks for a while; none of it is stored."""
    guesses = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    asks = [ask(prompt(length, 110) * 3, max_tokens=70) for length in (30, 31, 32, 45)]
    with engines.start(tiny, daemon, speculative_config=guesses) as engine:
        same(engine.generate(asks), truth(asks))
        counted = engine.call("metrics")
        assert (
            counted["vllm:spec_decode_num_draft_tokens"]
            > counted["vllm:spec_decode_num_accepted_tokens"]
        )
        goes_on(engine, daemon, truth, asks, 111)


def test_scheduling_ahead(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    """Steps are planned before the tokens of the last one are known."""
    asks = [ask(prompt(length, 112), max_tokens=70) for length in (30, 64, 100)]
    with engines.start(tiny, daemon, async_scheduling=True) as engine:
        same(engine.generate(asks), truth(asks))
        goes_on(engine, daemon, truth, asks, 113)


def test_prompts_of_embeddings(engines: Engines, tiny: Path, daemon: Daemon) -> None:
    """They have no tokens: only their embeddings tell them apart."""
    one, other = list(range(100)), [*range(40), *range(200, 260)]
    asks = [ask([], embeds=one), ask([], embeds=other), ask([0] * 100)]
    with (
        engines.start(tiny, enable_prompt_embeds=True, enable_prefix_caching=False) as plain,
        engines.start(tiny, daemon, enable_prompt_embeds=True) as engine,
    ):
        right = plain.generate(asks)
        assert len({str(answer.tokens) for answer in right}) == 3
        for _ in range(3):
            for asked, answer in zip(asks, right, strict=True):
                engine.forget()
                same(engine.generate([asked]), [answer])
            nothing_held(engine)
        tokens_only = asks[2:]

        def hit() -> bool:
            engine.forget()
            return engine.generate(tokens_only)[0].cached == 96

        until(hit, engine.said)
        hits_all(engine.generate(tokens_only), tokens_only)


def test_images_tell_placeholders_apart() -> None:
    """Two pictures have the same placeholder tokens; blocks before them are shared."""
    same_place = [_blocks(("cat", 40)), _blocks(("dog", 40))]
    assert same_place[0][0] == same_place[1][0]
    assert not set(same_place[0][1:]) & set(same_place[1][1:])
    assert _blocks(("cat", 40)) == same_place[0]
    assert set(_blocks(("cat", 41))[1:]).isdisjoint(same_place[0][1:])
    two = _blocks(("cat", 40), ("dog", 100))
    assert two[:3] == same_place[0][:3]
    assert set(two[3:]).isdisjoint(same_place[0][3:])
    assert set(two[3:]).isdisjoint(_blocks(("cat", 40), ("cat", 100))[3:])


def test_a_chain_that_grows_is_the_same_chain() -> None:
    at_once = _blocks(("cat", 20), ("dog", 90))
    request = _request(("cat", 20), ("dog", 90))
    chain = ChainOf(request, BLOCK, (), generate_block_hash_extra_keys)
    for blocks in range(1, 6):
        grown = chain.first(blocks)
    assert _hashes(grown) == at_once


def test_what_the_chain_belongs_to_tells_it_apart() -> None:
    chains = [
        ChainOf(_request(salt=salt), BLOCK, owner, generate_block_hash_extra_keys).first(5)
        for salt in (None, "a", "b")
        for owner in ((), (("adapter", "x"),), (("adapter", "y"),), (("generation", b"x"),))
    ]
    hashes = [_hashes(chain) for chain in chains]
    assert len({value for chain in hashes for value in chain}) == len(chains) * 5


def _request(*images: tuple[str, int], salt: str | None = None) -> Request:
    """160 tokens, all alike, with images of 30 placeholders each."""
    return Request(
        "request",
        [7] * 160,
        SamplingParams(max_tokens=1),
        None,
        cache_salt=salt,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=30))
            for name, at in images
        ],
    )


def _blocks(*images: tuple[str, int]) -> list[bytes]:
    """What the blocks of such a request are found by."""
    chain = ChainOf(_request(*images), BLOCK, (), generate_block_hash_extra_keys)
    return _hashes(chain.first(5))


def _hashes(chain: Chain) -> list[bytes]:
    extras = extra_digests(chain.extra_keys or [None] * 5)
    return [bytes(value) for value in chain_hashes(SPEC.digest, chain.tokens, BLOCK, extras)]
