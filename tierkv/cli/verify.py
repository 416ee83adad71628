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
@click.option("--repair", is_flag=True, help="Also put right what is found; see above.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(
    file: Path | None,
    overrides: Sequence[str],
    state_dir: str | None,
    deep: bool,
    repair: bool,
    as_json: bool,
) -> int:
    """Check the log, the index and the blocks on disk of a stopped daemon.

    \b
    tierkv verify
    tierkv verify --deep --state-dir /var/lib/tierkv
    tierkv verify --deep --repair

    Changes nothing without --repair. With it, if there is damage, it does what the next start
    would do: it makes a damaged index anew from what the slots say of themselves, and moves it and
    a corrupt log into the store's quarantine. And it forgets the copies on disk that are damaged.
    Run it as the daemon's user. If systemd keeps the daemon's memory, what is only there is
    forgotten as well.

    Exits with 0 if all is sound or put right, 4 if there is damage, 75 while a daemon runs, 78 if
    a newer tierkv wrote the log.
    """
    config = config_of_store(file, overrides, state_dir)
    report = _run(config, deep, repair, show_progress=sys.stderr.isatty() and not as_json)
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report)
    return Exit.DAMAGE_FOUND if report.findings and not report.repaired else Exit.OK


def _run(config: Config, deep: bool, repair: bool, *, show_progress: bool) -> VerifyReport:
    check: Callable[..., VerifyReport] = import_module("tierkv.service.verify").verify
    if not show_progress:
        return check(config, deep=deep, repair=repair)
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("opening the store", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total or None)

        return check(config, deep=deep, repair=repair, progress=progress)


def _verdict(report: VerifyReport) -> str:
    if not report.findings:
        return "sound"
    count = len(report.findings)
    found = "1 finding" if count == 1 else f"{count:,} findings"
    return found + (", put right" if report.repaired else "")


def _log(report: VerifyReport) -> str:
    if report.wal_end == "set aside":
        return "set aside with the index"
    return f"{report.records:,} records behind the checkpoint, end {report.wal_end}"


def _print(report: VerifyReport) -> None:
    print_table(
        ("what", "found"),
        [
            ("blocks", f"{report.blocks:,}"),
            ("sequences", f"{report.sequences:,}"),
            ("log", _log(report)),
            ("disk slots", f"{report.slots_checked:,} checked, {report.slots_damaged:,} damaged"),
            ("verdict", _verdict(report)),
        ],
    )
    for finding in report.findings[:FINDINGS_SHOWN]:
        click.echo(f"- {finding}")
    if len(report.findings) > FINDINGS_SHOWN:
        click.echo(f"- and {len(report.findings) - FINDINGS_SHOWN} more (--json lists all)")
    if report.findings and not report.repaired:
        click.echo("To put it right: tierkv verify --repair, with the same options.")
