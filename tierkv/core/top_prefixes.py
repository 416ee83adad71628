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

    __slots__ = ("_errors", "_kept", "_times", "_tokens")

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._tokens: dict[Root, int] = {}
        self._times: dict[Root, int] = {}
        self._errors: dict[Root, int] = {}

    def add(self, root: Root, tokens: int) -> None:
        """Count one chain of which so many tokens were found. Mutates."""
        counted = self._tokens
        if root in counted:
            counted[root] += tokens
            self._times[root] += 1
            return
        inherited = 0
        if len(counted) == self._kept:
            fewest = min(counted, key=counted.__getitem__)
            inherited = counted.pop(fewest)
            del self._times[fewest], self._errors[fewest]
        counted[root] = inherited + tokens
        self._times[root], self._errors[root] = 1, inherited

    def largest(self, count: int) -> list[tuple[Root, Found]]:
        """Those that brought most tokens, the most first."""
        ordered = sorted(self._tokens, key=self._tokens.__getitem__, reverse=True)
        return [
            (root, Found(self._times[root], self._tokens[root], self._errors[root]))
            for root in ordered[:count]
        ]
