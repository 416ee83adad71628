"""A real vLLM in this process, asked by lines of JSON on stdin, answering on stdout.

``python -m benchmarks.engines.worker MODEL TRANSFER``, in vLLM's environment; TRANSFER is the JSON
of its ``KVTransferConfig``, or ``null``. Imports neither tierkv nor LMCache: the connector that
TRANSFER names is vLLM's to import.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
import time
from typing import Any, TextIO

BLOCK_TOKENS = 32
MAX_TOKENS = 4608
"""Of a prompt and its answer."""

FORGET_TIMEOUT_S = 30.0


class Engine:
    """vLLM's engine, one request at a time."""

    def __init__(self, model: str, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        _let_numba_be()
        self._llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=MAX_TOKENS,
            kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        )
        self._numbers = itertools.count()

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Greedy tokens, and what they took: until the first one wall and CPU time, and in all.

        The engine's own prefix cache is emptied before: what is cached comes from a connector.
        """
        from vllm import SamplingParams, TokensPrompt

        self._forget()
        engine = self._llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        name = str(next(self._numbers))
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        first_s = first_cpu_s = 0.0
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), greedy)
        while True:
            for output in engine.step():
                if not first_s:
                    first_s, first_cpu_s = time.monotonic(), time.process_time()
                if output.finished:
                    return {
                        "began_s": began_s,
                        "ttft_s": first_s - began_s,
                        "ttft_cpu_s": first_cpu_s - began_cpu_s,
                        "total_s": time.monotonic() - began_s,
                        "cached": output.num_cached_tokens,
                        "tokens": list(output.outputs[0].token_ids),
                    }

    def _forget(self) -> None:
        """Empty the prefix cache, as soon as no connector holds blocks that it still saves."""
        deadline = time.monotonic() + FORGET_TIMEOUT_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("the engine's prefix cache cannot be emptied")
            self._llm.llm_engine.step()
            time.sleep(0.01)


def _let_numba_be() -> None:
    """LMCache imports numba, and an object of numba's ends vLLM's search for kernels.

    That search reads ``vars(object)`` of everything that is imported, and takes it for a dict.
    """
    from vllm.triton_utils import dispatcher

    def checked(value: Any) -> dict[str, Any]:
        found = vars(value)
        return found if isinstance(found, dict) else {}

    dispatcher.vars = checked  # in the place of the built-in


def serve(engine: Engine, asked: TextIO, answers: TextIO) -> None:
    """Answer until the other end closes. ``repeat`` goes on until another line comes."""

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"ready": True})
    while line := asked.readline():
        question = json.loads(line)
        prompts = itertools.cycle(question["prompts"])
        say(engine.generate(next(prompts), question["tokens"]))
        if question["repeat"]:
            while not select.select([asked], [], [], 0)[0]:
                say(engine.generate(next(prompts), question["tokens"]))
            asked.readline()
            say({"done": True})


def main() -> None:
    """Keep stdout for the answers, and let what the engine prints go to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model, transfer = sys.argv[1:]
    serve(Engine(model, json.loads(transfer)), sys.stdin, answers)


if __name__ == "__main__":
    main()
