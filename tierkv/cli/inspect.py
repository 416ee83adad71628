"""``tierkv inspect``: all about one block, namespace, sequence or lease."""

from __future__ import annotations

from typing import Any

import click

from tierkv.cli.ask import socket_option
from tierkv.cli.choose import LOOK_S, NUMBER_MAX
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import print_json, print_table
from tierkv.rpc.messages import Inspect, Inspected
from tierkv.units import about_bytes

KINDS = ("namespace", "sequence", "lease")
LIST_SHOWN = 12


@click.command()
@click.argument("what", metavar="HASH | namespace/N | sequence/N | lease/N")
@click.option("--json", "as_json", is_flag=True, help="Print the document as JSON.")
@socket_option
def inspect(what: str, as_json: bool, socket: str | None) -> int:
    """Show all that is known of one thing: a block by the first digits of its hash, or another.

    \b
    tierkv inspect 3f2a91
    tierkv inspect 3f2a91 --json | jq .tokens
    tierkv inspect namespace/0
    tierkv inspect lease/12
    """
    found = operate(socket, _request(what), Inspected, LOOK_S).document
    if as_json:
        print_json(found)
    else:
        print_table(
            ("what", "is"),
            [(key.replace("_", " "), _text(key, value)) for key, value in found.items()],
        )
    return Exit.OK


def _request(what: str) -> Inspect:
    kind, slash, number = what.partition("/")
    if not slash:
        return Inspect("block", hash=what)
    if kind not in KINDS or not number.isdecimal() or int(number) > NUMBER_MAX:
        raise click.UsageError(f"{what!r} is neither a hash nor one of {', '.join(KINDS)}/NUMBER")
    return Inspect(kind, int(number))


def _text(key: str, value: Any) -> str:
    """What a person reads."""
    if key in ("bytes", "block_bytes"):
        return about_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        shown = [_item(one) for one in value[:LIST_SHOWN]]
        more = [f"and {len(value) - LIST_SHOWN:,} more (--json has all)"]
        return ", ".join(shown + more * (len(value) > LIST_SHOWN)) or "none"
    return str(value) if value != "" else "-"


def _item(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    name = next((key for key in ("hash", "sequence") if value.get(key)), "")
    about = value.get("worker") or value.get("state", "")
    return f"{name} {value.get(name, '')} ({about})".strip()
