"""Offline inference with vLLM on tierkv: the same questions about a document, asked twice.

``python -m examples.vllm_offline``, in an environment that has vLLM. Between the two passes the
engine forgets what it has cached itself: every hit of the second one comes from tierkv. Starts a
daemon of its own, for the time that it runs, if there is none.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pydoc_data.topics import topics
from typing import NamedTuple

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

import tierkv
from tierkv.errors import Unavailable

from .demo_daemon import DemoDaemon
from .smollm2_folder import smollm2_folder

GIB = 1 << 30
TOPIC = "sequence-types"
DOCUMENT_CHARACTERS = 4000
QUESTIONS = (
    "What is this text about?",
    "What does this text say about errors?",
    "Who would want to read this text?",
)


class Result(NamedTuple):
    """One answer: tokens of the prompt, those of them that were cached, seconds to the first."""

    prompt: int
    cached: int
    ttft_s: float
    tokens: tuple[int, ...]
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask everything twice; returns 1 if the second pass hit nothing, or answered otherwise."""
    parser = argparse.ArgumentParser(prog="python -m examples.vllm_offline", description=__doc__)
    parser.add_argument("--model", help="a folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--socket", help="the daemon's socket (default: $TIERKV_SOCKET, or yours)")
    options = parser.parse_args(arguments)
    model = options.model or str(smollm2_folder())
    with ExitStack() as leaving:
        if options.socket is None and not is_running():
            options.socket = own_daemon(leaving)
        llm = engine(model, options.socket or "")
        first = ask(llm, "first pass")
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its own cache")
        second = ask(llm, "second pass, the engine's own cache emptied before")
        same = [each.tokens for each in first] == [each.tokens for each in second]
        hit = all(each.cached > each.prompt // 2 for each in second)
        print(f"\nboth passes give the same tokens: {'yes' if same else 'NO'}")
        del llm  # before its daemon
    return 0 if same and hit else 1


def is_running() -> bool:
    """Whether there is a daemon where ``tierkv.connect()`` looks for one."""
    try:
        tierkv.connect(reconnect_s=0).close()
    except Unavailable:
        return False
    return True


def own_daemon(leaving: ExitStack) -> str:
    """The socket of a daemon that is started here, and ended with ``leaving``."""
    daemon = leaving.enter_context(DemoDaemon(GIB, GIB // 4, GIB))
    daemon.start()
    print("no daemon was running: started one for this example (`tierkv serve` starts one to keep)")
    return daemon.socket


def engine(model: str, socket: str) -> LLM:
    """vLLM with tierkv behind it. On a CPU its blocks have 32 tokens at least.

    An empty ``socket``: the daemon that ``tierkv.connect()`` finds.
    """
    return LLM(
        model,
        enforce_eager=True,
        block_size=32 if current_platform.is_cpu() else None,
        disable_log_stats=False,  # so that answers carry the time to their first token
        kv_transfer_config=KVTransferConfig(
            kv_connector="TierKVConnector",
            kv_connector_module_path="tierkv.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"tierkv.socket": socket},
        ),
    )


def ask(llm: LLM, title: str) -> list[Result]:
    """Every question about the document, one after the other; prints a line for each."""
    print(f"\n{title}")
    results = []
    for question in QUESTIONS:
        prompt = f"{topics[TOPIC][:DOCUMENT_CHARACTERS]}\n\n{question}\n"
        message = {"role": "user", "content": prompt}
        greedy = SamplingParams(temperature=0, max_tokens=24)
        (answer,) = llm.chat([message], greedy, use_tqdm=False)
        results.append(found := result(answer))
        print(
            f"  {found.cached:5} of {found.prompt} tokens cached, "
            f"first token after {found.ttft_s * 1e3:6.0f} ms: {found.text!r}"
        )
    return results


def result(answer: RequestOutput) -> Result:
    """What is worth to know of vLLM's answer."""
    (output,) = answer.outputs
    assert answer.metrics is not None, "the engine keeps no statistics"
    assert answer.prompt_token_ids is not None
    return Result(
        prompt=len(answer.prompt_token_ids),
        cached=answer.num_cached_tokens or 0,
        ttft_s=answer.metrics.first_token_latency,
        tokens=tuple(output.token_ids),
        text=output.text,
    )


if __name__ == "__main__":
    sys.exit(main())
