"""Numbered prompts of a few blocks each, stored and found again by one worker."""

from __future__ import annotations

from collections.abc import Iterable

from tests.crash.pattern import SMALL, payload, put, wrong_token
from tierkv.client.sync import Client, Namespace

TOKENS = 5 * SMALL.block_tokens


def prompt(number: int) -> list[int]:
    """Its tokens, which no other prompt shares."""
    return [1000 + TOKENS * number + t for t in range(TOKENS)]


def store(namespace: Namespace, tokens: list[int]) -> None:
    """Leave the blocks of these tokens in the cache; acknowledged when it returns."""
    with namespace.begin(tokens, keep=0) as sequence:
        have = sequence.num_tokens
        sequence.reserve(len(tokens) - have)
        put(SMALL, namespace.pool, sequence.block_table, have, payload(SMALL, tokens)[have:])
        sequence.append(tokens[have:])


def found(client: Client, numbers: Iterable[int]) -> list[int]:
    """Which of the prompts are found whole; no byte of any may be wrong."""
    namespace = client.namespace(SMALL)
    whole = []
    for number in numbers:
        tokens = prompt(number)
        with namespace.begin(tokens, keep=0) as sequence:
            at = wrong_token(SMALL, namespace.pool, sequence.block_table, sequence.tokens)
            assert at is None, f"wrong bytes at token {at} of prompt {number}"
            if sequence.num_tokens == len(tokens):
                whole.append(number)
    return whole
