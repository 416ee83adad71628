"""The whole daemon in one thread, with a clock that moves when its worker says so.

The worker is another process that asks for one thing at a time and, after each, lets the daemon
come to rest. Two runs of the same work on copies of the same store then make the same system calls
in the same order, so that the n-th of them is a place at which a fault can be put.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tierkv.config.schema import Config
from tierkv.service import daemon
from tierkv.tiers import disk_io
from tierkv.tiers.writes import SerialWrites

TURNS = 20
"""Turns of the loop in which everything that is due gets done, and everything it leads to."""

TICK_S = 0.11
"""A little more than the daemon's own."""

# What the worker may say, each answered by the same byte when it is done.
REST = b"r"
"""Do all there is to do."""
TICK = b"t"
"""Let some time pass, too."""

# What is not answered.
STOP = b"s"
DIE = b"d"

LISTENS = b"l"
"""What the daemon says first."""


class OneThreadLoop(asyncio.SelectorEventLoop):
    """Does at once what others do on threads. Time stands still until ``pass_time``."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now_s

    async def pass_time(self, seconds: float) -> None:
        """Let what is due within so many seconds be done."""
        self._now_s += seconds
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def run_in_executor(  # type: ignore[override]  # the types of *args are too fine for this
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def serve(config: Config, worker: socket.socket) -> int:
    """Run a daemon that obeys ``worker`` until it is told to stop; returns its exit code."""
    Path(config.server.socket).unlink(missing_ok=True)
    worker.setblocking(False)

    def one_thread() -> asyncio.AbstractEventLoop:
        loop = OneThreadLoop()
        loop.create_task(_obey(config, loop, worker))
        return loop

    with (
        patch.object(daemon, "_loop_factory", lambda: one_thread),
        patch.object(disk_io, "ThreadWrites", lambda _threads: SerialWrites()),
    ):
        return daemon.run(config, lambda: config)


async def _obey(config: Config, loop: OneThreadLoop, worker: socket.socket) -> None:
    while not _listens(config):
        await loop.pass_time(0)
    await loop.sock_sendall(worker, LISTENS)
    while (asked := await loop.sock_recv(worker, 1)) in (REST, TICK):
        await loop.pass_time(TICK_S if asked == TICK else 0)
        await loop.sock_sendall(worker, asked)
    if asked == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)


def _listens(config: Config) -> bool:
    return Path(config.server.socket).is_socket()
