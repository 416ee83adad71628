"""Options that several commands share: which file to read and which settings to override."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tierkv.config.load import Loaded, default_file, load
from tierkv.config.resolve import Environment, Space, this_environment
from tierkv.config.schema import Config
from tierkv.errors import TierkvError

Command = TypeVar("Command", bound=Callable[..., Any])

_PLENTY = 1 << 50


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


def store_options(command: Command) -> Command:
    """Adds ``config_options`` and ``--state-dir``: they choose the store of a stopped daemon."""
    state_dir = click.option(
        "--state-dir", metavar="PATH", help="The store; else that of the configuration."
    )
    return config_options(state_dir(command))


def config_of_store(file: Path | None, overrides: Sequence[str], state_dir: str | None) -> Config:
    """The configuration whose store ``store_options`` chose.

    Raises TierkvError if no store is there, and as ``load_config``.
    """
    config = load_config(file, overrides, {"--state-dir": state_dir} if state_dir else {}).config
    if not (Path(config.server.state_dir) / "FORMAT").exists():
        raise TierkvError(
            f"no store is in {config.server.state_dir}: it has no file FORMAT; "
            "name another directory by --state-dir"
        )
    return config


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


def load_paths() -> Config:
    """The configuration of this process for its paths only: sizes that are automatic are wrong.

    Looks at no file system and imports little, so that whoever asks a daemon need not wait, nor be
    allowed to look into the store. Raises ConfigError.
    """
    environment = Environment(
        uid=os.getuid(),
        variables=dict(os.environ),
        working_dir=os.getcwd(),
        ram_free_bytes=_PLENTY,
        space=lambda _path: Space(_PLENTY, _PLENTY, 0),
    )
    return load(default_file(environment), environment, {}).config


def _recorded_sizes(state_dir: str) -> Mapping[str, int]:
    # Imported late: it needs msgspec's JSON and xxhash, which --help does not.
    from tierkv.service.store import recorded_sizes

    return recorded_sizes(Path(state_dir))
