"""The real model answers token for token as it does without tierkv, and nearly all are hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.checks import hits_all, hits_none, nothing_held, same, stored
from tests.engines.vllm.engine import BLOCK, Engines, ask
from tests.engines.vllm.prompts import cacheable, distinct_blocks, varied_text
from tests.service.running import running

pytestmark = pytest.mark.timeout(600)

PROMPTS = 200
REAL = {"num_gpu_blocks_override": None, "max_num_seqs": 16}
"""Blocks of 1.4 MiB: as many as fit into the engine's 1 GiB."""

TIERS = {
    # None holds all of it: answers come out of each.
    "device.bytes": "512MiB",
    "host.bytes": "256MiB",
    "disk.bytes": "3GiB",
    "disk.segment_bytes": "128MiB",
}


def test_200_prompts_cold_warm_and_mixed(engines: Engines, smollm2: Path) -> None:
    prompts = varied_text(smollm2, PROMPTS, seed=7)
    asks = [ask(tokens, max_tokens=8) for tokens in prompts]
    with running(TIERS) as daemon:
        plain = engines.order(smollm2, enable_prefix_caching=False, **REAL)
        cold = engines.order(smollm2, daemon, **REAL)
        with plain.ready(), cold.ready():
            cold.post("add", asks)
            truth_numbers = plain.add(asks)
            numbers = cold.take()
            cold.post("finish", 300.0)
            answers = plain.finish(300.0)
            truth = [answers[number] for number in truth_numbers]
            done = {int(number): answer for number, answer in cold.take().items()}
            same([_answer(done[number]) for number in numbers], truth)
            stored(daemon, distinct_blocks(prompts))
            cold.kill()

            mixed, mixed_truth = _mixed(asks, plain)

        with engines.start(smollm2, daemon, **REAL) as warm:
            answers = warm.generate(asks)
            same(answers, truth)
            hits_all(answers, asks)
            _external(warm, asks)
            nothing_held(warm)

            # Its own prefix cache knows some of these, tierkv others, and nobody the rest.
            answers = warm.generate(mixed)
            same(answers, mixed_truth)
            assert sum(answer.cached for answer in answers) > 0
            nothing_held(warm)

        hit = daemon.metrics()
        assert hit['tierkv_checksum_failures_total{tier="device"}'] == 0
        assert hit['tierkv_prefix_hit_tokens_total{tier="disk"}'] > 0


def _external(warm: Any, asks: list[dict[str, Any]]) -> None:
    """Most of the hits came from tierkv; requests that run together share the engine's own."""
    distinct = distinct_blocks([asked["tokens"][: cacheable(asked["tokens"])] for asked in asks])
    assert warm.external_hits() >= distinct * BLOCK


def _mixed(asks: list[dict[str, Any]], plain: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """Old prompts that go on, that end early, and that turn off in the middle; and new ones."""
    mixed = []
    for asked, other in zip(asks[:20], asks[100:120], strict=True):
        tokens, more = asked["tokens"][:400], other["tokens"][:60]
        mixed += [
            ask(tokens + more, max_tokens=6),
            ask(tokens[: max(len(tokens) // 2, 1)] + more, max_tokens=6),
            ask((more + tokens)[:200], max_tokens=6),
        ]
    return mixed, plain.generate(mixed)


def _answer(document: dict[str, Any]) -> Any:
    from tests.engines.vllm.engine import Answer

    return Answer(**document)


def test_one_request_after_the_other(engines: Engines, smollm2: Path) -> None:
    """No batch, whose other requests' steps would hide that a load came too late."""
    prompts = varied_text(smollm2, 12, seed=8)
    asks = [ask(tokens[:200], max_tokens=6) for tokens in prompts]
    with running(TIERS) as daemon, engines.start(smollm2, daemon, **REAL) as engine:
        cold = [engine.generate([asked])[0] for asked in asks]
        engine.forget()
        stored(daemon, distinct_blocks([asked["tokens"] for asked in asks]))
        warm = [engine.generate([asked])[0] for asked in asks]
        same(warm, cold)
        hits_all(warm, asks)
        engine.forget()
        hits_none(engine.generate([ask(list(reversed(asks[0]["tokens"])))]))
