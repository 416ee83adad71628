"""Hits outlive the engine, and engines share them: in other folders, environments, at once."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.checks import hits_all, hits_none, same, stored
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import Engines, ask
from tests.engines.vllm.models import llama
from tests.engines.vllm.prompts import cacheable, distinct_blocks, family, prompt
from tests.service.running import Daemon

PROMPTS = [prompt(length, 20) for length in (1, 31, 33, 64, 65, 300)] + family(100, [3, 30, 60], 21)
ASKS = [ask(tokens) for tokens in PROMPTS]
BLOCKS = distinct_blocks(PROMPTS)


def test_killed_and_started_elsewhere(
    engines: Engines, tiny: Path, truth: Truth, daemon: Daemon
) -> None:
    """Another working folder, a relative path to the model, another hash seed, other variables."""
    with engines.start(tiny, daemon) as engine:
        cold = engine.generate(ASKS)
        same(cold, truth(ASKS))
        assert engine.external_hits() == 0
        stored(daemon, BLOCKS)
        engine.kill()
    with engines.start(
        tiny.name,
        daemon,
        cwd=tiny.parent,
        fresh=True,
        env={"PYTHONHASHSEED": "2", "LANG": "C", "TZ": "Asia/Tokyo", "VLLM_LOGGING_LEVEL": "ERROR"},
    ) as engine:
        warm = engine.generate(ASKS)
        same(warm, truth(ASKS))
        hits_all(warm, ASKS)
        assert engine.external_hits() > 0


def test_what_an_answer_added_is_found_by_the_next_turn(
    engines: Engines, tiny: Path, truth: Truth, daemon: Daemon
) -> None:
    """A conversation: the prompt, the answer and a new question; the engine died in between."""
    first = ask(prompt(70, 22), max_tokens=40)
    with engines.start(tiny, daemon) as engine:
        answer = engine.generate([first])[0]
        same([answer], truth([first]))
        # The last token's keys and values are never computed: 70 + 39 make three blocks.
        stored(daemon, 3)
        engine.kill()
    second = ask(first["tokens"] + answer.tokens[0] + prompt(20, 23))
    with engines.start(tiny, daemon) as engine:
        answer = engine.generate([second])[0]
        same([answer], truth([second]))
        assert answer.cached == 96


def test_the_engine_has_the_beginning_and_tierkv_the_rest(
    engines: Engines, tiny: Path, truth: Truth, daemon: Daemon
) -> None:
    whole = [ask(tokens) for tokens in family(300, [20, 90], 26)]
    with engines.start(tiny, daemon) as engine:
        engine.generate(whole)
        stored(daemon, distinct_blocks([asked["tokens"] for asked in whole]))
        for own in (32, 96, 288):
            engine.forget()
            engine.generate([ask(whole[0]["tokens"][: own + 1])])
            before = engine.external_hits()
            answers = engine.generate(whole)
            same(answers, truth(whole))
            hits_all(answers, whole)
            assert engine.external_hits() - before == sum(
                cacheable(asked["tokens"]) - own for asked in whole
            )


def test_two_engines_at_once(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    """Each finds what the other computed; both may compute the same at the same time."""
    theirs = [ask(tokens) for tokens in family(128, [2, 17, 40], 24)]
    together = [ask(tokens) for tokens in family(160, [5, 6, 7, 90], 25)]
    ordered = engines.order(tiny, daemon), engines.order(tiny, daemon)
    with ordered[0].ready() as one, ordered[1].ready() as other:
        same(one.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        found = other.generate(ASKS)
        same(found, truth(ASKS))
        hits_all(found, ASKS)

        same(other.generate(theirs), truth(theirs))
        stored(daemon, BLOCKS + distinct_blocks([asked["tokens"] for asked in theirs]))
        found = one.generate(theirs)
        same(found, truth(theirs))
        hits_all(found, theirs)

        for engine in (one, other):
            engine.add(together)
            engine.post("finish", 60.0)
        for engine in (one, other):
            answers = engine.take()
            assert [answers[number]["tokens"] for number in sorted(answers, key=int)] == [
                answer.tokens for answer in truth(together)
            ]
        for engine in (one, other):
            engine.forget()
        stored(daemon, distinct_blocks([asked["tokens"] for asked in ASKS + theirs + together]))
        for engine in (one, other):
            found = engine.generate(together)
            same(found, truth(together))
            hits_all(found, together)


def test_models_do_not_see_each_other(
    engines: Engines, tiny: Path, truth: Truth, daemon: Daemon, tmp_path: Path
) -> None:
    """The same tokens, the same shapes, other weights, in the same daemon."""
    another = llama(tmp_path / "another", seed=5)
    ordered = (
        engines.order(tiny, daemon),
        engines.order(another, daemon),
        engines.order(another, enable_prefix_caching=False),
    )
    with ordered[0].ready() as one, ordered[1].ready() as other, ordered[2].ready() as other_truth:
        expected = other_truth.generate(ASKS)
        same(one.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        answers = other.generate(ASKS)
        same(answers, expected)
        assert other.external_hits() == 0
        hits_none(answers[:1])
        stored(daemon, 2 * BLOCKS)
        for engine, right in ((one, truth(ASKS)), (other, expected)):
            engine.forget()
            answers = engine.generate(ASKS)
            same(answers, right)
            hits_all(answers, ASKS)
