"""Test support: what must hold between an engine's answers, and between an engine and a daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.engines.vllm.engine import Answer, Engine
from tests.engines.vllm.prompts import cacheable
from tests.service.running import Daemon

LOGPROB_ERROR = 2e-3
"""What another order of float32 sums may change; a wrong block changes a hundred times as much."""


def same(got: Sequence[Answer], truth: Sequence[Answer]) -> None:
    """Token for token the same answers, for the same reasons."""
    assert len(got) == len(truth)
    for number, (one, other) in enumerate(zip(got, truth, strict=True)):
        assert one.tokens == other.tokens, f"request {number}: other tokens"
        assert one.reasons == other.reasons, f"request {number}: ended otherwise"
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            alike(ours, theirs)
        alike(one.prompt_logprobs, other.prompt_logprobs)


def alike(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Log-probabilities of the same model in the same context."""
    np.testing.assert_allclose(ours, theirs, atol=LOGPROB_ERROR)


def hits_all(answers: Sequence[Answer], asks: Sequence[dict[str, Any]]) -> None:
    """Everything that a cache of whole blocks can bring was brought."""
    assert [answer.cached for answer in answers] == [cacheable(asked["tokens"]) for asked in asks]


def hits_none(answers: Sequence[Answer]) -> None:
    assert [answer.cached for answer in answers] == [0] * len(answers)


def until(condition: Callable[[], Any], what: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait for a condition that must come true; if it does not, fail with what ``what`` tells."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what()}"
        time.sleep(0.01)


def blocks(daemon: Daemon) -> int:
    """Different blocks that the daemon holds."""
    return int(daemon.status()["blocks"])


def stored(daemon: Daemon, count: int) -> None:
    """Wait until the daemon holds so many blocks."""
    until(lambda: blocks(daemon) >= count, lambda: f"{blocks(daemon)} of {count} blocks are stored")


def nothing_held(engine: Engine) -> None:
    """No request, and no transfer either, still holds a block of the engine's memory."""

    def free() -> bool:
        count = engine.call("blocks")
        engine.call("idle", 0.02)
        return bool(count["free"] == count["all"] - 1)  # one stands for "no block"

    until(free, lambda: f"{engine.call('blocks')} for nothing: {engine.said()[-2000:]}")
