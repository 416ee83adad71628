"""Real prose without a download: the reference documents that come with Python itself.

``pydoc_data.topics`` holds 79 of them (``help("yield")`` prints one), 15 of which have 2,048
tokens or more for SmolLM2. They are under the Python Software Foundation License.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import NamedTuple

from .tokenizer import Tokenizer, chat_prompt

QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Which rule in this text is the most important one?",
    "Give a short example of what this text describes.",
    "Who would want to read this text, and why?",
    "What does this text say about errors?",
    "Explain the first paragraph in simple words.",
)


class Document(NamedTuple):
    """A text, the topic that ``help()`` knows it by, and its length in tokens."""

    topic: str
    text: str
    tokens: int


def documents(tokenizer: Tokenizer, tokens: int) -> list[Document]:
    """Every text of at least ``tokens`` tokens, cut to about that length, ordered by topic.

    Cuts fall on line ends, so a document is usually some tokens shorter than asked for.
    """
    found = []
    for topic, text in sorted(topics.items()):
        token_ids = tokenizer.encode(text)
        if len(token_ids) >= tokens:
            start = tokenizer.decode(token_ids[:tokens])
            cut = start[: start.rfind("\n") + 1] or start
            found.append(Document(topic, cut, len(tokenizer.encode(cut))))
    return found


def ask(document: Document, question: str) -> str:
    """A chat prompt with the document first: prompts about one document share its tokens."""
    return chat_prompt([{"role": "user", "content": f"{document.text}\n{question}"}])
