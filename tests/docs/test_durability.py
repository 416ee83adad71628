"""The durability page: its list of mutants is the catalogue's."""

from __future__ import annotations

from tests.mutants.docs import HEADING, PAGE, table


def test_the_mutants_are_those_of_the_catalogue() -> None:
    text = PAGE.read_text()
    assert text[text.index(HEADING) :] == table()
