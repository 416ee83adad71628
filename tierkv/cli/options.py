"""Options that several commands share: which file to read and which settings to override."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tierkv.config.load import Loaded, default_file, load
from tierkv.config.resolve import this_environment

Command = TypeVar("Command", bound=Callable[..., Any])


def config_options(command: Command) -> Command:
    """Adds ``--config`` (as ``file``) and ``--set`` (as ``overrides``) to a command."""
    override = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Override one setting; may be given several times. See `tierkv config default`.",
    )
    file = click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Configuration file; else $TIERKV_CONFIG, else the user's or the system's one.",
    )
    return file(override(command))


def load_config(
    file: Path | None, overrides: Sequence[str], short_flags: Mapping[str, str] | None = None
) -> Loaded:
    """The configuration of this process; ``short_flags`` ("--socket") win over overrides.

    Raises click.BadParameter for an override without "=", ConfigError for all other problems.
    """
    flags: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise click.BadParameter(f"{override!r} is not SECTION.KEY=VALUE", param_hint="--set")
        flags[key.strip()] = text
    environment = this_environment(_recorded_sizes)
    return load(file or default_file(environment), environment, flags | dict(short_flags or {}))


def _recorded_sizes(state_dir: str) -> Mapping[str, int]:
    # Imported late: it needs msgspec's JSON and xxhash, which --help does not.
    from tierkv.service.store import recorded_sizes

    return recorded_sizes(Path(state_dir))
