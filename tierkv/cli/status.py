"""``tierkv status``: one question to the daemon, shown as tables or as JSON."""

from __future__ import annotations

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec

from tierkv.cli.exit_codes import Exit
from tierkv.cli.options import load_config
from tierkv.cli.render import print_json, print_table
from tierkv.config.paths import SYSTEM_SOCKET
from tierkv.errors import NotReady, ProtocolError, Unavailable
from tierkv.obs.status import SERVING, StatusDocument, from_plain
from tierkv.units import about_bytes, about_duration, format_ratio

TIMEOUT_S = 2.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the status document as JSON.")
@click.option(
    "--socket",
    metavar="PATH",
    help="The daemon's socket; else $TIERKV_SOCKET, that of the configuration, or the system's.",
)
@click.option(
    "--last", is_flag=True, help="Show what the daemon wrote down last, also if it is gone now."
)
def status(as_json: bool, socket: str | None, last: bool) -> int:
    """Show what a running daemon holds and does.

    Exits with 0 if it serves, 75 if it does not yet or no more, 3 if there is none.

    \b
    tierkv status
    tierkv status --json | jq .prefix.hit_ratio
    tierkv status --last
    """
    plain = _read_last() if last else _ask(socket or _find_socket())
    try:
        document = from_plain(plain)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the daemon's status is not understood: {error}") from error
    if as_json:
        print_json(plain)
    else:
        _print(document, "was" if last else "is")
    return Exit.OK if document.state == SERVING else Exit.NOT_READY


def _find_socket() -> str:
    if workers := os.environ.get("TIERKV_SOCKET"):
        return workers
    configured = load_config(None, ()).config.server.socket
    if not Path(configured).exists() and Path(SYSTEM_SOCKET).exists():
        return SYSTEM_SOCKET
    return configured


def _ask(socket: str) -> dict[str, Any]:
    try:
        with import_module("tierkv.client.sync").connect(socket, timeout_s=TIMEOUT_S) as client:
            plain: dict[str, Any] = client.stat()
            return plain
    except (OSError, Unavailable) as error:
        if _somebody_listens(error):
            raise NotReady(
                f"the daemon does not answer yet, it may be recovering ({socket}); try again"
            ) from error
        reason = f"{socket}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise Unavailable(f"{reason}; name another daemon's socket by --socket") from error


def _somebody_listens(error: Exception) -> bool:
    """Whether a process holds the socket that does not serve now."""
    cause = error.__cause__
    return isinstance(cause, NotReady) or (
        cause is not None and isinstance(cause.__cause__, TimeoutError)
    )


def _read_last() -> dict[str, Any]:
    state_dir = Path(load_config(None, ()).config.server.state_dir)
    last_status = import_module("tierkv.service.last_status")
    try:
        content, written_s = last_status.read_last_status(state_dir)
    except OSError as error:
        raise Unavailable(
            f"no daemon has written its status in {state_dir} ({error.strerror}): each does so at "
            "its checkpoints; name another directory by TIERKV_SERVER__STATE_DIR"
        ) from error
    click.echo(f"written {about_duration(time.time() - written_s)} ago", err=True)
    plain: dict[str, Any] = msgspec.json.decode(content)
    return plain


def _print(document: StatusDocument, verb: str) -> None:
    click.echo(
        f"tierkv {document.version} {verb} {document.state}, up {about_duration(document.uptime_s)}"
        f" (pid {document.pid}, epoch {document.epoch}, durability {document.durability})\n"
    )
    print_table(
        ("tier", "capacity", "used", "free", "blocks", "evictable", "state"),
        [
            (
                name,
                about_bytes(tier.capacity_bytes),
                about_bytes(tier.used_bytes),
                format_ratio(tier.free_ratio),
                f"{tier.blocks:,}",
                f"{tier.evictable_blocks:,}",
                tier.state,
            )
            for name, tier in document.tiers.items()
        ],
        numbers=("capacity", "used", "free", "blocks", "evictable"),
    )
    if document.namespaces:
        click.echo()
        print_table(
            ("namespace", "model", "dtype", "block tokens", "block size"),
            [
                (
                    str(namespace.id),
                    namespace.model,
                    namespace.dtype,
                    str(namespace.block_tokens),
                    about_bytes(namespace.block_bytes),
                )
                for namespace in document.namespaces
            ],
            numbers=("namespace", "block tokens", "block size"),
        )
    if document.workers:
        click.echo()
        print_table(
            ("lease", "pid", "worker", "sequences"),
            [
                (str(worker.lease), str(worker.pid), worker.name, f"{worker.sequences:,}")
                for worker in document.workers
            ],
            numbers=("lease", "pid", "sequences"),
        )
    click.echo()
    print_table(("what", "now"), _facts(document))


def _facts(document: StatusDocument) -> list[tuple[str, str]]:
    prefix, wal, recovery = document.prefix, document.wal, document.recovery
    workers = (
        f"{document.connections} connected, {document.leases} leases, "
        f"{document.sequences:,} sequences"
    )
    if document.fenced_blocks:
        workers += f", {document.fenced_blocks:,} blocks kept from use by a worker that hangs"
    evictions = ", ".join(f"{way} {blocks:,}" for way, blocks in document.evictions.items())
    log = (
        f"{about_bytes(wal.bytes)} in {wal.segments} segments, "
        f"lsn {wal.appended_lsn} written, {wal.durable_lsn} durable"
    )
    age_s = document.checkpoint.age_s
    checkpoint = f"{about_duration(age_s)} ago at lsn {document.checkpoint.lsn}"
    recovered = (
        f"{recovery.blocks:,} blocks kept, {recovery.dropped_blocks:,} lost, "
        f"{recovery.records:,} records in {about_duration(recovery.duration_s)}"
    ) + (", the index was lost and made anew" if recovery.rebuilt else "")
    adopted = ", ".join(
        f"{tier} {about_bytes(size)}" for tier, size in recovery.adopted_bytes.items() if size
    )
    loop = (
        f"99.9% of turns within {about_duration(document.loop.turn_p999_s)}, "
        f"the longest {about_duration(document.loop.turn_max_s)}"
    )
    disk = document.tiers.get("disk")
    memory = ", ".join(
        f"{tier} {about_bytes(one.memory_bytes)}"
        + (f" ({about_bytes(one.huge_bytes)} in huge pages)" if one.huge_bytes else "")
        + (f", {about_bytes(one.missing_bytes)} to be taken" if one.missing_bytes else "")
        + (f", {one.numa}" if one.numa else "")
        for tier, one in document.memory.items()
    )
    return [
        ("prefix hits", f"{format_ratio(prefix.hit_ratio)} of the latest tokens"),
        ("since start", f"{prefix.hit_tokens:,} of {prefix.lookup_tokens:,} tokens"),
        ("blocks", f"{document.blocks:,}"),
        ("workers", workers),
        ("evictions", evictions or "none"),
        ("disk reads", (disk.io if disk is not None else "") or "no disk tier"),
        ("log", log),
        ("checkpoint", checkpoint if age_s >= 0 else "none yet"),
        ("event loop", loop),
        ("recovery", recovered),
        ("memory", memory or "none"),
        ("memory kept", adopted or "none"),
        ("native", "yes" if document.native else f"no: {document.native_missing}"),
    ]
