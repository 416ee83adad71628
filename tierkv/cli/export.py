"""``tierkv export``: cached prompts as one file that another host can import."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from pathlib import Path

import click

from tierkv.cli.ask import Daemon, socket_option
from tierkv.cli.choose import selector_of, selector_options
from tierkv.cli.exit_codes import Exit
from tierkv.cli.render import print_json
from tierkv.errors import InvalidArgument

PIPE = "-"


@click.command()
@click.argument("file", metavar="FILE | -")
@selector_options
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print {namespaces, blocks, missed} as JSON.")
@socket_option
def export(
    file: str,
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    force: bool,
    as_json: bool,
    socket: str | None,
) -> int:
    """Write cached prompts to one file, which `tierkv import` reads on any host.

    \b
    tierkv export warm.tkv
    tierkv export acme.tkv --tenant acme
    tierkv export - | zstd | ssh other 'zstd -d | tierkv import -'

    The daemon goes on serving. With --hash it is that block, those before it and those that follow
    it. In a pipe the summary goes to standard error.
    """
    if file == PIPE and sys.stdout.isatty():
        raise click.UsageError("blocks are no text for a terminal: name a file, or pipe it on")
    if file != PIPE:
        _require_replaceable(Path(file), force)
    selector = selector_of(namespace, tenant, digits)
    # Imported late: --help need not wait for it.
    export_to = import_module("tierkv.cli.transfer").export_to
    counts = asyncio.run(export_to(file, selector, Daemon.find(socket).require()))
    summary = {
        "namespaces": counts.namespaces,
        "blocks": counts.blocks,
        "missed": counts.missed,
    }
    if as_json and file != PIPE:
        print_json(summary)
    else:
        missed = f"; {counts.missed:,} had gone when their turn came" if counts.missed else ""
        said = f"{counts.blocks:,} blocks of {counts.namespaces:,} namespaces written{missed}"
        click.echo(said, err=file == PIPE)
    return Exit.OK


def _require_replaceable(file: Path, force: bool) -> None:
    """The file comes by a rename, which would also replace a device or a FIFO by a plain file."""
    if file.exists() and not file.is_file():
        raise InvalidArgument(f"{file} is no regular file; write into it by `tierkv export - >`")
    if file.exists() and not force:
        raise InvalidArgument(f"{file} is there already; say --force to replace it")
