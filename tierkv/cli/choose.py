"""Which blocks a command is about: options that several have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tierkv.cli.ask import Daemon
from tierkv.errors import InvalidArgument, NotFound
from tierkv.rpc.messages import Selector

Command = TypeVar("Command", bound=Callable[..., Any])

NUMBER_MAX = 2**63 - 1
"""The largest that a message carries."""

LOOK_S = 60.0
"""A look at all chains of a large store."""

CHANGE_S = 3600.0
"""To delete or to warm up everything takes its time; who waits can interrupt that."""


def _not_empty(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """An empty name would choose everybody's; most often it is a script's unset variable."""
    if value == "":
        raise click.BadParameter("it is empty; leave the option out to choose all")
    return value


def selector_options(command: Command) -> Command:
    """Adds ``--namespace``, ``--tenant`` and ``--hash``, all of which must hold."""
    options = (
        click.option(
            "--namespace",
            type=click.IntRange(0, NUMBER_MAX),
            metavar="N",
            help="Only blocks of this namespace; see `tierkv ls namespaces`.",
        ),
        click.option(
            "--tenant", metavar="NAME", callback=_not_empty, help="Only blocks of this tenant."
        ),
        click.option(
            "--hash",
            "digits",
            metavar="HASH",
            callback=_not_empty,
            help="By the first digits of one block's hash; see `tierkv ls chains`.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def tokens_option(command: Command) -> Command:
    """Adds ``--tokens``, for ``selector_of``."""
    return click.option(
        "--tokens",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help="By the token ids of a prompt, as JSON or separated by blanks, and --namespace.",
    )(command)


def selector_of(namespace: int | None, tenant: str | None, digits: str | None) -> Selector:
    """What the options say."""
    return Selector(-1 if namespace is None else namespace, tenant or "", digits or "")


def hash_of(daemon: Daemon, tokens: Path, namespace: int | None) -> str:
    """The chain hash of the last whole block of these tokens. Raises NotFound, InvalidArgument."""
    # Imported late: only this needs numpy.
    import numpy as np

    from tierkv.core.prefix import chain_hashes

    if namespace is None:
        raise click.UsageError("--tokens needs --namespace: a prompt has a hash in each of them")
    known = next((one for one in daemon.document().namespaces if one.id == namespace), None)
    if known is None:
        raise NotFound(f"there is no namespace {namespace}; see `tierkv ls namespaces`")
    ids = np.array(_read_tokens(tokens), np.uint32)
    if len(ids) < known.block_tokens:
        raise InvalidArgument(
            f"{tokens} has {len(ids)} token ids; a block of namespace {namespace} has "
            f"{known.block_tokens}"
        )
    hashes = chain_hashes(bytes.fromhex(known.digest), ids, known.block_tokens)
    return bytes(hashes[-1]).hex()


def _read_tokens(path: Path) -> list[int]:
    with click.open_file(str(path)) as file:
        text = file.read()
    try:
        found = (
            json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        )
        ids = [int(one) for one in found]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} holds no list of token ids: {error}") from error
    if not all(0 <= one < 2**32 for one in ids):
        raise InvalidArgument(f"{path}: a token id has 32 bits")
    return ids
