"""One daemon for all tests that need no special one, and a worker that must never notice them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tierkv
from tests.service.blocks import SPEC, check, fill, tokens
from tests.service.running import Daemon, running


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon
        assert daemon.stop() == 0, daemon.said()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[tierkv.Client]:
    with daemon.connect() as client:
        yield client


@pytest.fixture
def ns(client):
    return client.namespace(SPEC)


@pytest.fixture
def bystander(daemon: Daemon) -> Iterator[None]:
    """A worker with a sequence before the test, which is whole and can grow after it."""
    with daemon.connect("bystander") as client:
        ns = client.namespace(SPEC)
        sequence = fill(ns, tokens(3, seed=1))
        pid, epoch = daemon.pid, client.epoch
        yield
        check(ns, sequence)
        sequence.reserve(1)
        assert ns.lookup(tokens(3, seed=1)).tokens == len(tokens(3, seed=1))
        assert (daemon.pid, client.epoch) == (pid, epoch)
        assert not sequence.lost
