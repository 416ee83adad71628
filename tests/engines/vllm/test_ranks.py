"""A model over two worker processes: each has its own half of every block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.checks import hits_all, same, until
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import Engines, ask
from tests.engines.vllm.prompts import family
from tests.service.running import Daemon

PROMPTS = family(160, [5, 60, 130], 90)
ASKS = [ask(tokens) for tokens in PROMPTS]

HALVES: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"},
}


@pytest.mark.timeout(300)
def test_two_halves(engines: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    with engines.start(tiny, daemon, **HALVES) as engine:
        answers = engine.generate(ASKS)
        same(answers, truth(ASKS))
        assert engine.external_hits() == 0

        def hit() -> bool:
            engine.call("idle", 0.05)
            engine.forget()
            answers = engine.generate(ASKS)
            same(answers, truth(ASKS))
            return [answer.cached for answer in answers] == [
                (len(tokens) - 1) // 32 * 32 for tokens in PROMPTS
            ]

        until(hit, lambda: engine.said()[-3000:])
        engine.kill()

    # An engine that is whole finds none of the halves.
    with engines.start(tiny, daemon) as whole:
        answers = whole.generate(ASKS)
        same(answers, truth(ASKS))
        assert whole.external_hits() == 0
        whole.kill()

    with engines.start(tiny, daemon, **HALVES) as engine:
        answers = engine.generate(ASKS)
        same(answers, truth(ASKS))
        hits_all(answers, ASKS)
