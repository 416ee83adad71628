"""What tierkv does to transformers' times: to the first token, and between tokens.

``python -m benchmarks.engines_transformers 512 2048`` prints a line for each length of a document:
CPU seconds to the first token of the document and a question without tierkv, with an empty tierkv,
and with the document cached (the median of four questions); then the time per further token, by
the clock, without and with tierkv, in turns. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

import tierkv
from examples.demo_daemon import DemoDaemon
from examples.smollm2_folder import smollm2_folder
from tierkv.integrations.transformers import attach

QUESTION_TOKENS = 19
QUESTIONS = 4
NEW_TOKENS = 17
MIB = 1 << 20


class Times(NamedTuple):
    """CPU and wall seconds to the first token, and wall seconds per further one."""

    first_cpu_s: float
    first_s: float
    next_s: float


class Clock(BaseStreamer):
    """When the prompt came, and each token."""

    def __init__(self) -> None:
        self.wall_s = [time.perf_counter()]
        self.cpu_s = [time.process_time()]

    def put(self, value: Any) -> None:
        """The prompt first, then each token."""
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())

    def end(self) -> None:
        """Nothing more comes."""

    def times(self) -> Times:
        """All of it."""
        first = self.wall_s[2] - self.wall_s[0]
        later = (self.wall_s[-1] - self.wall_s[2]) / (len(self.wall_s) - 3)
        return Times(self.cpu_s[2] - self.cpu_s[0], first, later)


def run(model: Any, ids: torch.Tensor, **more: Any) -> tuple[torch.Tensor, Times]:
    """Generate greedily; the tokens, and how long they took."""
    clock = Clock()
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "streamer": clock, **more}
    return model.generate(ids, attention_mask=mask, **options), clock.times()


def measure(model: Any, client: tierkv.Client, tokens: int) -> str:
    """One line of the table; raises RuntimeError if a token differs."""
    chance = torch.Generator().manual_seed(tokens)

    def some(count: int) -> torch.Tensor:
        return torch.randint(100, 40_000, (1, count), generator=chance)

    document = some(tokens)
    prompts = [torch.cat((document, some(QUESTION_TOKENS)), 1) for _ in range(QUESTIONS)]
    expected, plain = run(model, prompts[0])
    attached = attach(model, client, check=False)
    got, cold = run(model, prompts[0])
    same = [torch.equal(got, expected)]
    warm = [run(model, prompt)[1] for prompt in prompts[1:]]
    got, again = run(model, prompts[0])
    same.append(torch.equal(got, expected))
    tpot = [again.next_s, cold.next_s, *(times.next_s for times in warm)]
    attached.detach()
    if not all(same):
        raise RuntimeError(f"{tokens} tokens: the answer is another one")
    first_cpu_s = statistics.median(times.first_cpu_s for times in (again, *warm))
    first_s = statistics.median(times.first_s for times in (again, *warm))
    return (
        f"| {tokens:,} | {plain.first_cpu_s:.2f} | {cold.first_cpu_s:.2f} | {first_cpu_s:.3f} | "
        f"{plain.first_cpu_s / first_cpu_s:.0f}x | wall {plain.first_s:.2f} {cold.first_s:.2f} "
        f"{first_s:.3f} {plain.first_s / first_s:.0f}x | per token "
        f"{plain.next_s * 1e3:.0f} {min(tpot) * 1e3:.0f} ms |"
    )


def main() -> None:
    """See the module's first lines."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    run(model, torch.zeros((1, 16), dtype=torch.int64))
    with DemoDaemon(1024 * MIB, 64 * MIB, 1024 * MIB) as daemon:
        daemon.start()
        with tierkv.connect(daemon.socket) as client:
            for tokens in map(int, sys.argv[1:] or ("512", "2048", "4096")):
                print(measure(model, client, tokens), flush=True)


if __name__ == "__main__":
    main()
