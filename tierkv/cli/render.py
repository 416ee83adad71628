"""How commands print: tables for people, JSON for programs.

On a terminal tables are drawn by rich, which honours NO_COLOR and dumb terminals; anywhere else
they are plain columns that never wrap.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
import msgspec

Row = Sequence[str]

UNBOUNDED = 10_000
"""Characters; wider than any table."""


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


def clipped(text: str, characters: int = 64) -> str:
    """A long name without its middle: what tells names from each other is at their ends."""
    if len(text) <= characters:
        return text
    kept = (characters - 3) // 2
    return f"{text[:kept]}...{text[-kept:]}"


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


def least_width(cells: Sequence[str], *, is_number: bool) -> int:
    """Characters that a column of these cells needs for its words, or numbers, to stay whole."""
    from rich.cells import cell_len

    parts = cells if is_number else [word for cell in cells for word in cell.split()]
    return max(map(cell_len, parts), default=1)


def _print_rich(headers: Row, rows: Sequence[Row], numbers: Sequence[str]) -> None:
    # Costs as much to import as all the rest; only people wait for it.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import measure_renderables
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for header, cells in zip(headers, zip(headers, *rows, strict=True), strict=True):
        is_number = header in numbers
        table.add_column(
            header,
            justify="right" if is_number else "left",
            overflow="fold",
            min_width=least_width(cells, is_number=is_number),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=sys.stdout)
    # Words and numbers stay whole: where they do not fit, the terminal itself breaks the lines.
    unbounded = console.options.update(max_width=UNBOUNDED)
    console.width = max(console.width, measure_renderables(console, unbounded, [table]).minimum)
    console.print(table)
