"""What ``top`` and ``status --watch`` draw: the status document as rich's tables and bars."""

from __future__ import annotations

from collections.abc import Container, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierkv.cli.rates import Rates
from tierkv.cli.render import least_width, printable
from tierkv.cli.report import Section, progress_line
from tierkv.obs.status import StatusDocument
from tierkv.units import about_bytes, format_ratio

Cells = Sequence[RenderableType]

BAR_WIDTH = 30
STATE_STYLES = {"serving": "green", "stopped": "red"}


def state_line(text: str, document: StatusDocument) -> Text:
    """A headline in the state's colour."""
    return Text(text, style=f"bold {STATE_STYLES.get(document.state, 'yellow')}")


def recovery(document: StatusDocument) -> RenderableType:
    """The bar of a start, and how long it takes."""
    progress = document.progress
    bar = ProgressBar(
        total=progress.total or None, completed=min(progress.done, progress.total), width=60
    )
    return Group(bar, Text(progress_line(document)))


def tiers(document: StatusDocument) -> Table:
    """How full each tier is, as a bar."""
    rows: list[Cells] = []
    for name, tier in document.tiers.items():
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        cells: Cells = (
            Text(name),
            ProgressBar(total=1.0, completed=share, width=BAR_WIDTH, finished_style="bar.complete"),
            Text(format_ratio(share)),
            Text(about_bytes(tier.used_bytes)),
            Text(about_bytes(tier.capacity_bytes)),
            Text(f"{tier.blocks:,}"),
            Text(f"{tier.evictable_blocks:,}"),
            Text(tier.state, style="bold red" if tier.state == "failed" else ""),
        )
        rows.append(cells)
    headers = ("tier", "", "full", "used", "of", "blocks", "evictable", "state")
    return _table(headers, {3, 4, 5, 6}, rows)


def rates(now: Rates) -> Text:
    """One line of what goes on."""
    saved = sum(now.hit_tokens.values())
    by_tier = ", ".join(f"{tier} {count:,.0f}" for tier, count in now.hit_tokens.items() if count)
    return Text(
        f"looked up {now.lookup_tokens:,.0f} tokens/s, found {saved:,.0f}/s"
        + (f" ({format_ratio(now.hit_ratio)}: {by_tier})" if saved else "")
        + f"; evicted {now.evicted_blocks:,.0f} blocks/s, {now.dropped_blocks:,.0f}/s for good"
        + f"; log {about_bytes(now.log_bytes)}/s"
    )


def section(found: Section) -> RenderableType:
    """A heading, and the table or the sentence under it."""
    title = Text(found.title, style="bold")
    if not found.rows:
        return Group(title, Text(found.instead))
    numbers = {k for k, header in enumerate(found.headers) if header in found.numbers}
    rows = [[Text(printable(cell)) for cell in row] for row in found.rows]
    return Group(title, _table(found.headers, numbers, rows))


def _table(headers: Sequence[str], numbers: Container[int], rows: Sequence[Cells]) -> Table:
    """Words and numbers stay whole: a screen that is too narrow cuts the columns at its edge."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for k, header in enumerate(headers):
        texts = [cell.plain for row in rows if isinstance(cell := row[k], Text)]
        is_number = k in numbers
        table.add_column(
            header,
            justify="right" if is_number else "left",
            overflow="fold",
            min_width=least_width([header, *texts], is_number=is_number),
        )
    for row in rows:
        table.add_row(*row)
    return table
