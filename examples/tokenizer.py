"""Text to token ids and back, and the chat format of SmolLM2."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONTROL_TOKEN = 3
"""GGUF's token type for tokens that are never part of the text itself."""


class Tokenizer(Protocol):
    """What the examples need; ``<|im_start|>`` and ``<|im_end|>`` are single tokens."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; nothing is added at its ends."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""


class BpeTokenizer:
    """The byte-level BPE that a GGUF file describes: its vocabulary, merges and token types.

    SmolLM2 splits numbers into single digits before merging. A tokenizer without that gives other
    ids for the same text, hence other chain hashes: every lookup would silently miss.
    """

    def __init__(self, tokens: list[str], merges: list[str], token_types: list[int]) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        bpe: Any = Tokenizer(
            models.BPE(
                vocab={token: token_id for token_id, token in enumerate(tokens)},
                merges=[(left, right) for left, right in map(str.split, merges)],
            )
        )
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
        typed = zip(tokens, token_types, strict=True)
        special = [AddedToken(token, normalized=False) for token, t in typed if t == CONTROL_TOKEN]
        bpe.add_special_tokens(special)
        self._bpe = bpe

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; nothing is added at its ends."""
        token_ids: list[int] = self._bpe.encode(text).ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return str(self._bpe.decode(list(token_ids)))

    def save(self, path: Path) -> None:
        """Write it as the ``tokenizer.json`` that other programs load."""
        self._bpe.save(str(path))


class ByteTokenizer:
    """One token per UTF-8 byte, for models with random weights.

    Ids 0 to 2 are the special tokens, id 3 is byte 0. Ids past the bytes decode to ``<id>``.
    """

    SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; nothing is added at its ends."""
        token_ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.SPECIAL)) + ")", text):
            if part in self.SPECIAL:
                token_ids.append(self.SPECIAL.index(part))
            else:
                token_ids.extend(byte + len(self.SPECIAL) for byte in part.encode())
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        codes = (token_id - len(self.SPECIAL) for token_id in token_ids)
        parts = (
            bytes([code]) if code < 256 else f"<{code + len(self.SPECIAL)}>".encode()
            for code in codes
            if code >= 0
        )
        return b"".join(parts).decode(errors="replace")


def chat_prompt(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as SmolLM2 reads it, up to where the assistant's next words begin.

    Each message has ``role`` (system, user, assistant) and ``content``. The format only ever grows
    at its end, so the prompt of every later turn starts with the tokens of the earlier ones.
    """
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *messages]
    turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return "".join(turns) + "<|im_start|>assistant\n"
