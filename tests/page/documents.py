"""Test support: status documents of daemons in several states, and an exporter that shows them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tierkv.core.counters import NEW_BLOCKS, REASONS, SPILL
from tierkv.obs.exporter import Exporter
from tierkv.obs.history import History
from tierkv.obs.status import (
    CheckpointStatus,
    EvictionStatus,
    HeldStatus,
    NamespaceStatus,
    PrefixStatus,
    ProblemStatus,
    ProgressStatus,
    RecoveryStatus,
    StatusDocument,
    TierStatus,
    TopPrefixStatus,
    WalStatus,
    WorkerStatus,
    to_plain,
)
from tierkv.units import GiB, MiB

EVIL = "<img src=x onerror=\"document.title='pwned'\">"
UPTIME_S = 3 * 3600 + 300.0


def busy(at_s: float = UPTIME_S) -> StatusDocument:
    """A daemon that has served some hours of work with its rush hours."""
    # Work that swells and ebbs every twenty minutes; it never goes backward.
    waves = int(10 * (at_s + 0.8 * 190 * (1 - math.cos(at_s / 190))))
    lookup = 300 * waves + int(310 * (at_s + 310 * (1 - math.cos(at_s / 310))))
    host, disk = 61 * waves, 19 * waves
    device = int(135 * waves * min(1.0, 0.4 + at_s / 9000))
    return StatusDocument(
        version="0.1.0",
        state="serving",
        epoch=7,
        pid=4711,
        uptime_s=at_s,
        native=True,
        blocks=61_204,
        only_in_ram_blocks=38,
        behind_blocks=12,
        sequences=318,
        leases=3,
        connections=3,
        tiers={
            "device": _tier(16 * GiB, 0.97, 7_944, 6_811),
            "host": _tier(8 * GiB, 0.99, 4_055, 4_055),
            "disk": _tier(200 * GiB, 0.61, 61_166, 60_012, io="io_uring, direct"),
        },
        prefix=PrefixStatus(
            lookup_tokens=lookup,
            hit_tokens=device + host + disk,
            hit_ratio=0.716,
            hit_tokens_by_tier={"device": device, "host": host, "disk": disk},
        ),
        top_prefixes=[
            TopPrefixStatus(
                hash=f"{k * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128:032x}",
                namespace=space,
                **hits,
            )
            for k, (space, hits) in enumerate(
                [
                    (1, {"hits": 51_200, "hit_tokens": 9_830_400}),
                    (2, {"hits": 30_112, "hit_tokens": 4_101_000}),
                    (1, {"hits": 8_004, "hit_tokens": 811_000, "error_tokens": 9_000}),
                ],
                start=1,
            )
        ],
        evicted=[
            _evicted("device", "host", NEW_BLOCKS, waves),
            _evicted("host", "disk", SPILL, waves * 7 // 9),
            _evicted("disk", "none", SPILL, waves // 9),
        ],
        wal=WalStatus(
            appended_lsn=1_204_554,
            written_lsn=1_204_554,
            durable_lsn=1_203_901,
            since_checkpoint_bytes=11 * MiB,
            bytes=190 * MiB,
            segments=2,
        ),
        checkpoint=CheckpointStatus(lsn=1_190_000, age_s=12.4),
        recovery=RecoveryStatus(duration_s=0.84, records=51_300, blocks=58_930),
        namespaces=[
            _namespace(1, "Qwen3-32B", "search", 41_800, (9.1, 5.2, 84.0)),
            _namespace(2, "Qwen3-32B", "chat", 15_204, (5.9, 2.1, 31.5)),
            _namespace(3, "Llama-3.1-8B-Instruct", "", 4_200, (0.6, 0.5, 6.4)),
        ],
        workers=[
            WorkerStatus(lease=12, pid=5120, name="vllm-0", sequences=211),
            WorkerStatus(lease=13, pid=5121, name="vllm-1", sequences=104),
            WorkerStatus(lease=19, pid=6006, name="indexer", sequences=3),
        ],
        problems=[
            ProblemStatus(
                time_s=time.time() - 900,
                level="warning",
                logger="tierkv.service.journal",
                message="the log took 412 ms to sync",
                fields={"lsn": "1188204"},
                count=3,
            )
        ],
    )


def degraded() -> StatusDocument:
    """Its disk does not take blocks any more."""
    document = busy()
    document.tiers["disk"].state = "failed"
    document.behind_blocks, document.only_in_ram_blocks = 2_311, 2_349
    document.problems.insert(
        0,
        ProblemStatus(
            time_s=time.time() - 4,
            level="error",
            logger="tierkv.service.engine",
            message="the disk tier is out of service: No space left on device",
            fields={"tier": "disk"},
            count=17,
        ),
    )
    return document


def recovering(done: int = 420_000) -> StatusDocument:
    """It reads what the slots say."""
    progress = ProgressStatus(
        what="reading slot headers", done=done, total=1_000_000, elapsed_s=8.4
    )
    return StatusDocument(
        version="0.1.0", state="recovering", pid=4711, uptime_s=9.1, progress=progress
    )


def past() -> History:
    """What the page of the busy daemon finds when it is opened."""
    history = History()
    for second in range(10, int(UPTIME_S), 10):
        history.keep(busy(float(second)))
    return history


class Shown:
    """What an exporter on a thread of its own shows; replace it as you like."""

    def __init__(self, document: StatusDocument, history: History) -> None:
        self.document = document
        self.history = history
        self.url = ""

    def plain(self) -> dict[str, Any]:
        return to_plain(self.document)


@contextmanager
def showing(
    document: StatusDocument, history: History | None = None, *, unix_socket: str = ""
) -> Iterator[Shown]:
    """The real exporter on a free port, and on a Unix socket if one is named."""
    shown = Shown(document, history or History())
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        exporter = Exporter(
            exposition=lambda _accept: (b"", "text/plain"),
            status=shown.plain,
            history=lambda: shown.history.plain(),
            state=lambda: shown.document.state,
        )
        await exporter.start(tcp="127.0.0.1:0", socket=unix_socket)
        shown.url = f"http://127.0.0.1:{exporter.tcp_port}/"
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await exporter.close()

    task = loop.create_task(serve())

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield shown
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _evicted(from_tier: str, to_tier: str, reason: str, blocks: int) -> EvictionStatus:
    return EvictionStatus(
        from_tier=from_tier, to_tier=to_tier, reason=reason, blocks=blocks, why=REASONS[reason]
    )


def _tier(capacity: int, share: float, blocks: int, evictable: int, io: str = "") -> TierStatus:
    return TierStatus(
        capacity_bytes=capacity,
        used_bytes=int(capacity * share),
        blocks=blocks,
        free_ratio=1 - share,
        evictable_blocks=evictable,
        io=io,
    )


def _namespace(
    number: int, model: str, tenant: str, blocks: int, held_gib: tuple[float, float, float]
) -> NamespaceStatus:
    tiers = {
        tier: HeldStatus(blocks=int(gib * GiB / (2 * MiB)), bytes=int(gib * GiB))
        for tier, gib in zip(("device", "host", "disk"), held_gib, strict=True)
    }
    return NamespaceStatus(
        id=number,
        model=model,
        dtype="bfloat16",
        block_tokens=16,
        block_bytes=2 * MiB,
        tenant=tenant,
        blocks=blocks,
        tiers=tiers,
        lookup_tokens=300 * blocks,
        hit_tokens=(180 + 10 * number) * blocks,
    )
