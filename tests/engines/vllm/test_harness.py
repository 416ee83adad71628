"""The harness without tierkv: what it takes for the truth is true, and it notices a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.checks import hits_all, hits_none, nothing_held, same
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import EngineError, Engines, ask
from tests.engines.vllm.models import llama
from tests.engines.vllm.prompts import EDGES, family, prompt


def test_an_engine_with_its_own_cache_agrees_with_one_that_computes_all(
    engines: Engines, tiny: Path, truth: Truth
) -> None:
    asks = [ask(prompt(length, 1)) for length in EDGES]
    with engines.start(tiny) as engine:
        first = engine.generate(asks)
        same(first, truth(asks))
        hits_none(first)
        again = engine.generate(asks)
        same(again, truth(asks))
        hits_all(again, asks)
        engine.forget()
        hits_none(engine.generate(asks))
        assert engine.external_hits() == 0
        nothing_held(engine)


def test_every_block_of_the_context_shows_in_the_answer(truth: Truth) -> None:
    """Else a wrong block could go unnoticed."""
    tokens = prompt(320, 2)
    for place in range(0, 320, 32):
        other = list(tokens)
        other[place] = (other[place] + 1) % 512
        answers = truth([ask(tokens), ask(other)])
        with pytest.raises(AssertionError):
            same(answers[:1], answers[1:])


def test_other_weights_give_other_answers(engines: Engines, truth: Truth, tmp_path: Path) -> None:
    asks = [ask(tokens) for tokens in family(64, [5, 40], 3)]
    with engines.start(llama(tmp_path, seed=1)) as engine, pytest.raises(AssertionError):
        same(engine.generate(asks), truth(asks))


def test_an_engine_that_cannot_start_says_why(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="Error"):
        engines.start(tmp_path / "nothing")
