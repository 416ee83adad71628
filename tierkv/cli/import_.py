"""``tierkv import``: caches what `tierkv export` wrote."""

from __future__ import annotations

import asyncio
from importlib import import_module

import click

from tierkv.cli.ask import Daemon, socket_option
from tierkv.cli.exit_codes import Exit
from tierkv.cli.render import print_json


@click.command("import")
@click.argument("file", metavar="FILE | -")
@click.option(
    "--json", "as_json", is_flag=True, help="Print {namespaces, blocks, known, left} as JSON."
)
@socket_option
def import_(file: str, as_json: bool, socket: str | None) -> int:
    """Cache the prompts of a file that `tierkv export` wrote, on this host or another.

    \b
    tierkv import warm.tkv
    tierkv import warm.tkv --json | jq .left

    "-" reads from a pipe. Every byte is checked before it is cached; a file that is cut off or
    damaged ends the command with status 4, and what was whole before stays. Nothing is evicted to
    make room. Importing again changes nothing.
    """
    # Imported late: --help need not wait for it.
    import_from = import_module("tierkv.cli.transfer").import_from
    counts = asyncio.run(import_from(file, Daemon.find(socket).require()))
    if as_json:
        print_json(
            {
                "namespaces": counts.namespaces,
                "blocks": counts.blocks,
                "known": counts.known,
                "left": counts.left,
            }
        )
    else:
        left = f"; {counts.left:,} found no room" if counts.left else ""
        click.echo(f"{counts.blocks:,} blocks imported, {counts.known:,} were cached{left}")
    return Exit.OK
