"""Test support: real vLLM engines in processes of their own, which a test may kill."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.service.running import ROOT, environment

ANSWER_S = 300.0
"""Longest wait for an engine's answer; only a failing test reaches it."""

LOOKUP_S = 1.0
"""A busy machine must not turn the hits that a test counts into misses, as 50 ms might."""

BLOCK = 32
"""Tokens of an engine block: what vLLM's CPU attention can do."""

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "dtype": "float32",
    "num_gpu_blocks_override": 512,
    "disable_log_stats": False,
}


def connector(daemon_socket: Path | str, **more: Any) -> dict[str, Any]:
    """The ``kv_transfer_config`` that switches tierkv on."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tierkv.socket": str(daemon_socket),
            "tierkv.lookup_timeout_s": LOOKUP_S,
        },
        **more,
    }


def ask(
    tokens: Iterable[int],
    max_tokens: int = 8,
    *,
    salt: str | None = None,
    lora: tuple[str, int, str] | None = None,
    embeds: Sequence[int] | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """A request: greedy unless ``sampling`` says otherwise. ``lora``: name, number, folder.

    ``embeds``: a seed for each embedding of a prompt that has those instead of tokens.
    """
    return {
        "tokens": [int(token) for token in tokens],
        "salt": salt,
        "lora": lora,
        "embeds": embeds,
        "sampling": {"max_tokens": max_tokens, **sampling},
    }


@dataclass(frozen=True)
class Answer:
    """What an engine said to one request; lists have an entry for each of its samples."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompt_logprobs: list[float]
    cached: int
    reasons: list[str]


class EngineError(Exception):
    """What an engine answered instead of a result."""


class Engine:
    """An engine, from its order on. A context manager that ends it and all its processes."""

    def __init__(self, channel: socket.socket, log: Path) -> None:
        self._channel = channel
        self._received = b""
        self.log = log
        self.pid = 0

    def ready(self) -> Self:
        """Wait until it serves. Raises EngineError if it cannot."""
        self.pid = self._result()
        return self

    def generate(self, asks: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Answers to requests that run together."""
        numbers = self.add(asks)
        answers = self.finish()
        return [answers[number] for number in numbers]

    def add(self, asks: Sequence[Mapping[str, Any]]) -> list[int]:
        """Hand requests over without computing; returns their numbers."""
        numbers: list[int] = self.call("add", list(asks))
        return numbers

    def step(self, count: int = 1) -> list[int]:
        """Run some steps; returns the numbers of unfinished requests."""
        unfinished: list[int] = self.call("step", count)
        return unfinished

    def finish(self, within_s: float = 90.0) -> dict[int, Answer]:
        """Run until all requests have answers. Raises EngineError if it is stuck."""
        answers = self.call("finish", within_s)
        return {int(number): Answer(**answer) for number, answer in answers.items()}

    def abort(self, numbers: Sequence[int]) -> None:
        self.call("abort", list(numbers))

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.call("forget")

    def external_hits(self) -> int:
        """Tokens that the connector brought, so far."""
        return int(self.call("metrics").get("vllm:external_prefix_cache_hits", 0))

    def call(self, verb: str, *arguments: Any) -> Any:
        """The result of one of ``child.Serving``'s verbs."""
        self.post(verb, *arguments)
        return self._result()

    def post(self, verb: str, *arguments: Any) -> None:
        """Say it; ``take`` hears the answer."""
        self._channel.sendall(json.dumps([verb, arguments]).encode() + b"\n")

    def take(self) -> Any:
        """The answer to what was posted."""
        return self._result()

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """SIGKILL, to its worker processes too; returns when they are gone."""
        descriptor = os.pidfd_open(self.pid)
        os.killpg(self.pid, signal.SIGKILL)
        assert select.select([descriptor], [], [], ANSWER_S)[0], "it outlived SIGKILL"
        os.close(descriptor)
        self._channel.close()
        self.pid = 0

    def close(self) -> None:
        """End it in good order."""
        descriptor = os.pidfd_open(self.pid)
        self._channel.close()
        assert select.select([descriptor], [], [], ANSWER_S)[0], f"it goes on: {self.said()}"
        os.close(descriptor)
        self.pid = 0

    def _result(self) -> Any:
        while b"\n" not in self._received:
            part = self._channel.recv(1 << 16)
            if not part:
                raise EngineError(f"the engine ended: {self.said()[-4000:]}")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        document = json.loads(line)
        if "error" in document:
            raise EngineError(document["error"])
        return document["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.pid:
            self.kill()
        self._channel.close()


class Engines:
    """Makes engines: each in a new process, forked off one that has imported vLLM.

    ``vllm``: the folder of another version than the installed one. A context manager; it ends the
    process that forks, not the engines.
    """

    def __init__(self, folder: Path, vllm: Path | None = None) -> None:
        self._folder = folder
        self._vllm = vllm
        self._count = 0
        self._orders, self._process = _start([], {}, vllm)

    def order(
        self,
        model: Path | str,
        daemon: Any = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = "/",
        fresh: bool = False,
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        """An engine that starts now; ``ready`` waits for it.

        ``daemon``: whose tierkv it uses, none if it is None; ``transfer`` goes into its
        ``kv_transfer_config``. ``fresh``: an interpreter of its own, which sees ``env`` from its
        first instruction on. ``options`` go to ``vllm.LLM``, over ``DEFAULTS``.
        """
        self._count += 1
        log = self._folder / f"engine-{self._count}.log"
        settings = {**DEFAULTS, "model": str(model), **options}
        if daemon is not None:
            settings["kv_transfer_config"] = connector(daemon.socket, **(transfer or {}))
        order = {
            "env": dict(env or {}),
            "cwd": str(cwd),
            "log": str(log),
            "options": settings,
        }
        near, far = socket.socketpair()
        near.settimeout(ANSWER_S)
        with far:
            if fresh:
                orders, _ = _start(["--once"], env or {}, self._vllm)
                with orders:
                    socket.send_fds(orders, [json.dumps(order).encode()], [far.fileno()])
            else:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [far.fileno()])
        return Engine(near, log)

    def start(self, model: Path | str, daemon: Any = None, **options: Any) -> Engine:
        """``order``, and wait until it serves."""
        engine = self.order(model, daemon, **options)
        try:
            return engine.ready()
        except BaseException:
            engine.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._orders.close()
        self._process.wait(ANSWER_S)


def _start(
    options: Sequence[str], env: Mapping[str, str], vllm: Path | None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process that takes orders, once it is ready to."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.settimeout(ANSWER_S)
    variables = environment({**ENGINE_ENVIRONMENT, **env})
    if vllm is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(vllm), variables["PYTHONPATH"]])
    with far:
        command = [sys.executable, "-P", "-m", "tests.engines.vllm.child", str(far.fileno())]
        process = subprocess.Popen(
            [*command, *options],
            env=variables,
            cwd=ROOT,
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
        )
    assert near.recv(1) == b"+", "the process that makes engines ended"
    return near, process
