"""Engines, models and daemons that the tests share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.engine import Answer, Engine, Engines
from tests.engines.vllm.models import llama
from tests.engines.vllm.prompts import key
from tests.service.running import Daemon, running

TIERS = {
    "device.bytes": "96MiB",
    "host.bytes": "32MiB",
    "disk.bytes": "256MiB",
    "disk.segment_bytes": "16MiB",
}

Truth = Callable[[Sequence[Mapping[str, Any]]], list[Answer]]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Where engines come from."""
    with Engines(tmp_path_factory.mktemp("engines")) as engines:
        yield engines


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama; nobody may change it."""
    return llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def plain(engines: Engines, tiny: Path) -> Iterator[Engine]:
    """The tiny Llama in an engine that caches nothing, neither itself nor elsewhere."""
    with engines.start(tiny, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def truth(plain: Engine) -> Truth:
    """What the tiny Llama answers when everything is computed."""
    known: dict[str, Answer] = {}

    def answers(asks: Sequence[Mapping[str, Any]]) -> list[Answer]:
        fresh = {key(asked): asked for asked in asks if key(asked) not in known}
        known.update(zip(fresh, plain.generate(list(fresh.values())), strict=True))
        return [known[key(asked)] for asked in asks]

    return answers


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of the test's own."""
    with running(TIERS) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def no_cycles_left() -> Iterator[None]:
    """Sockets that a failed test leaves in a traceback are not the next test's."""
    yield
    gc.collect()
