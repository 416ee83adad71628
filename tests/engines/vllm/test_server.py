"""vLLM's own HTTP server, asked by vLLM's own load generator."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest

from tests.engines.vllm.checks import stored, until
from tests.engines.vllm.engine import BLOCK, ENGINE_ENVIRONMENT, connector
from tests.engines.vllm.models import llama
from tests.service.running import ROOT, Daemon, environment, samples

PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, REQUESTS = 3, 320, 40, 9
START_S = 120.0

CLIENT = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


class Server:
    """``python -m vllm.entrypoints.openai.api_server``; a context manager that kills it."""

    def __init__(self, model: Path, daemon: Daemon, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._model = model
        self._log = log
        options = [
            *("--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager"),
            *("--max-model-len", "1024", "--num-gpu-blocks-override", "256"),
            *("--kv-transfer-config", json.dumps(connector(daemon.socket))),
        ]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *options],
                env=environment(ENGINE_ENVIRONMENT),
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ready(self) -> Self:
        until(self._answers, self._log.read_text, START_S)
        return self

    def metrics(self) -> dict[str, float]:
        """Counters by name, summed over their labels."""
        found: dict[str, float] = {}
        for name, value in samples(self.get("/metrics")).items():
            short = name.partition("{")[0]
            found[short] = found.get(short, 0.0) + value
        return found

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return str(reply.read().decode())

    def complete(self, prompt: list[int]) -> Any:
        """The completion of some tokens, and how many of them were cached."""
        body = {
            "model": str(self._model),
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["choices"][0]["logprobs"]["tokens"]

    def bench(self, folder: Path) -> dict[str, Any]:
        """What vLLM's load generator reports."""
        options = [
            *("--model", str(self._model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--backend", "openai", "--endpoint", "/v1/completions", "--disable-tqdm"),
            *("--dataset-name", "prefix_repetition", "--num-prompts", str(REQUESTS)),
            *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS)),
            *("--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)),
            *("--prefix-repetition-num-prefixes", str(PREFIXES)),
            *("--prefix-repetition-output-len", "8", "--ignore-eos", "--seed", "3"),
            *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json"),
        ]
        subprocess.run(
            [sys.executable, "-P", "-c", CLIENT, *options],
            env=environment(ENGINE_ENVIRONMENT),
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=START_S,
        )
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result

    def kill(self) -> None:
        """SIGKILL to it and to its engine's process."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"it ended: {self._log.read_text()[-4000:]}"
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


@pytest.mark.timeout(400)
def test_two_servers_and_the_load_generator(daemon: Daemon, smollm2: Path, tmp_path: Path) -> None:
    """The second finds what the first, killed by then, has computed."""
    model = llama(tmp_path / "model", vocab_size=49_152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, model / name)
    with (
        Server(model, daemon, tmp_path / "one.log") as one,
        Server(model, daemon, tmp_path / "other.log") as other,
    ):
        one.ready()
        other.ready()
        result = one.bench(tmp_path)
        assert result["completed"] == REQUESTS, result
        assert one.metrics()["vllm:external_prefix_cache_hits_total"] == 0
        expected = one.complete(list(range(500, 600)))
        stored(daemon, PREFIXES * (PREFIX_TOKENS // BLOCK) + 3)
        one.kill()

        assert other.bench(tmp_path)["completed"] == REQUESTS
        hits = other.metrics()["vllm:external_prefix_cache_hits_total"]
        assert hits >= PREFIXES * PREFIX_TOKENS // BLOCK * BLOCK
        assert other.complete(list(range(500, 600))) == expected
        assert other.metrics()["vllm:external_prefix_cache_hits_total"] == hits + 96
        # Its own counters are in the same place.
        assert other.metrics()["vllm:tierkv_loaded_blocks_total"] == (hits + 96) / BLOCK
