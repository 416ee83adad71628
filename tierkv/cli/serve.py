"""``tierkv serve``: loads the configuration and runs the daemon in the foreground."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from tierkv.cli.options import config_options, load_config
from tierkv.config.schema import Config, Setting, settings
from tierkv.config.values import write_value


def _short_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the short flags that the schema names; each arrives under its setting's key."""
    for setting in reversed(settings().values()):
        if setting.flag:
            option = click.option(
                setting.flag, _parameter(setting), metavar="VALUE", help=_help(setting)
            )
            command = option(command)
    return command


def _parameter(setting: Setting) -> str:
    return setting.key.replace(".", "__")


def _help(setting: Setting) -> str:
    default = write_value(setting, setting.default)
    return f"{setting.description}  [{setting.variable}; default: {default}]"


@click.command()
@config_options
@_short_flags
def serve(file: Path | None, overrides: Sequence[str], **short: str | None) -> int:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    \b
    tierkv serve
    tierkv serve --device-bytes 8GiB --disk-bytes 200GiB
    tierkv serve --config tierkv.toml --set wal.durability=power
    """
    given = {
        setting.flag: text
        for setting in settings().values()
        if setting.flag and (text := short.get(_parameter(setting))) is not None
    }

    def read() -> Config:
        return load_config(file, overrides, given).config

    config = read()
    # Imported late: a mistake in the configuration is reported before torch is loaded.
    import_module("tierkv.obs.log").setup(config.log.level, config.log.format)
    return int(import_module("tierkv.service.daemon").run(config, read))
