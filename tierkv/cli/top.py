"""``tierkv top``: who uses what right now, on a terminal."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from tierkv.cli.ask import Daemon, socket_option
from tierkv.cli.exit_codes import Exit
from tierkv.cli.interval import Interval
from tierkv.cli.rates import between
from tierkv.cli.render import clipped, printable
from tierkv.cli.report import Section, headline, progress_line
from tierkv.errors import NotReady, Unavailable
from tierkv.obs.status import TIERS, NamespaceStatus, StatusDocument
from tierkv.units import about_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

ORDERS = (*TIERS, "blocks", "tenant")
"""What the table of namespaces may be sorted by; ``s`` goes on to the next."""

ROWS_SHOWN = 12


@click.command()
@socket_option
@click.option(
    "--interval",
    type=Interval(),
    default=1.0,
    metavar="SECONDS",
    help="How often to ask.",
)
def top(socket: str | None, interval: float) -> int:
    """Watch tiers, tenants and workers live; q quits, s sorts by another column.

    \b
    tierkv top
    tierkv top --interval 5

    Needs a terminal; `tierkv stat` does without. Exits with 3 if there is no daemon.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal; in a pipe use `tierkv stat`")
    view = _View(Daemon.find(socket))
    import_module("tierkv.cli.live").show(view.look, view.draw, view.press, interval)
    return Exit.OK


class _View:
    """The last two answers, and how the namespaces are sorted."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._now = self._before = daemon.document()
        self._silence = ""
        self._order = ORDERS[0]

    def look(self) -> None:
        try:
            now = self._daemon.document()
        except (Unavailable, NotReady) as error:
            self._silence = error.message
            return
        self._before, self._now, self._silence = self._now, now, ""

    def press(self, key: str) -> None:
        if key in ("s", "S"):
            self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]

    def draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from tierkv.cli import screen

        now = self._now
        parts: list[RenderableType] = [
            Text(self._silence, style="bold red")
            if self._silence
            else screen.state_line(headline(now), now)
        ]
        if now.progress.what:
            parts.append(Text(progress_line(now)))
        parts += [screen.rates(between(self._before, now)), screen.tiers(now)]
        parts += [screen.section(namespaces(now, self._order)), screen.section(workers(now))]
        if now.problems:
            last = now.problems[0]
            parts.append(Text(printable(f"last {last.level}: {last.message}"), style="yellow"))
        parts.append(Text(f"q quit   s sort (by {self._order})", style="dim"))
        return Group(*parts)


def namespaces(now: StatusDocument, order: str) -> Section:
    """The namespaces that come first in this order."""

    def rank(one: NamespaceStatus) -> tuple[float, str, str]:
        size = {"blocks": one.blocks, "tenant": 0}.get(order)
        if size is None:
            size = one.tiers[order].bytes if order in one.tiers else 0
        return -size, one.tenant, one.model

    return Section(
        "Namespaces",
        ("tenant", "model", "blocks", *TIERS),
        [
            (
                one.tenant or "-",
                clipped(one.model) or f"namespace {one.id}",
                f"{one.blocks:,}",
                *(about_bytes(one.tiers[t].bytes) if t in one.tiers else "-" for t in TIERS),
            )
            for one in sorted(now.namespaces, key=rank)[:ROWS_SHOWN]
        ],
        ("blocks", *TIERS),
        "Nobody has used it yet.",
    )


def workers(now: StatusDocument) -> Section:
    """The connected workers, those with most sequences first."""
    busiest = sorted(now.workers, key=lambda one: (-one.sequences, one.name))
    return Section(
        "Workers",
        ("worker", "pid", "lease", "sequences"),
        [
            (one.name or "-", str(one.pid), str(one.lease), f"{one.sequences:,}")
            for one in busiest[:ROWS_SHOWN]
        ],
        ("pid", "lease", "sequences"),
        "No worker is connected.",
    )
