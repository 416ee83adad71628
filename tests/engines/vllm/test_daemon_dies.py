"""The daemon dies, stops or is not there yet: the engine goes on, and its hits come back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crash.daemon import freeze
from tests.engines.vllm.checks import hits_all, nothing_held, same, stored, until
from tests.engines.vllm.conftest import TIERS, Truth
from tests.engines.vllm.engine import Engine, Engines, ask
from tests.engines.vllm.prompts import distinct_blocks, family, prompt
from tests.service.running import Daemon, running

KNOWN = [ask(tokens, max_tokens=6) for tokens in family(256, [10, 45, 130, 300], 30)]
PROBE = ask(prompt(100, 31), max_tokens=2)
ROUNDS = 14


def fresh(number: int) -> list[dict[str, Any]]:
    """Requests that no round before had."""
    return [ask(prompt(length, 1000 + number), max_tokens=6) for length in (40, 100, 350)]


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with running(TIERS) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(engines: Engines, tiny: Path, shared_daemon: Daemon) -> Iterator[Engine]:
    """One engine through all of this module: nothing here may need another."""
    with engines.start(tiny, shared_daemon) as engine:
        engine.generate([*KNOWN, PROBE])
        stored(shared_daemon, distinct_blocks([asked["tokens"] for asked in [*KNOWN, PROBE]]))
        yield engine


def hits_again(engine: Engine, truth: Truth) -> None:
    """Without an engine restart, and all of it: nothing acknowledged was lost."""

    def hit() -> bool:
        engine.forget()
        answers = engine.generate([PROBE])
        same(answers, truth([PROBE]))
        return answers[0].cached > 0

    until(hit, lambda: engine.said()[-3000:])
    engine.forget()
    answers = engine.generate(KNOWN)
    same(answers, truth(KNOWN))
    hits_all(answers, KNOWN)


def kill(daemon: Daemon) -> None:
    daemon.signal(signal.SIGKILL)
    daemon.wait()


@pytest.mark.parametrize("steps", range(6))
def test_killed_after_some_steps(
    engine: Engine, shared_daemon: Daemon, truth: Truth, steps: int
) -> None:
    """Between two steps: requests that load, that save, and that do both are on their way."""
    asks = [*KNOWN, *fresh(steps)]
    engine.forget()
    numbers = engine.add(asks)
    engine.step(steps)
    kill(shared_daemon)
    answers = engine.finish()
    same([answers[number] for number in numbers], truth(asks))
    # While it is gone, all goes on, too.
    engine.forget()
    same(engine.generate(asks), truth(asks))
    nothing_held(engine)
    shared_daemon.start()
    hits_again(engine, truth)


def test_killed_at_any_time(engine: Engine, shared_daemon: Daemon, truth: Truth) -> None:
    """In the middle of a step, wherever that is."""
    for number in range(ROUNDS):
        asks = [*KNOWN, *fresh(100 + number)]
        right = truth(asks)
        engine.forget()
        numbers = engine.add(asks)
        engine.post("finish", 60.0)
        timer = threading.Timer(0.002 * number * number / 3, kill, [shared_daemon])
        timer.start()
        answers = {int(name): answer["tokens"] for name, answer in engine.take().items()}
        assert [answers[name] for name in numbers] == [answer.tokens for answer in right]
        timer.join()
        nothing_held(engine)
        shared_daemon.start()
        hits_again(engine, truth)


def test_killed_and_back_within_one_request(
    engine: Engine, shared_daemon: Daemon, truth: Truth
) -> None:
    for number, steps in enumerate((1, 2, 4)):
        asks = [*KNOWN, *fresh(200 + number)]
        engine.forget()
        numbers = engine.add(asks)
        engine.step(steps)
        kill(shared_daemon)
        engine.step(1)
        shared_daemon.start()
        answers = engine.finish()
        same([answers[number] for number in numbers], truth(asks))
        hits_again(engine, truth)


def test_killed_while_it_brings_blocks_up(engines: Engines, tiny: Path, truth: Truth) -> None:
    """Most blocks are on disk: a worker cannot take them without the daemon.

    So some loads fail half-way. Their requests compute what is missing.
    """
    asks = [ask(tokens, max_tokens=3) for tokens in family(64, [1000] * 8, 32)]
    tiers = {**TIERS, "device.bytes": "2MiB", "host.bytes": "1MiB"}
    with running(tiers) as daemon, engines.start(tiny, daemon) as engine:
        right = truth(asks)
        engine.generate(asks)
        stored(daemon, distinct_blocks([asked["tokens"] for asked in asks]))
        for number in range(ROUNDS):
            engine.forget()
            numbers = engine.add(asks)
            engine.post("finish", 60.0)
            timer = threading.Timer(0.004 * number, kill, [daemon])
            timer.start()
            answers = {int(name): answer["tokens"] for name, answer in engine.take().items()}
            assert [answers[name] for name in numbers] == [answer.tokens for answer in right]
            timer.join()
            nothing_held(engine)
            daemon.start()
            until(lambda: hits(engine, asks[0]), lambda: engine.said()[-3000:])
        counted = engine.call("metrics")
        assert counted["vllm:tierkv_failed_load_blocks"] > 0, "no kill came in time"
        assert counted["vllm:tierkv_loaded_blocks"] > 0


def hits(engine: Engine, asked: dict[str, Any]) -> bool:
    """Whether the engine has hits, other than its own."""
    engine.forget()
    return engine.generate([asked])[0].cached > 0


def test_blocks_are_used_again_before_they_could_be_saved(
    engines: Engines, tiny: Path, truth: Truth, daemon: Daemon
) -> None:
    """The daemon does not answer for a while, and the engine has no memory to spare."""
    small = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    with engines.start(tiny, daemon, **small) as engine:
        for number in range(3):
            asks = [ask(prompt(300, 400 + 10 * number + other), max_tokens=2) for other in range(4)]
            freeze(daemon.pid)
            for asked in asks:
                same(engine.generate([asked]), truth([asked]))
            daemon.signal(signal.SIGCONT)
            until(partial(hits, engine, asks[-1]), lambda: engine.said()[-3000:])
            for asked in asks:
                engine.forget()
                same(engine.generate([asked]), truth([asked]))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_stopped_not_dead(engine: Engine, shared_daemon: Daemon, truth: Truth, steps: int) -> None:
    """Its socket takes requests that it never answers."""
    asks = [*KNOWN, *fresh(300 + steps)]
    engine.forget()
    numbers = engine.add(asks)
    engine.step(steps)
    freeze(shared_daemon.pid)
    try:
        answers = engine.finish()
        same([answers[number] for number in numbers], truth(asks))
        engine.forget()
        same(engine.generate(KNOWN), truth(KNOWN))
    finally:
        shared_daemon.signal(signal.SIGCONT)
    hits_again(engine, truth)
    nothing_held(engine)


def test_absent_when_the_engine_starts(engines: Engines, tiny: Path, truth: Truth) -> None:
    with Daemon(TIERS) as daemon, engines.start(tiny, daemon) as engine:
        answers = engine.generate(KNOWN)
        same(answers, truth(KNOWN))
        assert engine.external_hits() == 0
        engine.forget()
        answers = engine.generate(KNOWN)
        same(answers, truth(KNOWN))
        daemon.start()

        def hit() -> bool:
            engine.forget()
            same(engine.generate(KNOWN), truth(KNOWN))
            return engine.external_hits() > 0

        until(hit, lambda: engine.said()[-3000:])
        nothing_held(engine)


def test_an_empty_daemon_in_its_place(engines: Engines, tiny: Path, truth: Truth) -> None:
    """At the same address, but it knows nothing: all is stored again."""
    with Daemon(TIERS) as daemon:
        daemon.start()
        with engines.start(tiny, daemon) as engine:
            engine.generate([*KNOWN, PROBE])
            stored(daemon, distinct_blocks([asked["tokens"] for asked in [*KNOWN, PROBE]]))
            kill(daemon)
            with Daemon({**TIERS, "server.socket": str(daemon.socket)}) as other:
                other.socket = daemon.socket
                other.start()

                def hit() -> bool:
                    engine.forget()
                    same(engine.generate([*KNOWN, PROBE]), truth([*KNOWN, PROBE]))
                    return engine.external_hits() > before

                before = engine.external_hits()
                until(hit, lambda: engine.said()[-3000:])
                hits_again(engine, truth)
