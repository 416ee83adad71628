"""Engines with a store behind them, measured beside one that has none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.engines.document import BOTH_KILLED, EMPTY, ENGINE_KILLED, Crash, Pair, Row
from benchmarks.engines.engine import Answer, Engine, EngineFailed
from benchmarks.engines.prompts import WARM_UP, Prompts
from benchmarks.engines.stores import Store

ANSWER_TOKENS = 16
SETTLE_S = 3.0
"""Between the last request and a kill: for what a store does in the background."""

CRASH_TOKENS = 256
CRASH_PROMPTS = 4
CRASH_ANSWER_TOKENS = 2
"""Few: how soon hits are back cannot be seen finer than a request takes."""

STEADY_S = 4.0
GONE_S = 3.0
"""How long the store stays away."""

RETURN_LIMIT_S = 60.0


@dataclass
class Session:
    """Measures one store after another.

    ``rounds``: how many prompts of each length. ``start_engine`` starts an engine with that store,
    or without one. ``quiet`` is entered around everything that is timed. ``plain``: an engine
    without a store.
    """

    prompts: Prompts
    rounds: dict[int, int]
    start_engine: Callable[[Store | None], Engine]
    quiet: Callable[[], AbstractContextManager[object]]
    plain: Engine
    _answers: dict[tuple[int, int], Answer] = field(init=False, default_factory=dict)

    def control(self) -> Iterator[Row]:
        """A second engine without a store in the place of one that has: what is only noise."""
        with self.start_engine(None) as engine:
            self.warm_up(engine)
            yield from self._side_by_side("none", engine)

    def all_of(self, store: Store) -> Iterator[Row | Crash]:
        """Every state of the store, one after the other."""
        with store:
            store.start()
            with self.start_engine(store) as engine:
                self.warm_up(engine)
                yield from self._side_by_side(store.name, engine)
                time.sleep(SETTLE_S)
            with self.start_engine(store) as engine:
                yield from self._warm(store.name, ENGINE_KILLED, engine)
                time.sleep(SETTLE_S)
            store.kill()
            store.start()
            with self.start_engine(store) as engine:
                yield from self._warm(store.name, BOTH_KILLED, engine)
                yield self._crash(store, engine)

    def warm_up(self, engine: Engine) -> None:
        """One prompt of each length that is not asked for again."""
        for number, tokens in enumerate(self.rounds, WARM_UP):
            engine.generate(self.prompts.prompt(number, tokens), ANSWER_TOKENS)

    def _side_by_side(self, name: str, engine: Engine) -> Iterator[Row]:
        """Each prompt once in either engine, in turns: nothing hits."""
        for tokens, count in self.rounds.items():
            pairs = []
            with self.quiet():
                for number in range(count):
                    prompt = self.prompts.prompt(number, tokens)
                    turns = (engine, self.plain) if number % 2 else (self.plain, engine)
                    answers = {each: each.generate(prompt, ANSWER_TOKENS) for each in turns}
                    self._answers[tokens, number] = answers[self.plain]
                    pairs.append(Pair.of(answers[self.plain], answers[engine]))
            yield Row(name, EMPTY, tokens, pairs)

    def _warm(self, name: str, state: str, engine: Engine) -> Iterator[Row]:
        """Each prompt again, held against the answer of the engine without a store."""
        self.warm_up(engine)
        with self.quiet():
            answers = {
                (tokens, number): engine.generate(
                    self.prompts.prompt(number, tokens), ANSWER_TOKENS
                )
                for tokens, number in self._answers
            }
        for tokens, count in self.rounds.items():
            keys = [(tokens, number) for number in range(count)]
            pairs = [Pair.of(self._answers[key], answers[key]) for key in keys]
            yield Row(name, state, tokens, pairs)

    def _crash(self, store: Store, engine: Engine) -> Crash:
        """kill -9 of the store under a stream of requests, and its return.

        The same beside the engine without a store: what a start of the store takes from an engine
        that has nothing to do with it, on a machine of few CPUs.
        """
        prompts = [self.prompts.prompt(number, CRASH_TOKENS) for number in range(CRASH_PROMPTS)]
        expected = [self.plain.generate(prompt, CRASH_ANSWER_TOKENS).tokens for prompt in prompts]
        for prompt in prompts:
            engine.generate(prompt, CRASH_ANSWER_TOKENS)
        time.sleep(SETTLE_S)
        with self.quiet():
            found = _outage(store, engine, prompts)
            plain = _outage(store, self.plain, prompts)
        hits = [each for each in found.answers if each.cached and each.began_s > found.serving_s]
        return Crash(
            store=store.name,
            tokens=CRASH_TOKENS,
            plain_s=plain.while_gone_s(),
            hit_s=[each.total_s for each in found.answers if each.ended_s < found.killed_s],
            gone_s=found.while_gone_s(),
            away_s=found.serving_s - found.killed_s,
            returns_s=hits[0].began_s - found.serving_s if hits else None,
            stuck_s=found.stuck_s,
            same=all(
                answer.tokens == expected[at % CRASH_PROMPTS]
                for at, answer in enumerate(found.answers)
            ),
        )


class _Outage(NamedTuple):
    """What an engine answered while the store was killed, and served again.

    ``stuck_s``: how long one answer was waited for until the engine was given up; 0: it never was.
    """

    answers: list[Answer]
    killed_s: float
    serving_s: float
    stuck_s: float

    def while_gone_s(self) -> list[float]:
        """How long the requests took that ran while the store did not serve."""
        return [
            answer.total_s
            for answer in self.answers
            if answer.ended_s > self.killed_s and answer.began_s < self.serving_s
        ]


def _outage(store: Store, engine: Engine, prompts: list[list[int]]) -> _Outage:
    """Ask the engine until, after the kill, a request begins that hits, or none can."""
    moments: list[float] = []

    def crash() -> None:
        time.sleep(STEADY_S)
        store.kill()
        moments.append(time.monotonic())
        time.sleep(GONE_S)
        store.start()
        moments.append(time.monotonic())

    def is_over() -> bool:
        if len(moments) < 2:
            return not crashing.is_alive()
        began_s = answers[-1].began_s
        if not any(answer.cached for answer in answers) or answers[-1].cached:
            return began_s > moments[1]
        return began_s > moments[1] + RETURN_LIMIT_S

    answers: list[Answer] = []
    stuck_s = 0.0
    crashing = threading.Thread(target=crash)
    crashing.start()
    try:
        _ask_until(engine, prompts, answers, is_over)
    except EngineFailed:
        stuck_s = time.monotonic() - (answers[-1].ended_s if answers else moments[0])
    finally:
        crashing.join()
    killed_s, serving_s = moments
    return _Outage(answers, killed_s, serving_s, stuck_s)


def _ask_until(
    engine: Engine, prompts: list[list[int]], answers: list[Answer], is_over: Callable[[], bool]
) -> None:
    """Add the answers to the prompts, asked in turns, until ``is_over``. Raises EngineFailed."""
    stopped = False
    for answer in engine.repeat(prompts, CRASH_ANSWER_TOKENS):
        if stopped:
            continue  # one more was on its way
        answers.append(answer)
        if is_over():
            engine.stop()
            stopped = True
