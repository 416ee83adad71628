"""How commands print: tables for people, JSON for programs.

On a terminal tables are drawn by rich, which honours NO_COLOR and dumb terminals; anywhere else
they are plain columns that never wrap.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

Row = Sequence[str]


def print_json(document: object) -> None:
    """One indented JSON document."""
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
    click.echo(encoded.decode())


def print_heading(text: str) -> None:
    """A line that stands out on a terminal that can show it."""
    bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    click.echo(click.style(text, bold=True) if bold else text)


def printable(text: str) -> str:
    """The text without what would make a terminal do something else than show it."""
    return "".join(char if char.isprintable() else "?" for char in text)


def print_table(headers: Row, rows: Sequence[Row], *, numbers: Sequence[str] = ()) -> None:
    """A table; columns whose header is in ``numbers`` are aligned to the right.

    Cells may hold what others chose, such as names: control characters are shown as "?".
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(headers, rows, numbers)
    else:
        click.echo(plain_table(headers, rows, numbers=numbers), nl=False)


def plain_table(headers: Row, rows: Sequence[Row], *, numbers: Sequence[str] = ()) -> str:
    """The table as text, two spaces between columns."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (headers, *rows):
        cells = [
            cell.rjust(width) if header in numbers else cell.ljust(width)
            for header, cell, width in zip(headers, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)


def _print_rich(headers: Row, rows: Sequence[Row], numbers: Sequence[str]) -> None:
    # Costs as much to import as all the rest; only people wait for it.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        justify: Any = "right" if header in numbers else "left"
        table.add_column(header, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout).print(table)
