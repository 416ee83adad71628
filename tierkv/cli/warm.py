"""``tierkv warm``: blocks brought up into memory before somebody asks for them."""

from __future__ import annotations

import click

from tierkv.cli.ask import socket_option
from tierkv.cli.choose import CHANGE_S, selector_of, selector_options
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import print_json
from tierkv.rpc.messages import Warm, Warmed


@click.command()
@selector_options
@click.option("--json", "as_json", is_flag=True, help="Print {blocks, were, left} as JSON.")
@socket_option
def warm(
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    as_json: bool,
    socket: str | None,
) -> int:
    """Bring cached blocks up from disk into memory ahead of traffic, as far as there is free room.

    \b
    tierkv warm
    tierkv warm --tenant acme
    tierkv warm --hash 3f2a91

    Nothing is evicted for them. With --hash it is that block, those before it and those that follow
    it.
    """
    request = Warm(selector_of(namespace, tenant, digits))
    done = operate(socket, request, Warmed, CHANGE_S)
    if as_json:
        print_json({"blocks": done.blocks, "were": done.were, "left": done.left})
    else:
        click.echo(
            f"{done.blocks:,} blocks came up, {done.were:,} were in memory already, {done.left:,} "
            "are only on disk"
        )
    return Exit.OK
