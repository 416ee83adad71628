"""What a daemon owes for what it acknowledged, and whether it still has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierkv.client.sync import Client
from tierkv.torture.pattern import SPECS, prompt, wrong_token

Chain = tuple[str, list[int]]
"""A model and tokens that fill blocks of it."""


@dataclass(frozen=True)
class Promise:
    """A chain of full blocks that was acknowledged, at a time of the monotonic clock."""

    model: str
    choices: tuple[int, ...]
    blocks: int
    at: float


@dataclass(frozen=True)
class Found:
    """How many tokens of a chain are cached; ``wrong_at``: the first whose bytes are wrong."""

    model: str
    tokens: list[int]
    found_tokens: int
    wrong_at: int | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing of it is missing."""
        return self.found_tokens == len(self.tokens)


def longest(tree: int, promises: Iterable[Promise]) -> list[Chain]:
    """The promised chains, as model and tokens, without those that another one contains."""
    chains = set()
    block_tokens = {spec.model: spec.block_tokens for spec in SPECS}
    for promise in promises:
        tokens = prompt(tree, promise.choices)[: promise.blocks * block_tokens[promise.model]]
        chains.add((promise.model, tuple(tokens)))
    kept = []
    # Sorted, a prefix comes right before the first chain that continues it.
    ordered = sorted(chains)
    for one, following in zip(ordered, [*ordered[1:], None], strict=True):
        covered = (
            following is not None
            and following[0] == one[0]
            and following[1][: len(one[1])] == one[1]
        )
        if not covered:
            kept.append((one[0], list(one[1])))
    return kept


def look_up(client: Client, chains: Iterable[Chain]) -> Iterator[Found]:
    """How much of each chain is cached. Reads no byte, hence is fast."""
    namespaces = {spec.model: client.namespace(spec) for spec in SPECS}
    for model, tokens in chains:
        yield Found(model, tokens, namespaces[model].lookup(tokens).tokens)


def read(client: Client, chains: Iterable[Chain]) -> Iterator[Found]:
    """How much of each chain can be had, every byte of it compared."""
    namespaces = {spec.model: client.namespace(spec) for spec in SPECS}
    for model, tokens in chains:
        namespace = namespaces[model]
        with namespace.begin(tokens, keep=0) as sequence:
            table = sequence.block_table
            at = wrong_token(namespace.spec, namespace.pool, table, sequence.tokens)
            yield Found(model, tokens, sequence.num_tokens, at)
