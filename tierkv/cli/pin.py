"""``tierkv pin`` and ``tierkv unpin``: prompts that are always cached."""

from __future__ import annotations

from pathlib import Path

import click

from tierkv.cli.ask import Daemon, socket_option
from tierkv.cli.choose import (
    CHANGE_S,
    hash_of,
    selector_of,
    selector_options,
    tokens_option,
)
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import print_json
from tierkv.rpc.messages import Pin, Pinned


@click.command()
@selector_options
@tokens_option
@click.option("--json", "as_json", is_flag=True, help="Print {pins, blocks, change} as JSON.")
@socket_option
def pin(
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    tokens: Path | None,
    as_json: bool,
    socket: str | None,
) -> int:
    """Keep cached prompts for good: they may move between tiers, and are never dropped.

    \b
    tierkv pin --hash 3f2a91
    tierkv pin --namespace 0 --tokens system-prompt.json
    tierkv pin --tenant acme

    With --hash or --tokens it is the chain that ends in that block, else every chain that is cached
    now. Pins survive a crash and a restart, and may hold half of the last tier. An index that is
    lost and made anew has none.
    """
    found = _digits(socket, namespace, digits, tokens)
    return _ask(socket, namespace, tenant, found, as_json)


@click.command()
@selector_options
@tokens_option
@click.option("--json", "as_json", is_flag=True, help="Print {pins, blocks, change} as JSON.")
@socket_option
def unpin(
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    tokens: Path | None,
    as_json: bool,
    socket: str | None,
) -> int:
    """Let pinned prompts be dropped again like all others; see `tierkv ls pins`.

    \b
    tierkv unpin --hash 3f2a91
    tierkv unpin --tenant acme
    """
    found = _digits(socket, namespace, digits, tokens)
    return _ask(socket, namespace, tenant, found, as_json, undo=True)


def _digits(
    socket: str | None, namespace: int | None, digits: str | None, tokens: Path | None
) -> str | None:
    if tokens is not None and digits:
        raise click.UsageError("give --hash or --tokens")
    return hash_of(Daemon.find(socket), tokens, namespace) if tokens is not None else digits


def _ask(
    socket: str | None,
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    as_json: bool,
    *,
    undo: bool = False,
) -> int:
    if namespace is None and not tenant and not digits:
        raise click.UsageError("say which: by --namespace, --tenant, --hash or --tokens")
    request = Pin(selector_of(namespace, tenant, digits), undo)
    done = operate(socket, request, Pinned, CHANGE_S)
    if as_json:
        print_json({"pins": done.pins, "blocks": done.blocks, "change": done.change})
    else:
        pins = "1 pin" if done.pins == 1 else f"{done.pins:,} pins"
        click.echo(
            f"{pins} {'removed' if undo else 'made'}, {abs(done.change):,} blocks "
            f"{'fewer' if undo else 'more'}: pins hold {done.blocks:,} blocks now"
        )
    return Exit.OK
