"""The sketch of frequent prefixes: exact while there is room, never far off without."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.top_prefixes import Found, Root, TopPrefixes


def root(number: int) -> Root:
    return Root(1, number, number)


def test_few_prefixes_are_counted_exactly() -> None:
    top = TopPrefixes(kept=3)
    for number, tokens in ((1, 16), (2, 160), (1, 32), (3, 16)):
        top.add(root(number), tokens)
    assert top.largest(2) == [(root(2), Found(1, 160, 0)), (root(1), Found(2, 48, 0))]
    assert len(top.largest(10)) == 3


def test_a_newcomer_takes_the_place_of_the_rarest() -> None:
    top = TopPrefixes(kept=2)
    for number, tokens in ((1, 100), (2, 10), (3, 5)):
        top.add(root(number), tokens)
    assert top.largest(5) == [(root(1), Found(1, 100, 0)), (root(3), Found(1, 15, 10))]


def test_namespaces_are_told_apart() -> None:
    top = TopPrefixes()
    top.add(Root(1, 5, 5), 16)
    top.add(Root(2, 5, 5), 16)
    assert len(top.largest(5)) == 2


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 100)), max_size=300))
def test_what_is_frequent_is_never_missing_and_errors_are_bounded(
    added: list[tuple[int, int]],
) -> None:
    top, exact = TopPrefixes(kept=8), Counter[int]()
    for number, tokens in added:
        top.add(root(number), tokens)
        exact[number] += tokens
    found = dict(top.largest(8))
    total = sum(exact.values())
    for number, tokens in exact.items():
        if tokens * 8 > total:
            assert root(number) in found
    for one, counted in found.items():
        true = exact[one.hash_hi]
        assert true <= counted.tokens <= true + counted.error_tokens
        assert counted.error_tokens * 8 <= total
