"""``tierkv status``: one question to the daemon, shown as tables, as JSON, or again and again."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec

from tierkv.cli.ask import Daemon, socket_option, understood
from tierkv.cli.exit_codes import Exit
from tierkv.cli.render import print_heading, print_json, print_table
from tierkv.cli.report import Section, headline, progress_line, sections
from tierkv.errors import Unavailable
from tierkv.obs.status import SERVING, StatusDocument
from tierkv.units import about_duration


@click.command()
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print the status document as JSON.")
@click.option(
    "--watch",
    is_flag=True,
    help="Show it anew every second, with a bar while the daemon recovers; in a pipe one line "
    "whenever the state changes.",
)
@click.option(
    "--last", is_flag=True, help="Show what the daemon wrote down last, also if it is gone now."
)
def status(socket: str | None, as_json: bool, watch: bool, last: bool) -> int:
    """Show what a running daemon holds and does, and what went wrong last.

    \b
    tierkv status
    tierkv status --json | jq .prefix.hit_ratio
    tierkv status --watch
    tierkv status --last

    Exits with 0 if it serves, 75 if it does not yet or no more, 3 if there is none.
    """
    if watch and (last or as_json):
        raise click.UsageError("--watch goes with neither --last nor --json; see `tierkv stat`")
    if watch:
        return int(import_module("tierkv.cli.watch").watch(Daemon.find(socket)))
    plain = _read_last() if last else Daemon.find(socket).status()
    document = understood(plain)
    if as_json:
        print_json(plain)
    else:
        _print(document, "was" if last else "is")
    return Exit.OK if document.state == SERVING else Exit.NOT_READY


def _read_last() -> dict[str, Any]:
    from tierkv.cli.options import load_paths
    from tierkv.service.last_status import read_last_status

    state_dir = Path(load_paths().server.state_dir)
    try:
        content, written_s = read_last_status(state_dir)
    except OSError as error:
        raise Unavailable(
            f"no daemon has written its status in {state_dir} ({error.strerror}): each does so at "
            "its checkpoints; name another directory by TIERKV_SERVER__STATE_DIR"
        ) from error
    click.echo(f"written {about_duration(time.time() - written_s)} ago", err=True)
    plain: dict[str, Any] = msgspec.json.decode(content)
    return plain


def _print(document: StatusDocument, verb: str) -> None:
    click.echo(headline(document, verb))
    if document.progress.what:
        click.echo(progress_line(document))
    for section in sections(document):
        click.echo()
        print_section(section)


def print_section(section: Section) -> None:
    """A heading, and the table or the sentence under it."""
    print_heading(section.title)
    if section.rows:
        print_table(section.headers, section.rows, numbers=section.numbers)
    else:
        click.echo(section.instead)
