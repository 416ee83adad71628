"""Which prefixes are found most often, in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

KEPT = 64
"""Prefixes that are counted at once. Those that bring most hits are among them for certain: one
that brings more than a 64th of all tokens found is never missing."""


class Root(NamedTuple):
    """The first block of a chain, by its hash: what all prompts that begin alike have in common."""

    namespace: int
    hash_hi: int
    hash_lo: int


class Found(NamedTuple):
    """How often chains that begin so were found. ``tokens`` may be too many by ``error_tokens``."""

    times: int
    tokens: int
    error_tokens: int


class TopPrefixes:
    """Counts by root; a newcomer takes the place, and the tokens, of the one with the fewest.

    (That is the space-saving sketch of Metwally, Agrawal and El Abbadi.)
    """

    __slots__ = ("_found", "_kept")

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._found: dict[Root, Found] = {}

    def add(self, root: Root, tokens: int) -> None:
        """Count one chain of which so many tokens were found. Mutates."""
        known = self._found.get(root)
        if known is not None:
            self._found[root] = Found(known.times + 1, known.tokens + tokens, known.error_tokens)
            return
        inherited = 0
        if len(self._found) == self._kept:
            fewest = min(self._found, key=lambda one: self._found[one].tokens)
            inherited = self._found.pop(fewest).tokens
        self._found[root] = Found(1, inherited + tokens, inherited)

    def largest(self, count: int) -> list[tuple[Root, Found]]:
        """Those that brought most tokens, the most first."""
        ordered = sorted(self._found.items(), key=lambda one: -one[1].tokens)
        return ordered[:count]
