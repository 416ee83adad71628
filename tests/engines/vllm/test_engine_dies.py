"""Engines are killed again and again: the daemon gets back whatever they held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.vllm.checks import same, until
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import Engines, ask
from tests.engines.vllm.prompts import family
from tests.service.running import Daemon

KILLS = 30
KNOWN = [ask(tokens, max_tokens=4) for tokens in family(256, [10, 45, 300], 40)]


def shared_memory(daemon: Daemon) -> set[str]:
    """All that a daemon and its workers share, by name; other tests' is elsewhere."""
    return {path.name for path in daemon.arenas.rglob("*")}


def held(daemon: Daemon) -> dict[str, int]:
    status = daemon.status()
    return {name: int(status[name]) for name in ("leases", "connections", "sequences")}


NOTHING = {"leases": 0, "connections": 0, "sequences": 0}


@pytest.mark.timeout(300)
def test_killed_thirty_times(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    """Two at a time, each in the middle of requests that load and save."""
    descriptors = []
    shared = shared_memory(daemon)
    for cycle in range(KILLS // 2):
        pair = [engines.order(tiny, daemon) for _ in range(2)]
        with pair[0].ready() as one, pair[1].ready() as other:
            for number, engine in enumerate((one, other)):
                fresh = family(200, [9, 50], 4000 + 10 * cycle + number)
                engine.add([*KNOWN, *(ask(tokens, max_tokens=4) for tokens in fresh)])
                engine.step(cycle % 5)
            assert held(daemon)["leases"] > 0
            one.post("finish", 60.0)
            one.kill()
            other.kill()
        until(lambda: held(daemon) == NOTHING, lambda: held(daemon))
        descriptors.append(len(os.listdir(f"/proc/{daemon.pid}/fd")))
    # Files of its tiers and its log are opened when they are first needed.
    assert max(descriptors[-5:]) <= max(descriptors[:-5]), f"descriptors leak: {descriptors}"
    assert shared_memory(daemon) == shared
    status = daemon.status()
    device = status["tiers"]["device"]
    assert status["fenced_blocks"] == 0
    assert device["evictable_blocks"] == device["blocks"], "blocks that nobody holds are held"

    with engines.start(tiny, daemon) as engine:
        answers = engine.generate(KNOWN)
        same(answers, truth(KNOWN))
        assert engine.external_hits() > 0
        engine.close()
    assert shared_memory(daemon) == shared
    until(lambda: held(daemon) == NOTHING, lambda: held(daemon))
