"""A trained model on real text: the same answers, and the prompt is computed once."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tierkv
from examples.demo_daemon import DemoDaemon
from examples.texts import QUESTIONS, ask, documents
from tierkv.integrations.transformers import attach


def test_smollm2_answers_the_same(smollm2: Path, daemon: DemoDaemon) -> None:
    """Cold, warm, and after the daemon was killed; text, questions and answers are real."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()

    class Encoder:
        def encode(self, text: str) -> list[int]:
            found: list[int] = tokenizer(text)["input_ids"]
            return found

        def decode(self, ids: list[int]) -> str:
            return str(tokenizer.decode(ids))

    document = documents(Encoder(), 300)[0]
    prompts = [
        tokenizer(ask(document, question), return_tensors="pt") for question in QUESTIONS[:2]
    ]
    way = {"do_sample": False, "max_new_tokens": 24}
    expected = [model.generate(**inputs, **way) for inputs in prompts]
    with tierkv.connect(daemon.socket) as client:
        attached = attach(model, client)
        for turn, inputs, right in zip(range(2), prompts, expected, strict=True):
            cache = attached.cache()
            got = model.generate(**inputs, **{attached.cache_name: cache}, **way)
            assert torch.equal(got, right)
            assert cache.cached_tokens >= turn * (document.tokens // 16 * 16)
            cache.end()
        daemon.kill()
        daemon.start()
        assert torch.equal(model.generate(**prompts[0], **way), expected[0])
