"""A request as a chain of blocks: its tokens, and what else decides what is in their KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tierkv.client.tokens import token_array
from tierkv.core.ids import U32

if TYPE_CHECKING:
    from vllm.v1.request import Request

ExtraKeysOf = Callable[[Any, int, int, int], tuple[tuple[Any, ...] | None, int]]
"""vLLM's own ``generate_block_hash_extra_keys``."""


@dataclass(frozen=True)
class Chain:
    """Whole blocks: ``tokens`` (u32 [blocks x block_tokens]), a key or None for each block."""

    tokens: U32
    extra_keys: tuple[bytes | None, ...] | None

    def first(self, blocks: int, block_tokens: int) -> Chain:
        """The chain's first blocks."""
        keys = None if self.extra_keys is None else self.extra_keys[:blocks]
        return Chain(self.tokens[: blocks * block_tokens], keys)


class ChainOf:
    """Grows with its request. ``owner``: what the whole chain depends on (adapter, generation)."""

    def __init__(
        self, request: Request, block_tokens: int, owner: tuple[Any, ...], extra_keys: ExtraKeysOf
    ) -> None:
        self._request = request
        self._block_tokens = block_tokens
        self._owner = owner
        self._extra_keys = extra_keys
        self._tokens: U32 = np.empty(0, np.uint32)
        self._keys: list[bytes | None] = []
        self._item = 0

    def first(self, blocks: int) -> Chain:
        """The first ``blocks`` blocks, whose tokens the request must have.

        Raises InvalidArgument if one of these is no token id (a place that is still to be filled).
        """
        wanted = blocks * self._block_tokens
        if getattr(self._request, "resumable", False):
            # A session's next message may replace tokens of the last answer, and bring media.
            self._tokens, self._keys, self._item = self._tokens[:0], [], 0
        known = len(self._tokens)
        if known < wanted:
            new = token_array(self._request.all_token_ids[known:wanted])
            self._tokens = np.concatenate([self._tokens, new])
        plain = not (self._owner or _has_keys(self._request))
        return Chain(self._tokens[:wanted], None if plain else self._keys_of(blocks))

    def _keys_of(self, blocks: int) -> tuple[bytes | None, ...]:
        while len(self._keys) < blocks:
            start = len(self._keys) * self._block_tokens
            keys, self._item = self._extra_keys(
                self._request, start, start + self._block_tokens, self._item
            )
            # The adapter is told by its weights, which the owner has.
            told = [key for key in keys or () if key[0] != "lora"]
            if not self._keys:
                told += self._owner
            self._keys.append(msgspec.msgpack.encode(told) if told else None)
        return tuple(self._keys[:blocks])


def _has_keys(request: Request) -> bool:
    return bool(
        request.mm_features
        or request.cache_salt
        or request.lora_request
        or request.prompt_embeds is not None
    )
