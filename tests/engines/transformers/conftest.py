"""A daemon, a client of each test's own, and models that are attached to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tierkv
from examples.demo_daemon import DemoDaemon
from tests.engines.transformers.tiny import llama
from tierkv.integrations.transformers import Attached, attach

MIB = 1 << 20

Attach = Callable[..., Attached]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def own_daemon() -> Iterator[DemoDaemon]:
    """A running daemon of the test's own: 16 MiB of device tier."""
    with DemoDaemon(16 * MIB, 4 * MIB, 64 * MIB) as running:
        running.start()
        yield running


@pytest.fixture(scope="session")
def _shared_daemon() -> Iterator[DemoDaemon]:
    with DemoDaemon(64 * MIB, 8 * MIB, 128 * MIB) as running:
        running.start()
        yield running


@pytest.fixture
def client(_shared_daemon: DemoDaemon) -> Iterator[tierkv.Client]:
    """A client of a daemon that other tests use, too."""
    with tierkv.connect(_shared_daemon.socket, name="test") as client:
        yield client


@pytest.fixture
def attach_here(client: tierkv.Client, request: pytest.FixtureRequest) -> Attach:
    """``attach`` to that daemon, where the model finds nothing that other tests left."""

    def attach_here(model: Any, **options: Any) -> Attached:
        return attach(model, client, **{"salt": request.node.nodeid, **options})

    return attach_here


@pytest.fixture
def model() -> Any:
    return llama()


@pytest.fixture
def attached(model: Any, attach_here: Attach) -> Attached:
    return attach_here(model)
