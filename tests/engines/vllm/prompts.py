"""Test support: prompts, and what of them a cache of whole blocks can hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tests.engines.vllm.engine import BLOCK
from tests.engines.vllm.models import VOCAB

EDGES = [1, 2, 5, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 320]
"""Lengths at and around the ends of blocks."""


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of the tiny models."""
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def family(shared: int, tails: Iterable[int], seed: int) -> list[list[int]]:
    """Prompts that begin with the same ``shared`` tokens and then go on as long as each tail."""
    head = prompt(shared, seed)
    return [head + prompt(tail, seed + 1 + index) for index, tail in enumerate(tails)]


def cacheable(tokens: Sequence[int]) -> int:
    """The most tokens that an engine takes from a cache: whole blocks, and never the last token."""
    return (len(tokens) - 1) // BLOCK * BLOCK


def distinct_blocks(prompts: Iterable[Sequence[int]]) -> int:
    """Blocks that a store must hold for all these prompts."""
    return len(
        {
            tuple(tokens[: end + BLOCK])
            for tokens in prompts
            for end in range(0, len(tokens) - BLOCK + 1, BLOCK)
        }
    )


def varied_text(model: Path, count: int, seed: int) -> list[list[int]]:
    """``count`` prompts of real text for the model whose tokenizer lies in a folder.

    Lengths 1 to 1,500, among them the ends of blocks; shared prefixes that end within a block, at
    its end, and after it; repeats.
    """
    import pydoc_data.topics

    from tokenizers import Tokenizer

    text = "\n".join(pydoc_data.topics.topics.values())[:400_000]
    stream = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    random = np.random.default_rng(seed)

    def piece(length: int) -> list[int]:
        start = int(random.integers(0, len(stream) - length))
        return stream[start : start + length]

    prompts = [piece(length) for length in [*EDGES, 1500, 1025, 640]]
    for shared in (40, 64, 96, 130, 200, 320):
        head = piece(shared)
        prompts += [head + piece(int(tail)) for tail in random.integers(1, 70, 8)]
    while len(prompts) < count * 9 // 10:
        prompts.append(piece(int(np.exp(random.uniform(np.log(5), np.log(300))))))
    prompts += [prompts[int(index)] for index in random.integers(0, len(prompts), count)]
    prompts = prompts[:count]
    return [prompts[int(index)] for index in random.permutation(count)]


def key(asked: object) -> str:
    """Equal for equal requests."""
    return json.dumps(asked, sort_keys=True)
