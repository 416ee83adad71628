"""``tierkv reload``: a running daemon reads its configuration anew."""

from __future__ import annotations

import click

from tierkv.cli.ask import socket_option
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import print_json
from tierkv.rpc.messages import Reload, Reloaded


@click.command()
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {changed, needs_restart}.")
def reload(socket: str | None, as_json: bool) -> int:
    """Have a running daemon read its configuration anew, from where it read it at its start.

    \b
    tierkv reload
    tierkv reload --json

    Returns when the new settings hold. All of them are taken over that a reload can change, or, if
    anything is wrong, none: then it says what, and exits with 78. Those that need a restart are
    named. Open to root, to the daemon's user and to server.operator_uids.
    """
    found = operate(socket, Reload(), Reloaded)
    if as_json:
        print_json({"changed": found.changed, "needs_restart": found.needs_restart})
        return Exit.OK
    click.echo(f"changed: {', '.join(found.changed) or 'nothing'}")
    if found.needs_restart:
        click.echo(f"changed, but needs a restart: {', '.join(found.needs_restart)}")
    return Exit.OK
