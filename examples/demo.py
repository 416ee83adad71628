"""The whole path once: a real model generates out of tierkv, the daemon is killed, it goes on.

Run it by ``tierkv demo`` or ``make demo``. Every answer is compared, token by token, with the same
model's answer without tierkv.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Self

import torch

import tierkv
from tierkv.errors import Unavailable

from .demo_daemon import DemoDaemon
from .generate import DenseKV, Generation, PooledKV, generate
from .llama import Llama
from .smollm2 import open_model
from .texts import QUESTIONS, ask, documents
from .tokenizer import Tokenizer

MiB = 1 << 20
KILL_AFTER_TOKENS = 6
SPARE_BLOCKS = 48
"""Blocks of the device and the host tier beyond what the document needs."""


@dataclass(frozen=True)
class Row:
    """One line of the final table. ``identical``: the tokens equal those without tierkv."""

    phase: str
    identical: bool
    ttft_s: float
    cached_tokens: int
    note: str = ""


@dataclass
class Report:
    """What the demo shows at the end."""

    model: str
    prompt_tokens: int = 0
    rows: list[Row] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every answer was the right one."""
        return bool(self.rows) and all(row.identical for row in self.rows)

    @property
    def cold_s(self) -> float:
        """Time to first token of the prompt that nothing was cached of."""
        return self.rows[0].ttft_s


Step = Callable[[str], None]
"""Called with what is about to be done."""

STEPS = 9
"""How often a run calls its Step."""


def run(*, model_path: str, document_tokens: int, answer_tokens: int, step: Step) -> Report:
    """Run all phases; see the module's first lines. Raises TierkvError if something fails."""
    torch.set_num_threads(1)
    step("loading the model")
    model, tokenizer = open_model(model_path)
    demo = _Demo(model, tokenizer, model_path, answer_tokens, step)
    demo.choose_prompts(document_tokens)
    block_bytes = model.spec().block_bytes
    blocks = len(demo.prompts[0]) // model.spec().block_tokens + SPARE_BLOCKS
    tiers = DemoDaemon(
        device_bytes=blocks * block_bytes,
        host_bytes=blocks * block_bytes,
        disk_bytes=4 * blocks * (block_bytes + 8192),
    )
    with torch.inference_mode(), tiers as daemon, demo:
        demo.daemon = daemon
        demo.cold_and_warm()
        demo.two_workers()
        demo.killed_in_the_middle()
        demo.killed_alone()
    return demo.report


class _Demo:
    daemon: DemoDaemon

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        model_path: str,
        answer_tokens: int,
        step: Step,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.model_path = model_path
        self.answer_tokens = answer_tokens
        self.step = step
        self.report = Report(model.config.name)
        self.prompts: list[list[int]] = []
        self._undisturbed: dict[int, Generation] = {}
        self._worker: tierkv.Client | None = None
        """This process' connection: kept, as an engine would, also while the daemon is away."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.disconnect()

    def choose_prompts(self, document_tokens: int) -> None:
        """Questions about one document of Python's own documentation: they share its tokens."""
        self.document = document = documents(self.tokenizer, document_tokens)[0]
        self.prompts = [self.tokenizer.encode(ask(document, question)) for question in QUESTIONS]
        self.report.prompt_tokens = len(self.prompts[0])
        self.report.facts.append(
            ("text", f"Python's documentation of {document.topic!r}, {document.tokens} tokens")
        )

    # --- phases -----------------------------------------------------------------------------------

    def cold_and_warm(self) -> None:
        """The same document four times: computed, then from each tier."""
        self.step("starting the daemon")
        self.report.facts.append(("daemon start", f"{self.daemon.start():.2f} s"))
        self.step("cold: computing the whole prompt")
        self._ask("cold prefill", 0)
        self.step("warm from the device tier")
        self._ask_warm("warm, device tier", 1, lambda: None)
        self.step("warm from the host tier")
        self._ask_warm("warm, host tier", 2, self._push_out_of_device)
        self.step("warm from the disk tier, RAM forgotten as by a reboot")
        self._ask_warm("warm, disk tier", 3, self._forget_ram)

    def two_workers(self) -> None:
        """Two processes at once on the same document: its blocks are there once."""
        self.step("two worker processes share the document")
        workers = [self._start_worker(self.prompts[at]) for at in (4, 5)]
        for worker in workers:
            _hear(worker)  # it has loaded the model
        for worker in workers:
            _tell(worker, "go")
        answers = [json.loads(_hear(worker)) for worker in workers]
        for worker in workers:
            worker.communicate()
        tables = [set(answer["block_table"]) for answer in answers]
        saved = len(tables[0] & tables[1])
        total = sum(len(table) for table in tables)
        megabytes = saved * self.model.spec().block_bytes / MiB
        self.report.facts.append(
            ("shared by two workers", f"{saved} of {total} blocks saved, {megabytes:.0f} MiB")
        )
        for number, (at, answer) in enumerate(zip((4, 5), answers, strict=True), 1):
            right = answer["tokens"] == self._without_tierkv(at).tokens
            self.report.rows.append(
                Row(f"worker {number} of two", right, answer["ttft_s"], answer["cached_tokens"])
            )

    def killed_in_the_middle(self) -> None:
        """kill -9 of the daemon while a token is being computed; the generation goes on."""
        self.step("kill -9 of the daemon in the middle of a generation")
        done = 0

        def on_token(_token: int) -> None:
            nonlocal done
            done += 1
            if done == KILL_AFTER_TOKENS:
                self.daemon.kill()
                self.daemon.launch()

        answer = self._ask("kill -9 while generating", 0, on_token)
        times = answer.token_times_s
        gap_s = max(after - before for before, after in pairwise(times))
        self.report.facts.append(("longest pause between tokens", f"{gap_s:.2f} s"))

    def killed_alone(self) -> None:
        """kill -9 with no worker alive; the prefix is still warm after the restart."""
        self.step("kill -9 with no worker alive")
        self.disconnect()
        self.daemon.kill()
        seconds = self.daemon.start()
        self.report.facts.append(("from restart to serving after kill -9", f"{seconds:.2f} s"))
        self._ask("after kill -9 and restart", 1)
        with tierkv.connect(self.daemon.socket) as cache:
            recovery = cache.stat()["recovery"]
        found = (
            f"{recovery['blocks']} blocks and {recovery['records']} log records in "
            f"{recovery['duration_s'] * 1000:.0f} ms, {recovery['dropped_blocks']} blocks lost"
        )
        self.report.facts.append(("recovery", found))

    def disconnect(self) -> None:
        """End this process' connection."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # --- parts ------------------------------------------------------------------------------------

    def _ask(
        self, phase: str, at: int, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Answer question ``at`` through tierkv and without it, and compare."""
        answer = self._generate(self.prompts[at], self.answer_tokens, on_token)
        right = answer.tokens == self._without_tierkv(at).tokens
        self.report.rows.append(Row(phase, right, answer.ttft_s, answer.cached_tokens))
        return answer

    def _ask_warm(self, phase: str, at: int, prepare: Callable[[], None]) -> None:
        """Like ``_ask``, with the median time to first token of three questions.

        ``prepare`` brings the document's blocks into the tier that is measured. The two other
        questions begin with other words, so that only the document is found.
        """
        prepare()
        self._ask(phase, at)
        times = [self.report.rows[-1].ttft_s]
        for opening in ("Be brief.", "Tell me:"):
            prepare()
            prompt = self.tokenizer.encode(ask(self.document, f"{opening} {QUESTIONS[at]}"))
            times.append(self._generate(prompt, 1).ttft_s)
        self.report.rows[-1] = replace(self.report.rows[-1], ttft_s=median(times))

    def _generate(
        self, prompt: list[int], tokens: int, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        if self._worker is None:
            self._worker = tierkv.connect(self.daemon.socket)
        kv = PooledKV(self._worker.namespace(self.model.spec()))
        return generate(self.model, kv, prompt, tokens, on_token, stop_at_end=False)

    def _without_tierkv(self, at: int) -> Generation:
        if at not in self._undisturbed:
            prompt = self.prompts[at]
            kv = DenseKV(self.model, len(prompt) + self.answer_tokens)
            self._undisturbed[at] = generate(
                self.model, kv, prompt, self.answer_tokens, stop_at_end=False
            )
        return self._undisturbed[at]

    def _push_out_of_device(self) -> None:
        """Fill the device tier with another sequence, so that all cached blocks must spill."""
        with tierkv.connect(self.daemon.socket) as cache:
            tier = cache.stat()["tiers"]["device"]
            spec = self.model.spec()
            slots = tier["capacity_bytes"] // spec.block_bytes
            sequence = cache.namespace(spec).begin([])
            sequence.reserve(slots * spec.block_tokens)
            sequence.end()

    def _forget_ram(self) -> None:
        """Restart with empty RAM tiers and cold disk pages."""
        self.daemon.stop()
        self.daemon.forget_ram()
        self.daemon.start()

    def _start_worker(self, prompt: list[int]) -> subprocess.Popen[str]:
        module = f"{__package__}.demo_worker"
        worker = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        order = {
            "model": self.model_path,
            "socket": self.daemon.socket,
            "prompt": prompt,
            "max_tokens": self.answer_tokens,
        }
        _tell(worker, json.dumps(order))
        return worker


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    if worker.stdin is not None:
        worker.stdin.write(line + "\n")
        worker.stdin.flush()


def _hear(worker: subprocess.Popen[str]) -> str:
    line = worker.stdout.readline() if worker.stdout is not None else ""
    if not line:
        raise Unavailable(f"a worker process ended early, with status {worker.wait()}")
    return line
