"""``tierkv torture``: kills a daemon under load on one's own disk, and counts what survives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import load_config
from tierkv.cli.render import print_json, print_table
from tierkv.units import about_duration

if TYPE_CHECKING:
    from tierkv.torture.report import Report

MINUTES = 1.0


@click.command()
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="How long.  [default: 1; without end if --kills is given]",
)
@click.option(
    "--kills",
    type=click.IntRange(min=1),
    help="End after so many kills, and one last to check the store.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Chooses prompts, work and moments.")
@click.option(
    "--dir",
    "place",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="PATH",
    help="Directory for the store; else one beside the configured server.state_dir.",
)
@click.option("--workers", default=2, type=click.IntRange(1, 64), help="Worker processes.")
@click.option(
    "--durability",
    type=click.Choice(["kill", "power", "none"]),
    default="kill",
    help="As wal.durability. power: the RAM tiers are lost at every kill, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def torture(
    minutes: float | None,
    kills: int | None,
    seed: int | None,
    place: Path | None,
    workers: int,
    durability: str,
    as_json: bool,
) -> int:
    """Kill a daemon under load, again and again, and count what survives.

    \b
    tierkv torture --minutes 10
    tierkv torture --minutes 10 --durability power --dir /mnt/nvme

    Starts a daemon and workers of its own in a new folder; an existing store is not touched, and
    nothing stays behind. Workers seal, share, fork, spill and resume; kill -9 comes at random
    moments, also while the daemon recovers. Then all that was acknowledged is looked for, every
    byte of it compared. Only real power loss is not tried.

    Exits with 0 if no block was lost or wrong and nothing deleted came back, else with 1; then
    the store stays for inspection. With --durability none blocks may be lost. Ctrl-C ends it
    after a last look; once more, and it ends without.
    """
    from tierkv.torture.place import beside, new_folder, without_settings

    if minutes is None and kills is None:
        minutes = MINUTES
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    if place is None:
        place = beside(Path(load_config(None, ()).config.server.state_dir))
    folder = new_folder(place)
    run = import_module("tierkv.torture.run")
    plan = run.Plan(
        seed=seed,
        durability=durability,
        workers=workers,
        seconds=float("inf") if minutes is None else 60 * minutes,
        kills=float("inf") if kills is None else kills,
    )
    _say(f"seed {seed}, in {folder}; Ctrl-C ends it")
    signals = _Signals()
    with signals.caught():
        one = run.Torture(
            plan,
            folder,
            progress=_say,
            is_stopped=signals.is_stopped,
            pulse=signals.pulse,
            environment=without_settings(os.environ),
        )
        try:
            one.run()
        except KeyboardInterrupt:
            _say("ended without a last look: the latest acknowledgements were not looked for")
        finally:
            if not one.report.failure:
                shutil.rmtree(folder, ignore_errors=True)
    _print(one.report, folder, as_json)
    return Exit.OK if one.report.ok else Exit.FAILED


class _Signals:
    """SIGINT and SIGTERM: the first asks for an end after a last look, the second for one now."""

    def __init__(self) -> None:
        self._came = 0

    def is_stopped(self) -> bool:
        return self._came > 0

    def pulse(self) -> None:
        """Raise KeyboardInterrupt if it shall end now."""
        if self._came > 1:
            raise KeyboardInterrupt

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._come) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _come(self, _number: int, _frame: object) -> None:
        self._came += 1
        if self._came == 1:
            # Not by click, in whose midst this may be.
            os.write(2, b"- ending after a last look\n")


def _say(line: str) -> None:
    click.echo(f"- {line}", file=sys.stderr)


def _print(report: Report, folder: Path, as_json: bool) -> None:
    plain = report.to_plain() | {"kept_in": str(folder) if report.failure else None}
    if as_json:
        print_json(plain)
    else:
        counts = ("acknowledged", "survived", "lost", "wrong", "resurrected")
        median, longest = plain["recovery_median_s"], plain["recovery_max_s"]
        print_table(
            ("what", "count"),
            [
                *((f"blocks {name}", f"{plain[name]:,}") for name in counts),
                ("checksum failures", f"{report.checksum_failures:,}"),
                ("kills", f"{report.kills:,}"),
                ("recoveries", f"{report.recoveries:,}"),
                ("recovery, median", about_duration(median)),
                ("recovery, longest", about_duration(longest)),
                ("stores", f"{report.stores:,}"),
                ("durability", report.durability),
                ("seed", str(report.seed)),
            ],
            numbers=("count",),
        )
        if report.durability == "none" and report.lost:
            click.echo("Durability none promises nothing: blocks may be lost.")
    if report.failure:
        click.echo(
            f"{report.failure}\nThe store stays in {folder}; delete it when you have seen enough.",
            err=True,
        )
