"""What a daemon owes for what it acknowledged, and whether it still has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tierkv.client.sync import Client
from tierkv.core.prefix import chain_hashes
from tierkv.torture.pattern import SPECS, prompt, wrong_tokens

Chain = tuple[str, list[int]]
"""A model and tokens that fill blocks of it."""

Block = tuple[str, bytes]
"""A model and a chain hash: names one block."""

_BLOCK_TOKENS = {spec.model: spec.block_tokens for spec in SPECS}


@dataclass(frozen=True)
class Promise:
    """A chain of full blocks that was acknowledged, at a time of the monotonic clock.

    ``epoch``: of the daemon that acknowledged it.
    """

    model: str
    choices: tuple[int, ...]
    blocks: int
    at: float
    epoch: int


@dataclass(frozen=True)
class Found:
    """What a daemon has of a chain: how many tokens are cached, and which have wrong bytes."""

    model: str
    tokens: list[int]
    found_tokens: int
    wrong_tokens: Sequence[int] = ()

    @property
    def whole(self) -> bool:
        """Whether nothing of it is missing."""
        return self.found_tokens == len(self.tokens)

    @property
    def blocks(self) -> list[Block]:
        """Every block of the chain."""
        return blocks_of((self.model, self.tokens))

    @property
    def lost(self) -> list[Block]:
        """The blocks that are not cached."""
        return self.blocks[self.found_tokens // _BLOCK_TOKENS[self.model] :]

    @property
    def wrong(self) -> list[Block]:
        """The blocks that have wrong bytes."""
        places = {token // _BLOCK_TOKENS[self.model] for token in self.wrong_tokens}
        return [block for place, block in enumerate(self.blocks) if place in places]


def blocks_of(chain: Chain) -> list[Block]:
    """The names of a chain's blocks."""
    model, tokens = chain
    (spec,) = (spec for spec in SPECS if spec.model == model)
    hashes = chain_hashes(spec.digest, np.asarray(tokens, np.uint32), spec.block_tokens)
    return [(model, name.tobytes()) for name in hashes]


def longest(tree: int, promises: Iterable[Promise]) -> list[Chain]:
    """The promised chains, as model and tokens, without those that another one contains."""
    chains = set()
    for promise in promises:
        tokens = prompt(tree, promise.choices)[: promise.blocks * _BLOCK_TOKENS[promise.model]]
        chains.add((promise.model, tuple(tokens)))
    kept = []
    # Sorted, a prefix comes right before the first chain that continues it.
    for one, following in pairwise([*sorted(chains), None]):
        assert one is not None
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
            wrong = wrong_tokens(namespace.spec, namespace.pool, table, sequence.tokens)
            yield Found(model, tokens, sequence.num_tokens, wrong)
