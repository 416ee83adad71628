"""vLLM's own server under vLLM's own client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.engines.document import BOTH_KILLED, EMPTY, ENGINE_KILLED, PLAIN, Served
from benchmarks.engines.engine import EngineFailed, environment
from benchmarks.engines.session import SETTLE_S
from benchmarks.engines.stores import Store, free_ports
from benchmarks.engines.worker import BLOCK_TOKENS, MAX_TOKENS

START_TIMEOUT_S = 300.0
CLIENT_TIMEOUT_S = 600.0
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
WORKLOAD = {
    "--dataset-name": "prefix_repetition",
    "--prefix-repetition-num-prefixes": 4,
    "--prefix-repetition-prefix-len": 1024,
    "--prefix-repetition-suffix-len": 32,
    "--prefix-repetition-output-len": 16,
    "--num-prompts": 8,
    "--max-concurrency": 1,
    "--seed": 0,
}


@contextmanager
def server(python: Path, model: Path, transfer: dict[str, Any] | None, log: Path) -> Iterator[str]:
    """A running server's address; at the end it is killed with -9."""
    (port,) = free_ports(1)
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)),
        *("--max-model-len", str(MAX_TOKENS)),
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_environment(), start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineFailed(f"vLLM's server does not serve; see {log}")
            time.sleep(0.1)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(python: Path, model: Path, address: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Run the client once; the JSON that it leaves. Raises EngineFailed."""
    result = folder / "served.json"
    result.unlink(missing_ok=True)
    command = [str(python), "-c", CLIENT, "--backend", "openai", "--base-url", address]
    command += ["--model", "smollm2", "--tokenizer", str(model), "--ignore-eos", "--save-result"]
    command += ["--result-dir", str(folder), "--result-filename", result.name]
    for name, value in (WORKLOAD | {"--seed": seed}).items():
        command += [name, str(value)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
        timeout=CLIENT_TIMEOUT_S,
    )
    if done.returncode or not result.exists():
        raise EngineFailed(f"vLLM's client failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_bytes())
    return found


def measured(
    store: Store | None,
    python: Path,
    model: Path,
    folder: Path,
    quiet: Callable[[], AbstractContextManager[object]],
) -> Iterator[Served]:
    """The same requests in every state, each time to a server that was just started."""

    def once(state: str) -> Served:
        transfer = None if store is None else store.transfer
        with server(python, model, transfer, folder / "server.log") as address:
            ask(python, model, address, folder, seed=1)  # warms up
            with quiet():
                found = ask(python, model, address, folder)
            time.sleep(SETTLE_S)
        return Served(
            store="none" if store is None else store.name,
            state=state,
            mean_ttft_ms=found["mean_ttft_ms"],
            median_ttft_ms=found["median_ttft_ms"],
            p99_ttft_ms=found["p99_ttft_ms"],
            duration_s=found["duration"],
            completed=found["completed"],
            failed=found["failed"],
        )

    if store is None:
        yield once(PLAIN)
        return
    with store:
        store.start()
        yield once(EMPTY)
        yield once(ENGINE_KILLED)
        store.kill()
        store.start()
        yield once(BOTH_KILLED)


def _environment() -> dict[str, str]:
    """The server has processes of its own, as it does for users."""
    return {**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def _is_healthy(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
