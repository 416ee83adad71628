"""``tierkv bench``: how fast a daemon is on one's own machine, against what the machine can do."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import load_config
from tierkv.units import GiB

if TYPE_CHECKING:
    from tierkv.bench.harness import Bench

WORKLOADS = (
    *("rpc", "lookup", "put", "get", "promote", "spill", "replay", "growth", "mixed"),
    "attention",
)
"""As in ``tierkv.bench.suite``, which is not imported for ``--help``."""

ALL = "all"
NEEDED_BYTES = 4 * GiB
NEEDED_BYTES_QUICK = GiB


@click.command()
@click.argument(
    "workloads",
    nargs=-1,
    required=True,
    type=click.Choice([*WORKLOADS, ALL]),
    metavar="WORKLOAD...",
)
@click.option("--json", "as_json", is_flag=True, help="Print all rounds of all lines as JSON.")
@click.option("--quick", is_flag=True, help="Small sizes, 2 rounds: does it run? No numbers.")
@click.option("--full", is_flag=True, help="Also 16 million blocks, and 10 minutes of mixed load.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1, max=1000),
    help="What a line is the median of.  [default: 5; 2 if --quick]",
)
@click.option(
    "--dir",
    "place",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="PATH",
    help="Measure the disk on this file system; else on that of the configured server.state_dir.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="PATH",
    help="Run the daemons under cProfile and leave what it finds there. No numbers.",
)
def bench(
    workloads: tuple[str, ...],
    as_json: bool,
    quick: bool,
    full: bool,
    rounds: int | None,
    place: Path | None,
    profile: Path | None,
) -> int:
    """Measure a daemon of its own against what this machine can do.

    \b
    tierkv bench all                      everything; half an hour
    tierkv bench rpc lookup               some workloads
    tierkv bench spill --dir /mnt/nvme    on that disk
    tierkv bench all --json > result.json

    \b
    rpc        round trips that do nothing; chain hashes in the worker
    lookup     8,192 hashes among a million; which of 1,024 keys exist
    put        by copy, durably, in tiny blocks, on fresh memory, by 8 workers at once
    get        by copy, one block, without a copy, by 8 workers at once; attaching
    promote    from host memory and from disk to the device tier
    spill      from memory to disk, synced
    replay     start after kill -9, and how fast log and slots are read
    growth     the same requests with ten thousand and with a million cached blocks
    mixed      answers while the disk is busy
    attention  paged attention on all cores, against reading its memory and torch's own
    all        all of them

    Each line is a median of rounds, beside ceilings and peers that were measured in the same
    rounds: 0.5x = half as fast. "ok" or "below" says whether it reaches the bar set for it.
    docs/BENCHMARKS.md explains every line. No existing store is touched; memory and disk are
    given back at the end.

    Exits with 0 when all was measured, whether or not every bar is reached, with 4 if a block
    came back with a wrong byte, and with 1 if something else fails.
    """
    suite, report = import_module("tierkv.bench.suite"), import_module("tierkv.bench.report")
    chosen = [name for name in WORKLOADS if name in workloads or ALL in workloads]
    with _bench(place, quick=quick, full=full, rounds=rounds, profile=profile) as found:
        document = report.document(report.describe_machine(found.folder), found)
        # With --json standard output is the document's alone.
        click.echo(report.main_line(document), err=as_json)
        for name in chosen:
            for line in suite.run(name, found):
                document.lines.append(line)
                click.echo(report.render(line), err=as_json)
    if as_json:
        click.echo(report.to_json(document), nl=False)
    return Exit.OK


@contextmanager
def _bench(
    place: Path | None, *, quick: bool, full: bool, rounds: int | None, profile: Path | None
) -> Iterator[Bench]:
    """A folder to measure in, which goes at the end, as do all processes."""
    from tierkv.bench.harness import Bench
    from tierkv.bench.suite import ROUNDS, ROUNDS_QUICK
    from tierkv.torture.place import beside, new_folder

    if place is None:
        place = beside(Path(load_config(None, ()).config.server.state_dir))
    folder = new_folder(place, "bench", NEEDED_BYTES_QUICK if quick else NEEDED_BYTES)
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield Bench(
            folder,
            quick=quick,
            full=full,
            rounds=rounds or (ROUNDS_QUICK if quick else ROUNDS),
            profile=profile,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(_number: int, _frame: object) -> None:
    # Every ``with`` ends on the way out, and with it every daemon.
    raise KeyboardInterrupt
