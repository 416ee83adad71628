"""The engine under measurement: its process, started, asked, killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 120.0
"""The longest prompt takes a sixth of it."""

KV_GIB = "1"


class EngineFailed(Exception):
    """The engine ended, or did not answer."""


class Answer(NamedTuple):
    """One request: when it began (CLOCK_MONOTONIC), and what it took."""

    began_s: float
    ttft_s: float
    ttft_cpu_s: float
    total_s: float
    cached: int
    tokens: list[int]

    @property
    def ended_s(self) -> float:
        return self.began_s + self.total_s


class Engine:
    """A vLLM process of its own. A context manager: killed at the end, whatever happens.

    ``transfer`` is its KVTransferConfig; None: it runs without a connector.
    """

    def __init__(
        self, python: Path, model: Path, transfer: dict[str, Any] | None, log: Path
    ) -> None:
        self._log = log
        self._unread = b""
        command = [str(python), "-m", "benchmarks.engines.worker", str(model), json.dumps(transfer)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                start_new_session=True,
            )
        try:
            self._read(START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def generate(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Ask it once; its own prefix cache is emptied before. Raises EngineFailed."""
        self._write({"prompts": [prompt], "tokens": tokens, "repeat": False})
        return Answer(**self._read(ANSWER_TIMEOUT_S))

    def repeat(self, prompts: Sequence[Sequence[int]], tokens: int) -> Iterator[Answer]:
        """Ask it over and over, in turns, until ``stop``; the answers. Raises EngineFailed."""
        self._write({"prompts": prompts, "tokens": tokens, "repeat": True})
        while "done" not in (answer := self._read(ANSWER_TIMEOUT_S)):
            yield Answer(**answer)

    def stop(self) -> None:
        """Let it end what ``repeat`` began, after the request that it is at."""
        self._write({})

    def kill(self) -> None:
        """kill -9 of all its processes, and wait until they are gone."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def _write(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineFailed(f"no answer in {timeout_s:.0f} s; see {self._log}")
            if not (more := os.read(pipe, 1 << 16)):
                words = self._log.read_text(errors="replace").strip().split("\n")
                raise EngineFailed(f"the engine ended: {words[-1]}")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def environment() -> dict[str, str]:
    """For an engine, and for what belongs to it: our code, one thread, no network."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "wal", "kernels")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_TRACK_USAGE": "false",
    }
