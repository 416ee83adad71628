"""What an engine's scheduler does to requests: preempt, abort, chunk, fork, score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.checks import alike, hits_all, hits_none, nothing_held, same, stored, until
from tests.engines.vllm.conftest import TIERS, Truth
from tests.engines.vllm.engine import Engine, EngineError, Engines, ask
from tests.engines.vllm.models import gemma
from tests.engines.vllm.prompts import distinct_blocks, family, prompt
from tests.service.running import Daemon, running

PROMPTS = family(160, [5, 60, 130, 300], 80)
ASKS = [ask(tokens) for tokens in PROMPTS]
BLOCKS = distinct_blocks(PROMPTS)


@pytest.fixture(scope="module")
def engine(engines: Engines, tiny: Path) -> Iterator[Engine]:
    """An engine with a daemon that has the prompts."""
    with running(TIERS) as daemon, engines.start(tiny, daemon) as engine:
        engine.generate(ASKS)
        stored(daemon, BLOCKS)
        yield engine


def test_preempted(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    """Too little KV memory for all that runs: requests lose their blocks and start again."""
    asks = [ask(prompt(90 + 7 * number, 81), max_tokens=60) for number in range(10)]
    right = truth(asks)
    small = {"num_gpu_blocks_override": 20, "max_model_len": 512}
    with engines.start(tiny, daemon, **small) as engine:
        for _ in range(3):
            engine.forget()
            same(engine.generate(asks), right)
            nothing_held(engine)
        assert engine.call("metrics")["vllm:num_preemptions"] > 0
        assert engine.external_hits() > 0
        # Whatever was stored in this crush is right.
        for asked, answer in zip(asks, right, strict=True):
            longer = ask(asked["tokens"] + answer.tokens[0][:40], max_tokens=4)
            engine.forget()
            same(engine.generate([longer]), truth([longer]))


def test_chunked_prefill(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    """Prompts that take many steps; their ends lie within blocks."""
    chunks = {"max_num_batched_tokens": 50, "max_num_seqs": 4}
    with engines.start(tiny, daemon, **chunks) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        engine.forget()
        answers = engine.generate(ASKS)
        same(answers, truth(ASKS))
        hits_all(answers, ASKS)
        nothing_held(engine)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_aborted(engine: Engine, truth: Truth, steps: int) -> None:
    """While they load, while they save; those that stay are as right as ever."""
    fresh = [ask(prompt(length, 900 + 10 * steps)) for length in (70, 200, 333)]
    asks = [*ASKS, *fresh]
    engine.forget()
    numbers = engine.add(asks)
    engine.step(steps)
    doomed = numbers[::2]
    engine.abort(doomed)
    answers = engine.finish()
    right = truth(asks)
    for number, asked in zip(numbers[1::2], range(1, len(asks), 2), strict=True):
        if number in answers:  # else it was done before
            same([answers[number]], [right[asked]])
    nothing_held(engine)
    engine.forget()
    same(engine.generate(asks), right)
    nothing_held(engine)


def test_all_aborted_at_once(engine: Engine, truth: Truth) -> None:
    for steps in range(4):
        engine.forget()
        engine.abort(engine.add(ASKS))
        numbers = engine.add(ASKS)
        engine.step(steps)
        engine.abort(numbers)
        nothing_held(engine)
    engine.forget()
    answers = engine.generate(ASKS)
    same(answers, truth(ASKS))
    hits_all(answers, ASKS)


def test_prompt_logprobs(engine: Engine, truth: Truth) -> None:
    """They need the whole prompt computed: no hit may cut them short."""
    scored = [ask(tokens, prompt_logprobs=0) for tokens in PROMPTS]
    engine.forget()
    answers = engine.generate(scored)
    same(answers, truth(scored))
    hits_none(answers)
    assert [len(answer.prompt_logprobs) for answer in answers] == [
        len(tokens) - 1 for tokens in PROMPTS
    ]
    both = [asked for pair in zip(scored, ASKS, strict=True) for asked in pair]
    engine.forget()
    same(engine.generate(both), truth(both))


def test_many_samples_of_a_prompt(engine: Engine, truth: Truth) -> None:
    """They share their prompt's blocks, in the engine and in the store.

    Another engine does not draw the same tokens, but it must find each as likely.
    """
    asks = [ask(tokens, max_tokens=40, n=3, temperature=1.0) for tokens in PROMPTS]
    for _ in range(2):
        engine.forget()
        answers = engine.generate(asks)
        hits_all(answers, asks)
        for asked, answer in zip(asks, answers, strict=True):
            assert len({str(tokens) for tokens in answer.tokens}) == 3
            whole = [asked["tokens"] + tokens for tokens in answer.tokens]
            scores = truth([ask(tokens, max_tokens=1, prompt_logprobs=0) for tokens in whole])
            for ours, theirs in zip(answer.logprobs, scores, strict=True):
                alike(ours, theirs.prompt_logprobs[-40:])
    nothing_held(engine)
    turns = [ask(asks[0]["tokens"] + tokens, max_tokens=4) for tokens in answers[0].tokens]
    engine.forget()
    answers = engine.generate(turns)
    same(answers, truth(turns))
    hits_all(answers, turns)


def test_requests_that_want_no_blocks_stored_or_read(engine: Engine, truth: Truth) -> None:
    engine.forget()
    asks = [ask(tokens, skip_reading_prefix_cache=True) for tokens in PROMPTS]
    answers = engine.generate(asks)
    same(answers, truth(ASKS))
    hits_none(answers)


def test_the_policy_fail(engines: Engines, tiny: Path, daemon: Daemon) -> None:
    """vLLM's default. Requests would fail because of a cache: refused, with the way out."""
    fail = {"kv_load_failure_policy": "fail"}
    with pytest.raises(EngineError, match='kv_load_failure_policy="recompute"'):
        engines.start(tiny, daemon, transfer=fail)


@pytest.mark.parametrize("seeing_all", [1, 0])
def test_sliding_windows(engines: Engines, daemon: Daemon, tmp_path: Path, seeing_all: int) -> None:
    """Blocks of some layers, or of all, are gone from the engine before their request's end."""
    model = gemma(tmp_path, window=64, seeing_all=seeing_all)
    asks = [*ASKS, ask(prompt(700, 82), max_tokens=80)]
    ordered = (
        engines.order(model, enable_prefix_caching=False),
        engines.order(model, daemon),
    )
    with ordered[0].ready() as plain, ordered[1].ready() as engine:
        right = plain.generate(asks)
        same(engine.generate(asks), right)
        nothing_held(engine)

        def hit() -> bool:
            engine.forget()
            same(engine.generate(asks), right)
            return engine.external_hits() > 0

        until(hit, engine.said)
        nothing_held(engine)
        for asked, answer in zip(asks, right, strict=True):
            engine.forget()
            same(engine.generate([asked]), [answer])
        engine.kill()
    with engines.start(model, daemon) as another:
        same(another.generate(asks), right)
        assert another.external_hits() > 0
