"""A fake daemon per test, on asyncio and on uvloop."""

from __future__ import annotations

import pytest

import tierkv
from tests.client.fake_daemon import FakeDaemon
from tests.rpc.serving import LOOPS
from tierkv import KVSpec


@pytest.fixture(params=LOOPS)
def loop_factory(request):
    return LOOPS[request.param]


@pytest.fixture
def daemon(tmp_path, loop_factory):
    fake = FakeDaemon(tmp_path, loop_factory).start()
    yield fake
    fake.close()


@pytest.fixture
def client(daemon):
    with tierkv.connect(daemon.path, timeout_s=5, reconnect_s=5, name="test") as client:
        yield client


@pytest.fixture
def spec():
    return KVSpec(model="m", layers=2, kv_heads=2, head_dim=4, block_tokens=4, vocab_size=1000)


@pytest.fixture
def ns(client, spec):
    return client.namespace(spec)
