"""Test support: what transformers calls things, streamers that do something, and what is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

import tierkv
from tierkv.integrations.transformers import Attached, TierKVCache

GREEDY = {"do_sample": False, "max_new_tokens": 40}


def by_hand(attached: Attached, cache: TierKVCache) -> dict[str, Any]:
    """The cache as the argument that this version of transformers wants."""
    return {attached.cache_name: cache}


def held(client: tierkv.Client) -> int:
    """How many sequences the daemon holds for anybody."""
    return int(client.stat()["sequences"])


def stored(client: tierkv.Client) -> int:
    """How many blocks lie in the device tier."""
    return int(client.stat()["tiers"]["device"]["blocks"])


class Tokens(BaseStreamer):
    """Collects what is streamed; calls ``then`` when ``after`` tokens are known."""

    def __init__(self, after: int = -1, then: Callable[[], None] = lambda: None) -> None:
        self.tokens: list[int] = []
        self._after = after
        self._then = then
        self._prompt = True

    def put(self, value: Any) -> None:
        """The prompt first, then each token."""
        if self._prompt:
            self._prompt = False
            return
        self.tokens += value.reshape(-1).tolist()
        if len(self.tokens) == self._after:
            self._then()

    def end(self) -> None:
        """Nothing more comes."""


class After(LogitsProcessor):
    """Calls ``then`` when logits are looked at for the ``step``-th time; changes none."""

    def __init__(self, step: int, then: Callable[[], None]) -> None:
        self._left = step
        self._then = then

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._left -= 1
        if not self._left:
            self._then()
        return scores
