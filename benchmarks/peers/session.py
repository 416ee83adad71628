"""One peer under measurement: its user's process, started, asked, killed."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import Peer
from tierkv.bench.daemon import SHM
from tierkv.bench.harness import Bench, Placement, child_environment

ANSWER_TIMEOUT_S = 180.0


class Failed(Exception):
    """The peer, or its client, said no."""


@dataclass(frozen=True)
class Size:
    """How large the work is: ``sources`` batches of other bytes each, ``capacity`` bytes kept."""

    block_bytes: int
    batch_blocks: int
    sources: int
    capacity: int


@dataclass(frozen=True)
class Runner:
    """What it takes to start a peer: its interpreter, and more for its environment."""

    peer: Peer
    python: Path
    variables: dict[str, str]


class Session:
    """A context manager. What is asked raises Failed if the peer fails or its process ends."""

    def __init__(self, bench: Bench, placement: Placement, runner: Runner, size: Size) -> None:
        self._bench = bench
        self._placement = placement
        self._runner = runner
        self._size = size
        name = runner.peer.name
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=bench.folder))
        shared = SHM if os.access(SHM, os.W_OK) else None
        self._memory = Path(tempfile.mkdtemp(prefix=f"peers-{name}-", dir=shared))
        self._process: subprocess.Popen[bytes] | None = None
        self._servers: list[int] = []
        self.version = ""

    def start(self) -> float:
        """Start client and server on what there is; returns the server's seconds until it serves.

        Raises Failed.
        """
        task = {
            "driver": self._runner.peer.driver,
            "batch_blocks": self._size.batch_blocks,
            "sources": self._size.sources,
            "place": {
                "folder": str(self._folder),
                "memory": str(self._memory),
                "server_cpu": self._placement.server,
                "capacity": self._size.capacity,
                "block_bytes": self._size.block_bytes,
                "options": self._runner.peer.options,
            },
        }
        command = [str(self._runner.python), "-m", "benchmarks.peers.worker", json.dumps(task)]
        with (self._folder / "client.log").open("ab") as log:
            self._process = self._bench.spawn(
                self._placement.client,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**child_environment(), **self._runner.variables},
            )
        started = self.ask("start")
        self.version = started["version"]
        self._servers = started["servers"]
        self._bench.children.update(self._servers)
        return float(started["seconds"])

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """What the client answers. Raises Failed."""
        if self._process is None:
            raise Failed("it is not running")
        return self._exchange(self._process, verb, **arguments)

    def kill(self) -> None:
        """kill -9 of all servers, and of the client."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(Failed):
            self._exchange(process, "kill")
        process.kill()
        self._bench.reap(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._bench.children.difference_update(self._servers)

    def _exchange(
        self, process: subprocess.Popen[bytes], verb: str, **arguments: Any
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise Failed(f"no answer to {verb} in {ANSWER_TIMEOUT_S:.0f} s")
        line = process.stdout.readline()
        if not line:
            words = (self._folder / "client.log").read_text(errors="replace").split("\n")
            raise Failed(f"its client ended: {' '.join(words[-3:])}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            with suppress(Failed):
                self.ask("stop")
        self.kill()
        for folder in (self._folder, self._memory):
            shutil.rmtree(folder, ignore_errors=True)
