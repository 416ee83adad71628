"""``tierkv doctor``: is this machine fit for the daemon, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import config_options, load_config
from tierkv.cli.render import print_json, print_table

if TYPE_CHECKING:
    from tierkv.service.doctor.examine import Diagnosis


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {verdict, findings}.")
@click.option("--fix-lines", is_flag=True, help="Print nothing but the lines that would help.")
def doctor(file: Path | None, overrides: Sequence[str], as_json: bool, fix_lines: bool) -> int:
    """Check whether this machine is fit for the daemon, and say what to do about it.

    \b
    tierkv doctor
    tierkv doctor --config /etc/tierkv/tierkv.toml
    tierkv doctor --fix-lines

    Needs no daemon. Run it as the daemon's user, with the daemon's configuration. Writes a small
    file to measure what a sync costs, and removes it. Exits with 1 if something will not work, 0
    otherwise, also if something could be better.
    """
    config = load_config(file, overrides).config
    facts = import_module("tierkv.service.doctor.gather").gather(config)
    diagnosis: Diagnosis = import_module("tierkv.service.doctor.examine").examine(config, facts)
    if as_json:
        print_json(diagnosis)
    elif fix_lines:
        for line in _fix_lines(diagnosis):
            click.echo(line)
    else:
        _print(diagnosis)
    return Exit.FAILED if diagnosis.verdict == "fail" else Exit.OK


def _fix_lines(diagnosis: Diagnosis) -> list[str]:
    """Each once: several findings may ask for the same."""
    return list(dict.fromkeys(one.fix for one in diagnosis.findings if one.fix))


def _print(diagnosis: Diagnosis) -> None:
    print_table(
        ("verdict", "check", "found"),
        [(one.verdict, one.check, one.found) for one in diagnosis.findings],
    )
    for one in diagnosis.findings:
        if one.fix:
            click.echo(f"\n{one.verdict}: {one.check}: {one.found}")
            click.echo(f"  it means: {one.means}")
            click.echo(f"  to fix:   {one.fix}")
    click.echo()
    click.echo(
        {
            "ok": "Nothing to complain about.",
            "warn": "The daemon will run; what is said above could be better.",
            "fail": "Something will not work: see above.",
        }[diagnosis.verdict]
    )
