"""``tierkv ls``: what the daemon holds, a page at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tierkv.cli.ask import Daemon, socket_option
from tierkv.cli.choose import LOOK_S, NUMBER_MAX, selector_of, selector_options
from tierkv.cli.exit_codes import Exit
from tierkv.cli.operating import operate
from tierkv.cli.render import clipped, print_json, print_table
from tierkv.obs.status import NamespaceStatus
from tierkv.rpc.messages import List, Listed
from tierkv.units import about_bytes

Item = dict[str, Any]

HASH_SHOWN = 16
COUNTS = ("blocks", "tokens", "size", "held by", "pinned", "sequences", "lease", "pid", "namespace")
"""Columns of numbers."""

_SHOWN: dict[str, dict[str, Callable[[Item], str]]] = {
    "namespaces": {
        "namespace": lambda one: str(one["id"]),
        "tenant": lambda one: one["tenant"] or "-",
        "model": lambda one: clipped(one["model"]) or "(unknown)",
        "dtype": lambda one: one["dtype"],
        "blocks": lambda one: f"{one['blocks']:,}",
        "in tiers": lambda one: _tiers(one["tiers"]),
        "size": lambda one: about_bytes(_bytes(one)),
    },
    "tenants": {
        "tenant": lambda one: one["tenant"] or "-",
        "namespaces": lambda one: ", ".join(map(str, one["namespaces"])),
        "blocks": lambda one: f"{one['blocks']:,}",
        "in tiers": lambda one: _tiers(one["tiers"]),
        "size": lambda one: about_bytes(_bytes(one)),
    },
    "chains": {
        "hash": lambda one: one["hash"][:HASH_SHOWN],
        "namespace": lambda one: str(one["namespace"]),
        "tenant": lambda one: one["tenant"] or "-",
        "blocks": lambda one: f"{one['blocks']:,}",
        "tokens": lambda one: f"{one['tokens']:,}",
        "size": lambda one: about_bytes(one["bytes"]),
        "in tiers": lambda one: _tiers(one["tiers"]),
        "held by": lambda one: f"{one['references']:,}",
        "pinned": lambda one: f"{one['pinned']:,}",
    },
    "blocks": {
        "hash": lambda one: one["hash"][:HASH_SHOWN] or "-",
        "namespace": lambda one: str(one["namespace"]),
        "tenant": lambda one: one["tenant"] or "-",
        "state": lambda one: one["state"],
        "size": lambda one: about_bytes(one["bytes"]),
        "in tiers": lambda one: ", ".join(one["tiers"]) or "(lost)",
        "held by": lambda one: f"{one['references']:,}",
        "pinned": lambda one: "yes" if one["pinned"] else "",
    },
    "sequences": {
        "sequence": lambda one: str(one["sequence"]),
        "lease": lambda one: str(one["lease"]),
        "namespace": lambda one: str(one["namespace"]),
        "tenant": lambda one: one["tenant"] or "-",
        "state": lambda one: one["state"],
        "blocks": lambda one: f"{one['blocks']:,}",
        "size": lambda one: about_bytes(one["bytes"]),
    },
    "leases": {
        "lease": lambda one: str(one["lease"]),
        "pid": lambda one: str(one["pid"]),
        "worker": lambda one: one["worker"],
        "state": lambda one: "connected" if one["connected"] else "away",
        "sequences": lambda one: f"{one['sequences']:,}",
        "blocks": lambda one: f"{one['blocks']:,}",
    },
    "pins": {
        "hash": lambda one: one["hash"][:HASH_SHOWN] or "(lost)",
        "namespace": lambda one: str(one["namespace"]),
        "tenant": lambda one: one["tenant"] or "-",
        "blocks": lambda one: f"{one['blocks']:,}",
        "tokens": lambda one: f"{one['tokens']:,}",
        "size": lambda one: about_bytes(one["bytes"]),
    },
}
"""What a person is shown of each kind: a column's name and what stands there."""


@click.command()
@click.argument("kind", type=click.Choice(list(_SHOWN)), default="namespaces")
@selector_options
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="Most lines of one page.")
@click.option(
    "--after", type=click.IntRange(0, NUMBER_MAX), default=0, help="Where the last page ended."
)
@click.option("--json", "as_json", is_flag=True, help="Print {items, next, total} as JSON.")
@socket_option
def ls(
    kind: str,
    namespace: int | None,
    tenant: str | None,
    digits: str | None,
    limit: int,
    after: int,
    as_json: bool,
    socket: str | None,
) -> int:
    """List what a running daemon holds: whose blocks, which prompts, and who uses them.

    \b
    tierkv ls
    tierkv ls tenants
    tierkv ls chains --tenant acme --limit 10
    tierkv ls blocks --hash 3f2a91
    tierkv ls leases --json | jq '.items[] | select(.connected | not)'

    Chains are prompts as they are cached, the longest first. With --hash, chains and blocks are
    those that have that block.
    """
    selector = selector_of(namespace, tenant, digits)
    if kind in ("namespaces", "tenants"):
        known = [
            one
            for one in Daemon.find(socket).document().namespaces
            if (namespace in (None, one.id)) and (tenant in (None, one.tenant))
        ]
        items = _tenants(known) if kind == "tenants" else [_plain(one) for one in known]
        page = Listed(items[after : after + limit], 0, len(items))
        page.next = after + limit if after + limit < len(items) else 0
    else:
        page = operate(socket, List(kind, selector, after, limit), Listed, LOOK_S)
    if as_json:
        print_json({"items": page.items, "next": page.next, "total": page.total})
    else:
        _print(kind, page)
    return Exit.OK


def _print(kind: str, page: Listed) -> None:
    columns = _SHOWN[kind]
    rows = [[show(item) for show in columns.values()] for item in page.items]
    print_table(list(columns), rows, numbers=COUNTS)
    if page.next:
        of = f" of {page.total:,}" if page.total >= 0 else ""
        click.echo(f"{len(page.items)} shown{of}; the next: --after {page.next}", err=True)


def _plain(namespace: NamespaceStatus) -> Item:
    return {
        "id": namespace.id,
        "tenant": namespace.tenant,
        "model": namespace.model,
        "dtype": namespace.dtype,
        "block_tokens": namespace.block_tokens,
        "block_bytes": namespace.block_bytes,
        "digest": namespace.digest,
        "blocks": namespace.blocks,
        "tiers": {tier: held.blocks for tier, held in namespace.tiers.items()},
        "bytes": {tier: held.bytes for tier, held in namespace.tiers.items()},
    }


def _tenants(namespaces: list[NamespaceStatus]) -> list[Item]:
    """The same, added up by tenant; those with most blocks first."""
    found: dict[str, Item] = {}
    for plain in map(_plain, namespaces):
        fresh: Item = {"tenant": plain["tenant"], "namespaces": [], "blocks": 0}
        one = found.setdefault(plain["tenant"], {**fresh, "tiers": {}, "bytes": {}})
        one["namespaces"].append(plain["id"])
        one["blocks"] += plain["blocks"]
        for key in ("tiers", "bytes"):
            for tier, count in plain[key].items():
                one[key][tier] = one[key].get(tier, 0) + count
    return sorted(found.values(), key=lambda one: -int(one["blocks"]))


def _tiers(counts: dict[str, int]) -> str:
    return ", ".join(f"{tier} {count:,}" for tier, count in counts.items() if count) or "-"


def _bytes(item: Item) -> int:
    return sum(item["bytes"].values())
