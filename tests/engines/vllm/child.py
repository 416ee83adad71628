"""One vLLM engine in this process, driven step by step over a socket.

``python -P -m tests.engines.vllm.child FD``: imports vLLM, says so, and then makes one engine in a
process of its own for each order that arrives: forked off, so that the import is paid for once.
``--once``: takes one order and runs it in this very process instead.

An order is a line of JSON with the far end of the engine's own channel beside it (SCM_RIGHTS).
On that channel each line is a request ``[verb, arguments]``, and each answer a line
``{"result": ...}`` or ``{"error": ...}``; see ``Serving`` for the verbs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

ORDER_BYTES_MAX = 1 << 20


class Serving:
    """The verbs: what a test may ask of one engine."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(**options).llm_engine
        self._numbers = 0
        self._open: dict[str, tuple[int, Any]] = {}
        self._done: dict[int, dict[str, Any]] = {}
        self._longest_step_s = 0.0

    def add(self, asks: list[dict[str, Any]]) -> list[int]:
        """Hand requests to the engine; returns their numbers. Computes nothing yet."""
        return [self._add(ask) for ask in asks]

    def step(self, count: int) -> list[int]:
        """Run so many steps of the engine, fewer if it is done; returns what is unfinished."""
        for _ in range(count):
            if not self._engine.has_unfinished_requests():
                break
            self._step()
        return sorted(number for number, _ in self._open.values())

    def finish(self, within_s: float) -> dict[str, Any]:
        """Step until nothing is left; every answer that nobody took yet, by number.

        An engine that is not done in time is stuck: an error that names the requests.
        """
        deadline = time.monotonic() + within_s
        while self._engine.has_unfinished_requests():
            self._step()
            if time.monotonic() > deadline:
                raise RuntimeError(f"stuck for {within_s} s: {sorted(self._open)}")
        if self._open:
            raise RuntimeError(f"finished without an answer: {sorted(self._open)}")
        done, self._done = self._done, {}
        return {str(number): answer for number, answer in done.items()}

    def abort(self, numbers: list[int]) -> None:
        """Give requests up; they have no answer."""
        doomed = [name for name, (number, _) in self._open.items() if number in numbers]
        self._engine.abort_request(doomed)
        for name in doomed:
            del self._open[name]

    def idle(self, seconds: float) -> None:
        """Step, as a server's loop does, although no request may be there: transfers may be."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._step()
            time.sleep(0.001)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that each hit is an external one."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the engine's prefix cache is in use")

    def reset(self) -> None:
        """As after a change of weights: what the connector stored is forgotten, too."""
        if not self._engine.reset_prefix_cache(reset_connector=True):
            raise RuntimeError("the prefix cache is in use, or the connector cannot forget")

    def longest_step_s(self) -> float:
        """The longest step since the last time that this was asked."""
        longest, self._longest_step_s = self._longest_step_s, 0.0
        return longest

    def metrics(self) -> dict[str, float]:
        """The engine's counters and gauges by name, summed over their labels."""
        found: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                found[metric.name] = found.get(metric.name, 0.0) + value
        return found

    def blocks(self) -> dict[str, int]:
        """Blocks of the engine's KV memory: all, and those that nothing holds."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return {"all": pool.num_gpu_blocks, "free": pool.get_num_free_blocks()}

    def descriptors(self) -> int:
        """Open file descriptors of this process."""
        return len(os.listdir("/proc/self/fd"))

    def ping(self) -> str:
        return "pong"

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def _add(self, ask: dict[str, Any]) -> int:
        from vllm import SamplingParams
        from vllm.inputs import EmbedsPrompt, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        prompt: Any = TokensPrompt(prompt_token_ids=ask["tokens"])
        if ask.get("embeds") is not None:
            prompt = EmbedsPrompt(prompt_embeds=self._embeddings(ask["embeds"]))
        if ask.get("salt") is not None:
            prompt["cache_salt"] = ask["salt"]
        lora = LoRARequest(*ask["lora"]) if ask.get("lora") is not None else None
        params = SamplingParams(
            **{
                "temperature": 0.0,
                "logprobs": 0,
                "detokenize": False,
                "ignore_eos": True,
                "output_kind": RequestOutputKind.FINAL_ONLY,
                **ask["sampling"],
            }
        )
        self._numbers += 1
        name = f"r{self._numbers}"
        self._engine.add_request(name, prompt, params, lora_request=lora)
        self._open[name] = (self._numbers, params)
        return self._numbers

    def _embeddings(self, seeds: list[int]) -> Any:
        """A made-up embedding for each seed: f32 [seeds, hidden size]."""
        import torch

        size = self._engine.model_config.get_hidden_size()
        made = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(made)

    def _step(self) -> None:
        begun = time.monotonic()
        outputs = self._engine.step()
        self._longest_step_s = max(self._longest_step_s, time.monotonic() - begun)
        for output in outputs:
            if output.finished and output.request_id in self._open:
                number, _ = self._open.pop(output.request_id)
                self._done[number] = _answer(output)


def _answer(output: Any) -> dict[str, Any]:
    samples = sorted(output.outputs, key=lambda sample: sample.index)
    return {
        "tokens": [list(sample.token_ids) for sample in samples],
        "logprobs": [_chosen(sample.token_ids, sample.logprobs) for sample in samples],
        "prompt_logprobs": _chosen(output.prompt_token_ids, output.prompt_logprobs),
        "cached": output.num_cached_tokens,
        "reasons": [sample.finish_reason for sample in samples],
    }


def _chosen(tokens: Any, logprobs: Any) -> list[float]:
    """The log-probability of each token that has one."""
    return [
        step[token].logprob for token, step in zip(tokens, logprobs or (), strict=False) if step
    ]


def serve(order: dict[str, Any], channel: socket.socket) -> None:
    """Make the engine and answer until the channel ends."""
    os.setsid()  # so that one signal reaches the engine's worker processes, too
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    lines = channel.makefile("rw", encoding="utf-8")
    try:
        serving = Serving(order["options"])
        _say(lines, {"result": os.getpid()})
    except BaseException as error:
        traceback.print_exc()
        _say(lines, {"error": f"{type(error).__name__}: {error}"})
        raise
    for line in lines:
        verb, arguments = json.loads(line)
        try:
            _say(lines, {"result": getattr(serving, verb)(*arguments)})
        except Exception as error:
            traceback.print_exc()
            _say(lines, {"error": f"{type(error).__name__}: {error}"})


def _say(lines: Any, document: dict[str, Any]) -> None:
    lines.write(json.dumps(document) + "\n")
    lines.flush()


def main() -> None:
    """Take orders from the descriptor that is named, until it ends."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    once = "--once" in sys.argv[2:]
    if not once:
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401  what every engine needs

        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders.sendall(b"+")
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 1)
        if not text:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            if once or os.fork() == 0:
                orders.close()
                serve(json.loads(text), channel)
                return


if __name__ == "__main__":
    main()
