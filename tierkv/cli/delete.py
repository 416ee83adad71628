"""``tierkv delete``: prompts that nobody is to find again."""

from __future__ import annotations

import sys

import click

from tierkv.cli.ask import socket_option
from tierkv.cli.choose import CHANGE_S, LOOK_S, selector_of, selector_options
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import print_json
from tierkv.rpc.messages import Delete, Deleted
from tierkv.units import about_bytes


@click.command()
@selector_options
@click.option("--yes", is_flag=True, help="Do not ask; needed where nobody can be asked.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@socket_option
def delete(
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    socket: str | None,
) -> int:
    """Delete cached prompts, so that nobody finds them again, whatever happens to the daemon.

    \b
    tierkv delete --hash 3f2a91
    tierkv delete --tenant acme --yes
    tierkv delete --namespace 0 --dry-run

    With --hash it is that block and all that follow it. What sequences hold stays with them until
    they end, and is found by nobody else. Bytes on disk are not overwritten at once.
    """
    if namespace is None and not tenant and not digits:
        raise click.UsageError("say which: by --namespace, --tenant or --hash")
    selector = selector_of(namespace, tenant, digits)
    answer = operate(socket, Delete(selector), Deleted, LOOK_S)
    if not dry_run:
        if not yes:
            _ask_person(answer)
        answer = operate(socket, Delete(selector, really=True), Deleted, CHANGE_S)
    if as_json:
        print_json(
            {
                "blocks": answer.blocks,
                "bytes": answer.bytes,
                "in_use": answer.in_use,
                "pinned": answer.pinned,
                "done": answer.done,
            }
        )
    else:
        click.echo(("deleted " if answer.done else "would delete ") + _said(answer))
    return Exit.OK


def _ask_person(plan: Deleted) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"this would delete {_said(plan)}; say --yes, nobody can be asked")
    click.confirm(f"Delete {_said(plan)}?", abort=True, err=True)


def _said(answer: Deleted) -> str:
    sizes = ", ".join(f"{about_bytes(size)} {tier}" for tier, size in answer.bytes.items() if size)
    said = f"{answer.blocks:,} blocks" + (f" ({sizes})" if sizes else "")
    if answer.in_use:
        said += f"; {answer.in_use:,} of them are in use and stay with those who hold them"
    if answer.pinned:
        said += f"; {answer.pinned:,} of them are pinned, so nothing goes before they are unpinned"
    return said
