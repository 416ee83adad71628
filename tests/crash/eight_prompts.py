"""Eight prompts, stored in a running daemon and found again, every byte."""

from __future__ import annotations

from tests.crash.pattern import SMALL, payload, put, wrong_token
from tierkv.client.sync import Client, Namespace, Sequence

PROMPTS = [[100 * n + t for t in range(40)] for n in range(1, 9)]
ALL = [40] * len(PROMPTS)
NONE = [0] * len(PROMPTS)


def fill(client: Client) -> None:
    """Store all prompts, or what is not there of them."""
    namespace = client.namespace(SMALL)
    for tokens in PROMPTS:
        with namespace.begin(tokens, keep=0) as sequence:
            write(namespace, sequence, tokens)


def write(namespace: Namespace, sequence: Sequence, tokens: list[int]) -> None:
    """Write what the sequence lacks of these tokens, and append it."""
    have = sequence.num_tokens
    sequence.reserve(len(tokens) - have)
    put(SMALL, namespace.pool, sequence.block_table, have, payload(SMALL, tokens)[have:])
    sequence.append(tokens[have:])


def check(namespace: Namespace, sequence: Sequence) -> None:
    """All its bytes must be right, the partial tail's too."""
    assert wrong_token(SMALL, namespace.pool, sequence.block_table, sequence.tokens) is None


def found(client: Client) -> list[int]:
    """Tokens found of each prompt; none of their bytes may be wrong."""
    namespace, counts = client.namespace(SMALL), []
    for tokens in PROMPTS:
        with namespace.begin(tokens, keep=0) as sequence:
            check(namespace, sequence)
            counts.append(sequence.num_tokens)
    return counts


def adopted(client: Client) -> list[str]:
    """The tiers whose memory the daemon took over."""
    taken: dict[str, int] = client.stat()["recovery"]["adopted_bytes"]
    assert set(taken) == {"device", "host"}
    return [tier for tier, size_bytes in taken.items() if size_bytes]
