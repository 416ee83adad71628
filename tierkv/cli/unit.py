"""``tierkv unit``: the service's files, shown or put into their places."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierkv.cli import unit_files
from tierkv.cli.exit_codes import Exit
from tierkv.cli.unit_files import Installed
from tierkv.config.load import SYSTEM_FILE
from tierkv.errors import TierkvError

_USER = click.option("--user", is_flag=True, help="For your own service manager, not the system's.")


@click.group(no_args_is_help=False)
def unit() -> None:
    """Show or install the files that make tierkv a systemd service.

    \b
    tierkv unit print
    tierkv unit install --dry-run
    tierkv unit install --drop-in cpu-only
    tierkv unit install --user
    """


@unit.command(name="print", short_help="Print one of the files.")
@click.argument("name", default=unit_files.SERVICE, type=click.Choice(unit_files.NAMES))
@_USER
def print_file(name: str, user: bool) -> int:
    """Print a unit, a drop-in, or the file that makes the daemon's user, as it would be installed.

    \b
    tierkv unit print tierkv.socket
    tierkv unit print cpu-only.conf
    """
    click.echo(unit_files.fitted(name, unit_files.this_command(), user=user), nl=False)
    if not user:
        _warn_if_hidden()
    return Exit.OK


@unit.command(short_help="Put them into their places.")
@_USER
@click.option(
    "--drop-in",
    "drop_ins",
    multiple=True,
    type=click.Choice(unit_files.DROP_INS),
    help="Also this one; may be given several times. See `tierkv unit print NAME.conf`.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@click.option(
    "--root",
    default="/",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Below this directory, for the image of another machine.",
)
@click.option(
    "--command",
    metavar="PATH",
    help="What the units run; else this very tierkv.",
    show_default=False,
)
def install(
    user: bool, drop_ins: tuple[str, ...], dry_run: bool, root: Path, command: str | None
) -> int:
    """Write the units, and tierkv.toml if there is none; then say what to run next.

    \b
    tierkv unit install --dry-run
    tierkv unit install --drop-in cpu-only --drop-in local-only

    It may be run again at any time: what is right already is left alone. Changes of your own
    belong into drop-ins (`systemctl edit tierkv`), for the units are replaced.
    """
    if user and drop_ins:
        raise click.UsageError("the drop-ins are for the system's manager, so not with --user")
    if not user and command is None:
        _refuse_if_hidden()
    ours = command or unit_files.this_command()
    if user:
        files = unit_files.user_files(ours, root, _config_home())
    else:
        files = unit_files.files(ours, drop_ins, root, config=SYSTEM_FILE)
    for file in files:
        click.echo(f"{_put(file, dry_run=dry_run):>12}  {file.path}")
    if not dry_run:
        click.echo("\nNext:" if root == Path("/") else f"\nNext, on the machine that is in {root}:")
        for line in _next_steps(user):
            click.echo(f"  {line}")
    return Exit.OK


def _put(file: Installed, *, dry_run: bool) -> str:
    """Write a file if need be; what was done, or would be."""
    there = file.path.read_text(encoding="utf-8") if file.path.exists() else None
    if there == file.text:
        return "is right"
    if there is not None and file.keep:
        return "stays"
    if not dry_run:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        draft = file.path.with_name(file.path.name + ".new")
        draft.write_text(file.text, encoding="utf-8")
        draft.chmod(0o644)
        draft.replace(file.path)
    done = "write" if there is None else "replace"
    return f"would {done}" if dry_run else {"write": "written", "replace": "replaced"}[done]


def _next_steps(user: bool) -> list[str]:
    units = " ".join(unit_files.UNITS)
    if user:
        return [
            "systemctl --user daemon-reload",
            f"systemctl --user enable --now {units}",
            "loginctl enable-linger    # to have it run while you are not logged in",
        ]
    return [
        "systemd-sysusers",
        "systemctl daemon-reload",
        f"systemctl enable --now {units}",
        "tierkv status",
    ]


def _config_home() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(configured) if configured.startswith("/") else Path.home() / ".config"


def _refuse_if_hidden() -> None:
    if (part := unit_files.hidden_by_the_sandbox()) is not None:
        raise TierkvError(f"{_hidden(part)}, or name what the units shall run by --command")


def _warn_if_hidden() -> None:
    if (part := unit_files.hidden_by_the_sandbox()) is not None:
        click.echo(f"tierkv: {_hidden(part)}", err=True)


def _hidden(part: Path) -> str:
    return (
        f"this tierkv needs {part}, which ProtectHome= hides from the service; install tierkv "
        "elsewhere (in a checkout: python3 -m venv /opt/tierkv && /opt/tierkv/bin/pip install .)"
    )
