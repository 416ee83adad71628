"""``tierkv stat``: one line per interval, for logs and pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import click
import msgspec

from tierkv.cli.ask import Daemon, socket_option
from tierkv.cli.exit_codes import Exit
from tierkv.cli.interval import Interval
from tierkv.cli.rates import Rates, between
from tierkv.errors import NotReady, Unavailable
from tierkv.obs.status import TIERS, StatusDocument
from tierkv.units import about_bytes, format_ratio

LINES_PER_HEADER = 20
"""On a terminal the header comes again after so many lines."""

_COLUMNS = (
    ("time", 8),
    ("state", 10),
    *((tier, 6) for tier in TIERS),
    ("hit", 6),
    ("lookup/s", 9),
    ("saved/s", 9),
    ("evict/s", 8),
    ("gone/s", 7),
    ("log/s", 9),
    ("lag", 6),
    ("sequences", 9),
    ("workers", 7),
)


class StatLine(msgspec.Struct, kw_only=True):
    """One line of ``tierkv stat --json``; see ``rates`` for what is counted per second.

    ``state`` is "away" and the rest is at its default while no daemon answers. ``used_ratio``: how
    full each tier is. ``lag_records`` are in the log's buffer, not yet written.
    """

    time_s: float
    state: str
    used_ratio: dict[str, float] = {}
    rates: Rates | None = None
    lag_records: int = 0
    only_in_ram_blocks: int = 0
    sequences: int = 0
    workers: int = 0


@click.command()
@click.argument("interval", type=Interval(), default=1.0)
@click.argument("count", type=click.IntRange(min=1), required=False)
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line.")
def stat(interval: float, count: int | None, socket: str | None, as_json: bool) -> int:
    """Print one line of rates every INTERVAL seconds, COUNT times or for ever.

    \b
    tierkv stat
    tierkv stat 10 6
    tierkv stat --json | jq .rates.hit_ratio

    A daemon that goes away is shown as such, and followed when it is back. Exits with 3 if there is
    none at the start.
    """
    with suppress(KeyboardInterrupt):
        for number, line in enumerate(_follow(Daemon.find(socket), interval)):
            if as_json:
                click.echo(msgspec.json.encode(line))
            else:
                if number == 0 or (sys.stdout.isatty() and number % LINES_PER_HEADER == 0):
                    click.echo(header())
                click.echo(text(line))
            sys.stdout.flush()
            if number + 1 == count:
                break
    return Exit.OK


def _follow(daemon: Daemon, interval_s: float) -> Iterator[StatLine]:
    """A line after every interval. Raises Unavailable, NotReady if nobody answers at the start."""
    before: StatusDocument | None = daemon.document()
    next_s = time.monotonic()
    while True:
        next_s += interval_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        try:
            now = daemon.document()
        except (Unavailable, NotReady):
            before = None
            yield StatLine(time_s=time.time(), state="away")
            continue
        yield line_of(before or now, now)
        before = now


def line_of(before: StatusDocument, now: StatusDocument) -> StatLine:
    """What is to be told of two looks at the daemon."""
    return StatLine(
        time_s=time.time(),
        state=now.state,
        used_ratio={
            name: tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
            for name, tier in now.tiers.items()
        },
        rates=between(before, now),
        lag_records=now.wal.appended_lsn - now.wal.written_lsn,
        only_in_ram_blocks=now.only_in_ram_blocks,
        sequences=now.sequences,
        workers=len(now.workers),
    )


def header() -> str:
    """The names of the columns."""
    return _row([name for name, _ in _COLUMNS])


def text(line: StatLine) -> str:
    """The line as columns that are as wide as the header's."""
    at = time.strftime("%H:%M:%S", time.localtime(line.time_s))
    rates = line.rates
    if rates is None:
        return _row([at, line.state, *["-"] * (len(_COLUMNS) - 2)])
    return _row(
        [
            at,
            line.state,
            *(format_ratio(line.used_ratio.get(tier, 0.0)) for tier in TIERS),
            format_ratio(rates.hit_ratio) if rates.hit_ratio >= 0 else "-",
            f"{rates.lookup_tokens:.0f}",
            f"{sum(rates.hit_tokens.values()):.0f}",
            f"{rates.evicted_blocks:.0f}",
            f"{rates.dropped_blocks:.0f}",
            about_bytes(rates.log_bytes),
            f"{line.lag_records}",
            f"{line.sequences}",
            f"{line.workers}",
        ]
    )


def _row(cells: list[str]) -> str:
    first, *others = [
        cell.rjust(width) if k > 1 else cell.ljust(width)
        for k, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    ]
    return " ".join([first, *others])
