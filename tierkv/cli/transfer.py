"""The work of ``tierkv export`` and ``tierkv import``, apart: it needs a worker's imports."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiofiles
import aiofiles.os
import click

from tierkv.client import aio
from tierkv.client.warm_set import Exported, Imported, Importer, export
from tierkv.rpc.messages import Selector

PIPE = "-"
READ_BYTES = 4 << 20
STEP_BLOCKS = 1000
CONNECT_S = 5.0


async def export_to(file: str, selector: Selector, socket_path: str) -> Exported:
    """Write a warm set to a file, which is there when it is whole, or to standard output."""
    async with _connecting(socket_path, "export") as client:
        if file == PIPE:
            async with aiofiles.open(sys.stdout.fileno(), "wb", closefd=False) as out:
                return await _write(client, selector, out)
        draft = f"{file}.part"
        try:
            async with aiofiles.open(draft, "wb") as out:
                counts = await _write(client, selector, out)
                await asyncio.to_thread(os.fsync, out.fileno())
            await aiofiles.os.replace(draft, file)
        except BaseException:
            with suppress(FileNotFoundError):
                await aiofiles.os.remove(draft)
            raise
    return counts


async def import_from(file: str, socket_path: str) -> Imported:
    """Cache a warm set from a file or from standard input. Raises CorruptionError."""
    source = sys.stdin.fileno() if file == PIPE else file
    name = "standard input" if file == PIPE else file
    async with (
        aiofiles.open(source, "rb", closefd=file != PIPE) as data,
        _connecting(socket_path, "import") as client,
    ):
        importer = Importer(client, name, _shown_progress())
        while part := await data.read(READ_BYTES):
            await importer.take(part)
        await importer.finish()
    return importer.counts


def _connecting(socket_path: str, what: str) -> aio.Connecting:
    """A worker that reads or writes blocks."""
    return aio.connect(socket_path, timeout_s=CONNECT_S, name=f"tierkv {what}", populate=False)


async def _write(client: aio.Client, selector: Selector, out: Any) -> Exported:
    counts = Exported()
    async for data in export(client, selector, counts, _shown_progress()):
        await out.write(data)
    await out.flush()
    return counts


def _shown_progress() -> Callable[[int], None]:
    """Counts blocks for a person who watches; says nothing to anybody else."""
    shown = 0

    def show(blocks: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and blocks - shown >= STEP_BLOCKS:
            shown = blocks
            click.echo(f"\r{blocks:,} blocks", nl=False, err=True)

    return show
