"""``tierkv verify``: checks a stopped daemon's store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import config_of_store, store_options
from tierkv.cli.render import print_json, print_table

if TYPE_CHECKING:
    from tierkv.config.schema import Config
    from tierkv.service.verify import VerifyReport

FINDINGS_SHOWN = 20


@click.command()
@store_options
@click.option("--deep", is_flag=True, help="Read all payloads too and compare their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(
    file: Path | None, overrides: Sequence[str], state_dir: str | None, deep: bool, as_json: bool
) -> int:
    """Check the log, the index and the blocks on disk of a stopped daemon. Changes nothing.

    Exits with 0 if all is sound, 4 if there is damage, 75 while a daemon runs.

    \b
    tierkv verify
    tierkv verify --deep --state-dir /var/lib/tierkv
    """
    config = config_of_store(file, overrides, state_dir)
    report = _run(config, deep, show_progress=sys.stderr.isatty() and not as_json)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report)
    return Exit.DAMAGE_FOUND if report.findings else Exit.OK


def _run(config: Config, deep: bool, *, show_progress: bool) -> VerifyReport:
    check: Callable[..., VerifyReport] = import_module("tierkv.service.verify").verify
    if not show_progress:
        return check(config, deep=deep)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("disk slots", total=None)

        def progress(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)

        return check(config, deep=deep, progress=progress)


def _print(report: VerifyReport) -> None:
    print_table(
        ("what", "found"),
        [
            ("blocks", f"{report.blocks:,}"),
            ("sequences", f"{report.sequences:,}"),
            ("log", f"{report.records:,} records behind the checkpoint, end {report.wal_end}"),
            ("disk slots", f"{report.slots_checked:,} checked, {report.slots_damaged:,} damaged"),
            ("verdict", f"{len(report.findings)} findings" if report.findings else "sound"),
        ],
    )
    for finding in report.findings[:FINDINGS_SHOWN]:
        click.echo(f"- {finding}")
    if len(report.findings) > FINDINGS_SHOWN:
        click.echo(f"- and {len(report.findings) - FINDINGS_SHOWN} more (--json lists all)")
