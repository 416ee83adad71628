"""``tierkv config``: what is set, by whom, and whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import config_options, load_config
from tierkv.cli.render import print_json, print_table
from tierkv.config import docs
from tierkv.config.change import value_of
from tierkv.config.schema import settings
from tierkv.config.values import write_value
from tierkv.errors import ConfigError


@click.group(no_args_is_help=False)
def config() -> None:
    """Show, check or print the configuration.

    \b
    tierkv config show
    tierkv config check --config tierkv.toml
    tierkv config default > tierkv.toml
    """


@config.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {key: {value, origin, live}}.")
def show(file: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Print every setting and where it came from.

    Automatic values are shown as they would be decided now. "on change" says whether a running
    daemon takes a new value over by `tierkv reload`, or needs a restart.
    """
    loaded = load_config(file, overrides)
    values = {key: value_of(loaded.config, setting) for key, setting in settings().items()}
    if as_json:
        print_json(
            {
                key: {"value": values[key], "origin": loaded.origins[key], "live": setting.live}
                for key, setting in settings().items()
            }
        )
        return
    rows = []
    for key, setting in settings().items():
        origin = loaded.origins[key]
        if setting.auto_is and value_of(loaded.written, setting) == setting.auto:
            origin = f"{origin}: automatic"
        on_change = "reload" if setting.live else "restart"
        rows.append((key, write_value(setting, values[key]) or '""', origin, on_change))
    print_table(("key", "value", "from", "on change"), rows)


@config.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {fine, problem}.")
def check(file: Path | None, overrides: Sequence[str], as_json: bool) -> int:
    """Tell what is wrong with the configuration.

    Exits with 78 if anything is.
    """
    try:
        load_config(file, overrides)
    except ConfigError as error:
        if not as_json:
            raise
        print_json({"fine": False, "problem": error.message})
        return Exit.BAD_CONFIG
    if as_json:
        print_json({"fine": True, "problem": ""})
    else:
        click.echo("the configuration is fine")
    return Exit.OK


@config.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: {key: {default, live, description}}."
)
def default(as_json: bool) -> None:
    """Print a file with all defaults, commented out."""
    if as_json:
        print_json(
            {
                key: {
                    "default": "auto" if one.auto_is else one.default,
                    "live": one.live,
                    "description": one.description,
                }
                for key, one in settings().items()
            }
        )
    else:
        click.echo(docs.default_toml(), nl=False)
