"""A connection that comes and goes with the daemon, and that nobody waits for."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.service.running import Daemon, running, until
from tierkv.client.sync import Client, connect
from tierkv.core.spec import KVSpec
from tierkv.errors import TierkvError
from tierkv.integrations.attachment import LOST, Attachment

SPEC = KVSpec(model="m", packing="test", packed_bytes=4096, block_tokens=4)
LOG = logging.getLogger("tierkv.test")
WAIT_S = 20.0


def connecting(daemon: Daemon) -> Callable[[], Client]:
    """As an engine's connector connects."""
    return lambda: connect(daemon.socket, timeout_s=2.0, reconnect_s=0.0)


@contextmanager
def attached(daemon: Daemon) -> Iterator[Attachment]:
    """An attachment that is closed in the end."""
    attachment = Attachment(connecting(daemon), [SPEC], "test", LOG)
    try:
        yield attachment
    finally:
        attachment.close()


def test_it_is_there_at_once_when_the_daemon_is() -> None:
    """The first request of an engine may hit."""
    with running() as daemon, attached(daemon) as attachment:
        assert attachment.namespaces is not None
        assert [namespace.spec for namespace in attachment.namespaces] == [SPEC]


def test_it_attaches_when_a_daemon_comes() -> None:
    """Nobody has to ask."""
    with Daemon() as daemon, attached(daemon) as attachment:
        assert attachment.namespaces is None
        daemon.start()
        assert attachment.wait(WAIT_S) is not None


def test_it_comes_back_after_the_daemon_was_killed() -> None:
    """What was stored is found through it, as if nothing had been."""
    with running() as daemon, attached(daemon) as attachment:
        namespaces = attachment.namespaces
        assert namespaces is not None
        assert namespaces[0].write(range(8), bytes(8192)) == 2
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        with pytest.raises(LOST) as caught:
            namespaces[0].lookup(range(8), keep=0)
        attachment.lost(caught.value)
        assert attachment.namespaces is None
        daemon.start()
        again = attachment.wait(WAIT_S)
        assert again is not None
        assert again[0].lookup(range(8), keep=0).tokens == 8


def test_a_loss_that_is_told_twice_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """Two threads may meet the same dead daemon; a person reads of it once."""
    with running() as daemon, attached(daemon) as attachment:
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        with caplog.at_level(logging.INFO, LOG.name):
            attachment.lost(TierkvError("gone"))
            attachment.lost(TierkvError("gone"))
        said = [record.message for record in caplog.records if "is away" in record.message]
        assert len(said) == 1


def test_it_says_once_that_there_is_no_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """Not with each attempt."""
    attempts = []

    def counted() -> Client:
        attempts.append(1)
        return connecting(daemon)()

    with caplog.at_level(logging.INFO, LOG.name), Daemon() as daemon:
        attachment = Attachment(counted, [SPEC], "test", LOG)
        until(lambda: len(attempts) > 3)
        attachment.close()
    said = [record.message for record in caplog.records if record.name == LOG.name]
    assert len(said) == 1
    assert str(daemon.socket) in said[0]


def test_its_end_is_the_leases_end() -> None:
    """Nothing is left at the daemon, and no thread here."""
    with running() as daemon:
        with attached(daemon) as attachment:
            assert attachment.namespaces is not None
            assert daemon.status()["leases"]
        assert attachment.namespaces is None
        until(lambda: not daemon.status()["leases"])
