"""The connector in vLLM 0.33.0, whose connector interface is newer than the installed one's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.checks import hits_all, nothing_held, same, stored
from tests.engines.vllm.conftest import Truth
from tests.engines.vllm.engine import Engines, ask
from tests.engines.vllm.models import gemma
from tests.engines.vllm.prompts import distinct_blocks, family
from tests.engines.vllm033 import VERSION, environment, tree
from tests.service.running import Daemon

PROMPTS = family(160, [5, 60, 130], 100)
ASKS = [ask(tokens) for tokens in PROMPTS]
BLOCKS = distinct_blocks(PROMPTS)

FIT = """
import json
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from tierkv.integrations.vllm import TierKVConnector
from tierkv.integrations.vllm.guard import require_fit

require_fit(TierKVConnector, (KVConnectorBase_V1, SupportsHMA), vllm.__version__)
print(json.dumps([vllm.__version__, sorted(TierKVConnector.__abstractmethods__)]))
"""


@pytest.fixture(scope="module")
def engines_033(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines of vLLM 0.33.0."""
    with Engines(tmp_path_factory.mktemp("engines-033"), tree()) as engines:
        yield engines


def test_it_fits() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIT],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [VERSION, []]


def test_it_works(engines_033: Engines, tiny: Path, truth: Truth, daemon: Daemon) -> None:
    with engines_033.start(tiny, daemon) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        stored(daemon, BLOCKS)
        nothing_held(engine)
        engine.kill()
    with engines_033.start(tiny, daemon) as engine:
        answers = engine.generate(ASKS)
        same(answers, truth(ASKS))
        hits_all(answers, ASKS)
        assert engine.external_hits() > 0
        nothing_held(engine)


def test_the_versions_do_not_share(
    engines: Engines, engines_033: Engines, tiny: Path, truth: Truth, daemon: Daemon
) -> None:
    """Nobody promises that they lay out their blocks in the same way."""
    with engines.start(tiny, daemon) as engine:
        engine.generate(ASKS)
        stored(daemon, BLOCKS)
    with engines_033.start(tiny, daemon) as engine:
        same(engine.generate(ASKS), truth(ASKS))
        assert engine.external_hits() == 0


def test_sliding_windows(engines_033: Engines, daemon: Daemon, tmp_path: Path) -> None:
    model = gemma(tmp_path, window=64)
    with (
        engines_033.start(model, enable_prefix_caching=False) as plain,
        engines_033.start(model, daemon) as engine,
    ):
        right = plain.generate(ASKS)
        same(engine.generate(ASKS), right)
        nothing_held(engine)
        for _ in range(2):
            engine.forget()
            same(engine.generate(ASKS), right)
            nothing_held(engine)
