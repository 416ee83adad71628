"""``tierkv wal``: the log of a stopped daemon's store: shown, measured, checked, repaired."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import config_of_store, store_options
from tierkv.cli.render import print_json, print_table
from tierkv.units import about_bytes

if TYPE_CHECKING:
    from tierkv.service.log_tools import LogEnd, LogStat, RepairPlan

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(no_args_is_help=False)
def wal() -> None:
    """Look at the write-ahead log of a stopped daemon's store, and repair it.

    \b
    tierkv wal stat
    tierkv wal verify --state-dir /var/lib/tierkv
    tierkv wal dump --from-lsn 5000 --limit 100

    All commands lock the store: they exit with 75 while a daemon runs, and with 78 if a newer
    tierkv wrote the log. Only repair changes it.
    """


@wal.command(short_help="Print everything in it, damaged places too.")
@store_options
@_JSON
@click.option("--from-lsn", default=0, type=click.IntRange(min=0), help="Leave out what is before.")
@click.option("--limit", type=click.IntRange(min=1), help="End after so many records.")
def dump(
    file: Path | None,
    overrides: Sequence[str],
    state_dir: str | None,
    as_json: bool,
    from_lsn: int,
    limit: int | None,
) -> int:
    """Print every segment, frame and record, one a line; with --json one JSON object a line.

    A damaged place is printed with its file, byte, lsn and reason. Then the dump goes on behind
    it, at the next intact frame; a daemon would stop there. The last line says how the log ends
    for a daemon. Exits with 0 whatever it finds: see `tierkv wal verify`.
    """
    config = config_of_store(file, overrides, state_dir)
    documents = import_module("tierkv.service.log_dump").dump
    render = _json_line if as_json else _line
    try:
        with _tools().open_log(config) as log:
            for document in documents(log, from_lsn, limit):
                click.echo(render(document))
    except BrokenPipeError:
        # Whoever reads has seen enough. Without this Python complains when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OK


@wal.command(short_help="Print its measures and how it ends.")
@store_options
@_JSON
def stat(file: Path | None, overrides: Sequence[str], state_dir: str | None, as_json: bool) -> int:
    """Print segments, frames and records by kind, the checkpoint, and how the log ends."""
    config = config_of_store(file, overrides, state_dir)
    with _tools().open_log(config) as log:
        found = log.stat()
    if as_json:
        print_json(_plain(found))
    else:
        _print_stat(found)
    return Exit.OK


@wal.command(short_help="Say whether anything durable is missing.")
@store_options
@_JSON
def verify(
    file: Path | None, overrides: Sequence[str], state_dir: str | None, as_json: bool
) -> int:
    """Read the log from its checkpoint to its end and say whether anything durable is missing.

    Exits with 0 if nothing is, 4 if something is missing or damaged. A torn tail, which a crash
    may leave, is no damage.
    """
    config = config_of_store(file, overrides, state_dir)
    with _tools().open_log(config) as log:
        verdict = log.verify()
    if as_json:
        print_json(_plain(verdict))
    else:
        click.echo(
            f"{verdict.records:,} records in {verdict.frames:,} frames behind the checkpoint; "
            + _end_in_words(verdict.end)
        )
        for finding in verdict.findings:
            click.echo(f"- {finding}")
        if verdict.end.kind == "torn" and verdict.unreached_records:
            click.echo(
                f"{verdict.unreached_records:,} intact records lie behind it. Power loss leaves "
                "such; if the machine only lost the process, something damaged the log afterwards."
            )
        if verdict.end.kind == "corrupt":
            click.echo("See `tierkv wal repair` for what can be kept.")
    return Exit.DAMAGE_FOUND if verdict.findings else Exit.OK


@wal.command(short_help="Keep what lies before its damage.")
@store_options
@_JSON
@click.option("--yes", is_flag=True, help="Do it; else only say what would be done.")
def repair(
    file: Path | None,
    overrides: Sequence[str],
    state_dir: str | None,
    as_json: bool,
    yes: bool,
) -> int:
    """Keep what a corrupt log holds before its damage; say what that is and what is lost.

    With --yes it does what the next start of the daemon does by itself: all that was read becomes
    a checkpoint, the old segments move to the store's quarantine, and a new segment begins. Of
    workers that still run the leases end. Run it as the daemon's user and with its configuration.

    Exits with 0 if the log is sound, 4 if it is corrupt and --yes is not given, 5 if it was
    repaired.
    """
    config = config_of_store(file, overrides, state_dir)
    with _tools().open_log(config) as log:
        plan = log.plan_repair()
        done = log.repair() if yes and plan.is_needed else None
    if as_json:
        print_json({"plan": _plain(plan), "done": done and _plain(done)})
    else:
        _print_plan(plan, asked_only=not yes)
        if done is not None:
            click.echo(
                f"Repaired: {done.blocks:,} blocks are kept, {done.dropped_blocks:,} had no copy "
                f"left; {done.leases_closed:,} leases ended."
            )
    if done is not None:
        return Exit.DAMAGE_REPAIRED
    return Exit.DAMAGE_FOUND if plan.is_needed else Exit.OK


def _tools() -> Any:
    return import_module("tierkv.service.log_tools")


def _plain(document: object) -> Any:
    import msgspec

    return msgspec.to_builtins(document)


def _json_line(document: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(document).decode()


def _line(document: dict[str, Any]) -> str:
    """One line of the dump for people."""
    match document:
        case {"what": "segment", "path": path, "epoch": None, "fault": fault}:
            return f"segment {Path(path).name}  {fault}"
        case {"what": "segment", "path": path, "epoch": epoch, "first_lsn": first_lsn}:
            size = about_bytes(document["allocated_bytes"])
            made = _time(document["created_unix_s"])
            name = Path(path).name
            return f"segment {name}  epoch {epoch}, first lsn {first_lsn}, {size}, made {made}"
        case {"what": "frame", "lsn": lsn, "last_lsn": last_lsn}:
            return (
                f"  frame lsn {lsn} .. {last_lsn}  byte {document['offset']}, "
                f"{document['records']} records, flags {document['flags']}, "
                f"durable lsn {document['durable_lsn']}, {_time(document['written_unix_s'])}"
                + ("" if document["is_reached"] else "  (not reached by a daemon)")
            )
        case {"what": "record", "lsn": lsn, "kind": kind, "fields": fields}:
            words = (f"{name}={_value(value)}" for name, value in fields.items())
            return f"    {lsn} {kind} {' '.join(words)}"
        case {"what": "fault", "path": path, "offset": offset, "lsn": lsn, "reason": reason}:
            at = "" if lsn is None else f", lsn {lsn}"
            return f"  ! {Path(path).name} byte {offset}{at}: {reason}"
    return _end_in_words(_tools().LogEnd(**{k: v for k, v in document.items() if k != "what"}))


def _value(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _end_in_words(end: LogEnd) -> str:
    where = f"at byte {end.offset} of {end.path}"
    if end.kind == "clean":
        return f"the log ends at lsn {end.lsn}, clean"
    if end.kind == "torn":
        return (
            f"the log ends at lsn {end.lsn}; behind it lies the torn tail of a crash, which was "
            f"never durable ({where}: {end.reason})"
        )
    return f"the log is corrupt behind lsn {end.lsn}, {where}: {end.reason}"


def _print_stat(found: LogStat) -> None:
    print_table(
        ("segment", "epoch", "first lsn", "last lsn", "used", "allocated", "created"),
        [
            (
                Path(one.file).name,
                str(one.epoch),
                str(one.first_lsn),
                str(one.last_lsn),
                about_bytes(one.used_bytes),
                about_bytes(one.allocated_bytes),
                one.fault or _time(one.created_unix_s),
            )
            for one in found.segments
        ],
        numbers=("epoch", "first lsn", "last lsn", "used", "allocated"),
    )
    click.echo()
    if found.records_by_kind:
        print_table(
            ("record", "count"),
            [(kind, f"{count:,}") for kind, count in found.records_by_kind.items()],
            numbers=("count",),
        )
        click.echo()
    checkpoint = "unknown: the index is damaged or lost"
    if found.checkpoint_lsn is not None:
        behind = about_bytes(found.behind_checkpoint_bytes)
        checkpoint = f"lsn {found.checkpoint_lsn}, {behind} of log behind it"
    print_table(
        ("what", "found"),
        [
            ("directory", found.directory),
            ("frames", f"{found.frames:,}"),
            (
                "records",
                f"{found.records:,}, {found.records_per_frame_mean:.1f} a frame on average",
            ),
            ("largest frame", f"{found.records_per_frame_max:,} records"),
            ("unreached", f"{found.unreached_records:,} intact records behind damage"),
            ("checkpoint", checkpoint),
            ("end", _end_in_words(found.end)),
        ],
    )


def _print_plan(plan: RepairPlan, *, asked_only: bool) -> None:
    if not plan.is_needed:
        click.echo(f"Nothing to repair: {_end_in_words(plan.end)}.")
        return
    click.echo(
        f"{_end_in_words(plan.end)}\n"
        f"kept: the checkpoint and {plan.kept_records:,} records behind it, up to lsn "
        f"{plan.end.lsn}\n"
        f"lost: {plan.lost_records:,} intact records behind the damage, and whatever was damaged\n"
        f"to {plan.quarantine}: {', '.join(Path(path).name for path in plan.segments) or 'nothing'}"
    )
    if asked_only:
        click.echo("Nothing was changed; --yes does it. So does the next start of the daemon.")


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
