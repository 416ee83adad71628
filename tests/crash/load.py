"""The load of the crash tests, and checks that fail at the first broken promise."""

from __future__ import annotations

import signal
import time

from tests.crash.daemon import freeze
from tierkv.client.sync import Client
from tierkv.torture.load import PAUSE_S
from tierkv.torture.load import Load as AnyLoad
from tierkv.torture.promises import Chain, Promise, longest, look_up, read

__all__ = ["PAUSE_S", "Load", "Promise", "check_bytes", "check_found", "longest"]

WAIT_S = 30.0
"""Longest wait for something that must happen; only a failing test reaches it."""


class Load(AnyLoad):
    """A load that can be stopped wherever it is."""

    def freeze(self) -> None:
        """SIGSTOP all workers. Raises Broken if one has ended."""
        self.check_workers()
        for worker in self._workers:
            freeze(worker.pid)

    def await_a_worker(self, client: Client) -> None:
        """Return when one worker is back; the others may still be on their way."""
        deadline = time.monotonic() + WAIT_S
        while client.stat()["connections"] < 2:
            self.check_workers()
            assert time.monotonic() < deadline, "no worker comes back"
            time.sleep(0.01)

    def thaw(self) -> None:
        """Let frozen workers go on."""
        for worker in self._workers:
            worker.send_signal(signal.SIGCONT)


def check_bytes(client: Client, chains: list[Chain], *, whole: bool) -> None:
    """Every byte found of the chains must be right; and all of them found, if ``whole``."""
    for found in read(client, chains):
        assert found.whole or not whole, (
            f"{found.model}: {found.found_tokens} of {len(found.tokens)} acknowledged tokens "
            f"found of {found.tokens}"
        )
        assert not found.wrong_tokens, (
            f"{found.model}: wrong bytes at tokens {found.wrong_tokens} of {found.tokens}"
        )


def check_found(client: Client, chains: list[Chain]) -> None:
    """Every chain must be found whole. Reads no byte, hence is fast."""
    for found in look_up(client, chains):
        assert found.whole, f"{found.model}: only {found.found_tokens} found of {found.tokens}"
