"""``tierkv status --watch``: the status as it changes."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import click
from rich.console import Group, RenderableType
from rich.text import Text

from tierkv.cli import live, screen
from tierkv.cli.ask import Daemon
from tierkv.cli.exit_codes import Exit
from tierkv.cli.render import printable
from tierkv.cli.report import headline, progress_line, sections
from tierkv.errors import NotReady, Unavailable
from tierkv.obs.status import StatusDocument

INTERVAL_S = 1.0


def watch(daemon: Daemon) -> Exit:
    """Follow the daemon until a key or a signal ends it.

    Raises Unavailable, NotReady if nobody answers at the start.
    """
    view = _View(daemon)
    if sys.stdin.isatty() and sys.stdout.isatty():
        live.show(view.look, view.draw, lambda _key: None, INTERVAL_S)
        return Exit.OK
    told = ""
    with suppress(KeyboardInterrupt):
        while True:
            news = view.news()
            if news != told:
                click.echo(f"{time.strftime('%H:%M:%S')} {view.line()}")
                sys.stdout.flush()
                told = news
            time.sleep(INTERVAL_S)
            view.look()
    return Exit.OK


class _View:
    """The last answer, and what has become of the daemon since."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._document = daemon.document()
        self._silence = ""

    def look(self) -> None:
        """Ask again."""
        try:
            self._document = self._daemon.document()
            self._silence = ""
        except (Unavailable, NotReady) as error:
            self._silence = error.message

    def draw(self) -> RenderableType:
        """The whole screen."""
        document = self._document
        if self._silence:
            return Group(
                Text(self._silence, style="bold red"), Text("It said last:"), *self._body()
            )
        return Group(screen.state_line(headline(document), document), *self._body())

    def _body(self) -> list[RenderableType]:
        document = self._document
        parts: list[RenderableType] = [Text("")]
        if document.progress.what and not self._silence:
            parts += [screen.recovery(document), Text("")]
        return parts + [screen.section(one) for one in sections(document)]

    def news(self) -> str:
        """What must differ for another line to be worth it."""
        return self._silence or _news(self._document)

    def line(self) -> str:
        """The state in one line."""
        if self._silence:
            return self._silence
        document = self._document
        parts = [headline(document)]
        if document.progress.what:
            parts.append(progress_line(document))
        parts += [
            f"{name} {tier.state}" for name, tier in document.tiers.items() if _odd(tier.state)
        ]
        if document.problems:
            parts.append(f"{document.problems[0].level}: {document.problems[0].message}")
        return printable("; ".join(parts))


def _odd(state: str) -> bool:
    return state not in ("ok", "off")


def _news(document: StatusDocument) -> str:
    progress = document.progress
    tenth = 10 * progress.done // progress.total if progress.total else 0
    states = [tier.state for tier in document.tiers.values()]
    problems = [(one.message, one.count) for one in document.problems[:1]]
    return repr((document.state, document.epoch, progress.what, tenth, states, problems))
