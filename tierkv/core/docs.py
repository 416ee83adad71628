"""Tables of docs/ARCHITECTURE.md that repeat what the core says of itself.

``tierkv.service.docs`` puts them into the page.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable
from enum import IntEnum
from typing import get_args

from tierkv.core.effects import Effect
from tierkv.core.invariants import INVARIANTS
from tierkv.core.records import Kind


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def first_sentence(docstring: str) -> str:
    """What a docstring says first, on one line, as Markdown."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".").replace("``", "`")


def records() -> str:
    """Every kind of record and what its fields mean."""
    said = _member_docstrings(Kind)
    return table(
        ("type", "record", "fields"),
        [(str(kind.value), f"`{kind.name}`", said[kind.name]) for kind in Kind],
    )


def effects() -> str:
    """Every effect a flow may yield."""
    return table(
        ("effect", "what it asks for"),
        [
            (f"`{effect.__name__}`", first_sentence(effect.__doc__ or ""))
            for effect in get_args(Effect)
        ],
    )


def invariants() -> str:
    """Every invariant, with its number."""
    return table(("", "always true"), [(f"I{number}", text) for number, text in INVARIANTS.items()])


def _member_docstrings(enum: type[IntEnum]) -> dict[str, str]:
    """The string below each member's assignment, on one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(enum))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    found: dict[str, str] = {}
    for statement, after in itertools.pairwise(body):
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[statement.targets[0].id] = " ".join(str(after.value.value).split())
    return found
