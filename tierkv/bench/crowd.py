"""Worker processes that do the same work at once, each told when to begin.

``python -m tierkv.bench.crowd SOCKET NUMBER WORK BLOCK_BYTES BLOCKS`` is one of them. It prepares,
says so on its standard output, and for each line "SECONDS" on its standard input works for so long
and answers with the seconds of each piece, as JSON.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, NamedTuple, Self

import msgspec
import numpy as np

import tierkv
from tierkv.bench import blocks, worker
from tierkv.bench.daemon import Daemon, spec_of
from tierkv.bench.harness import F64, Bench, child_environment
from tierkv.client.sync import Client, Namespace

READY = "ready\n"


class Work(NamedTuple):
    """What each worker does again and again: "put", "get" (of 3 prompts of its own) or "spill".

    ``blocks`` of ``block_bytes`` a piece. A spill is a put, and a wait until it is on disk.
    """

    kind: str
    block_bytes: int
    blocks: int

    @property
    def bytes(self) -> int:
        """Payload of one piece."""
        return self.block_bytes * self.blocks


class Crowd:
    """``count`` workers on the client's CPU. A context manager."""

    def __init__(self, bench: Bench, cpu: int, daemon: Daemon, work: Work, count: int) -> None:
        self._bench = bench
        self._members: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            command = [sys.executable, "-m", "tierkv.bench.crowd", daemon.socket, str(number)]
            command += [work.kind, str(work.block_bytes), str(work.blocks)]
            self._members.append(
                bench.spawn(
                    cpu,
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=child_environment(),
                )
            )

    def __enter__(self) -> Self:
        try:
            for member in self._members:
                if _said(member) != READY:
                    raise RuntimeError("a worker cannot work")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self._members:
            member.kill()
            self._bench.reap(member)
            for pipe in (member.stdin, member.stdout):
                with suppress(OSError):
                    _open(pipe).close()

    def start(self, seconds: float, members: int | None = None) -> None:
        """Let them work, or only the first ones; ``wait`` takes what they report."""
        self._working = self._members[:members]
        for member in self._working:
            pipe = _open(member.stdin)
            pipe.write(f"{seconds}\n".encode())
            pipe.flush()

    def wait(self) -> list[F64]:
        """Seconds of each piece of each worker, once their time is up."""
        return [
            np.array(msgspec.json.decode(_said(member), type=list[float]))
            for member in self._working
        ]


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("a worker has no pipe")
    return pipe


def _said(member: subprocess.Popen[bytes]) -> str:
    return _open(member.stdout).readline().decode()


def _piece(cache: Client, namespace: Namespace, work: Work, number: int) -> Callable[[], None]:
    """One piece of the work; what it works on is prepared."""
    payload = blocks.some_payload(namespace.spec, work.blocks)
    prompts = blocks.Prompts(namespace.spec, work.blocks, first_seed=(1 + number) << 32)
    if work.kind == "get":
        cached = [prompts.fresh() for _ in range(3)]
        for tokens in cached:
            worker.put(namespace, tokens, payload)
            blocks.check(namespace, tokens, payload)
        out = np.zeros_like(payload)

        def get() -> None:
            cached.append(cached.pop(0))
            worker.get(namespace, cached[0], out)

        return get

    def put() -> None:
        worker.put(namespace, prompts.fresh(), payload)
        if work.kind == "spill":
            cache.flush()

    put()
    blocks.check(namespace, prompts.last, payload)
    return put


def _main(arguments: list[str]) -> None:
    socket, number, kind, block_bytes, count = arguments
    work = Work(kind, int(block_bytes), int(count))
    with tierkv.connect(socket, name=f"crowd-{number}") as cache:
        namespace = cache.namespace(spec_of(work.block_bytes))
        piece = _piece(cache, namespace, work, int(number))
        sys.stdout.write(READY)
        sys.stdout.flush()
        for line in sys.stdin:
            # From one piece's end to the next one's: nothing between them goes uncounted.
            mark, spent = time.perf_counter(), []
            until = mark + float(line)
            while mark < until:
                piece()
                now = time.perf_counter()
                spent.append(now - mark)
                mark = now
            sys.stdout.write(msgspec.json.encode(spent).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1:])
