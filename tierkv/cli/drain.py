"""``tierkv drain``: a running daemon takes no new workers and brings its blocks to disk."""

from __future__ import annotations

import sys
import time

import click

from tierkv.cli.ask import socket_option
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import print_json
from tierkv.errors import NotReady, TierFailed
from tierkv.rpc.messages import Drain, Draining

LOOK_S = 0.2
"""How often it is asked how far the drain is."""

SAY_S = 2.0
"""How often that is said where it cannot be shown in place."""


@click.command()
@socket_option
@click.option("--wait", is_flag=True, help="Return when no lease is held and all is on disk.")
@click.option("--undo", is_flag=True, help="Take new workers again.")
@click.option("--json", "as_json", is_flag=True, help="Print how far it is as JSON at the end.")
def drain(socket: str | None, wait: bool, undo: bool, as_json: bool) -> int:
    """Let a running daemon take no new workers; what is only in RAM goes to disk.

    \b
    tierkv drain --wait
    tierkv drain --undo

    Workers that it has go on, and may come back. Others are told to try again later, and /readyz
    says 503. To end the daemon as well, stop it: that drains, too, but waits for no worker. Open to
    root, to the daemon's user and to server.operator_uids.
    """
    if wait and undo:
        raise click.UsageError("--wait and --undo contradict each other")
    found = operate(socket, Drain(undo), Draining)
    if wait:
        found = _wait(socket, found)
    if as_json:
        print_json({name: getattr(found, name) for name in found.__struct_fields__})
    elif not found.drains:
        click.echo("the daemon takes new workers")
    else:
        click.echo(f"the daemon drains: {_in_words(found)}")
    if wait and found.unwritten:
        raise TierFailed(
            f"{found.unwritten:,} blocks are only in RAM: the disk tier has no room for them or is "
            "out of service; see `tierkv status`"
        )
    return Exit.OK


def _wait(socket: str | None, found: Draining) -> Draining:
    """Raises NotReady if the drain is undone, or a new daemon comes, before it is through."""
    in_place, said_s = sys.stderr.isatty(), 0.0
    try:
        while found.leases or found.writing:
            if in_place:
                click.echo(f"\r\x1b[K{_in_words(found)}", err=True, nl=False)
            elif time.monotonic() - said_s >= SAY_S:
                said_s = time.monotonic()
                click.echo(_in_words(found), err=True)
            time.sleep(LOOK_S)
            found = operate(socket, Drain(look=True), Draining)
            if not found.drains:
                raise NotReady("the daemon takes new workers again, before it was drained")
    except KeyboardInterrupt:
        click.echo("\nthe daemon goes on draining; `tierkv drain --undo` ends that", err=True)
        raise
    finally:
        if in_place:
            click.echo("\r\x1b[K", err=True, nl=False)
    return found


def _in_words(found: Draining) -> str:
    leases = "1 lease is held" if found.leases == 1 else f"{found.leases:,} leases are held"
    return f"{leases}, {found.unwritten:,} blocks to be written to disk"
