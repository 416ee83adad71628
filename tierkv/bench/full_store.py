"""Stores with as many blocks, and with as much in their log, as a daemon can leave."""

from __future__ import annotations

import numpy as np

from tierkv.bench.daemon import Daemon
from tierkv.config.load import load
from tierkv.config.resolve import this_environment
from tierkv.core.ids import I64, Tier
from tierkv.core.records import Kind, Records, blank, join
from tierkv.core.state import PoolShape
from tierkv.service.checkpoint import FRAMES_MAX
from tierkv.service.progress import tell_nobody
from tierkv.service.recovery import recover
from tierkv.service.snapshot import index_changes
from tierkv.service.store import StateDirectory
from tierkv.tiers.sizes import slot_bytes

SHAPE = PoolShape(4096, 16)
LEASE = 1
NOBODY = 1 << 22
"""A process id above every one that Linux gives."""
CHAIN_BLOCKS = 64
"""Of each chain in the index."""

ROWS_AT_WORK = 4096
REQUEST_RECORDS = 7
BLOCKS_AT_ONCE = 1 << 20


def disk_bytes(blocks: int) -> str:
    """The setting of a disk tier with room for twice as many."""
    return str(2 * blocks * slot_bytes(Tier.DISK, SHAPE))


def make_full(daemon: Daemon, blocks: int, records: int = 0) -> None:
    """Give a stopped daemon's store ``blocks`` on disk, in the index, and so many log records.

    The log's work is that of a full cache: each request evicts a block and caches another one in
    its row. Frames are as long as they are when the longest log has the most frames.
    """
    config = load(None, this_environment(), daemon.settings).config
    directory = StateDirectory.open(daemon.state)
    recovered = recover(config, directory, tell_nobody)
    state, writer = recovered.state, recovered.writer
    state.apply(_opening())
    for first in range(0, blocks, BLOCKS_AT_ONCE):
        state.apply(_cached_on_disk(first, min(BLOCKS_AT_ONCE, blocks - first)))
    changes = state.take_changes()
    meta = {"checkpoint_lsn": writer.written_lsn}
    recovered.index.commit(index_changes(state, changes, {}, meta))
    if records:
        work, step = _work(blocks, records), records // FRAMES_MAX + 1
        for at in range(0, records, step):
            writer.append(work[at : at + step].tobytes())
            writer.write()
    recovered.close()
    directory.close()


def _opening() -> Records:
    namespace, lease = blank(1, Kind.NAMESPACE), blank(1, Kind.LEASE_OPEN)
    namespace["hash_hi"], namespace["id"], namespace["loc"] = (
        1,
        SHAPE.block_bytes,
        SHAPE.block_tokens,
    )
    lease["key"], lease["id"] = LEASE, NOBODY
    return join([namespace, lease])


def _sealed(rows: I64, ids: I64) -> Records:
    """SEAL records of blocks that have no parents."""
    sealed = blank(len(rows), Kind.SEAL)
    sealed["key"], sealed["id"], sealed["tier"] = rows, ids, 1
    sealed["hash_hi"] = ids
    # All bits of it, as those of a hash: it says where in the hash table a block is.
    sealed["hash_lo"] = np.random.default_rng(int(ids[0])).integers(0, 2**64, len(ids), np.uint64)
    return sealed


def _cached_on_disk(first: int, blocks: int) -> Records:
    rows = np.arange(first, first + blocks)
    allocated = blank(blocks, Kind.ALLOC)
    allocated["key"], allocated["id"] = rows, rows + 1
    allocated["tier"], allocated["loc"] = Tier.DISK, rows
    sealed = _sealed(rows, rows + 1)
    sealed["loc"] = np.where(rows % CHAIN_BLOCKS, rows, 0)
    return join([allocated, sealed])


def _work(blocks: int, records: int) -> Records:
    """Whole requests, and open leases at the end, shape [records]."""
    count = -(-records // REQUEST_RECORDS)
    requests = blank(count * REQUEST_RECORDS, Kind.EPOCH).reshape(count, REQUEST_RECORDS)
    number = np.arange(count)
    rows, ids, sequences = (
        blocks + number % ROWS_AT_WORK,
        blocks + 1 + number,
        (LEASE << 32) + number,
    )
    opened, found, allocated, pushed, sealed, closed, dropped = requests.T
    opened["type"], opened["id"] = Kind.SEQ_OPEN, sequences
    found["type"], found["id"], found["aux"] = Kind.SEQ_PUSH, sequences, 1
    first = number % blocks // CHAIN_BLOCKS * CHAIN_BLOCKS
    found["hash_hi"] = first
    allocated["type"], allocated["id"], allocated["key"] = Kind.ALLOC, ids, rows
    allocated["loc"] = number % ROWS_AT_WORK
    pushed["type"], pushed["id"], pushed["aux"], pushed["hash_hi"] = (
        Kind.SEQ_PUSH,
        sequences,
        1,
        rows,
    )
    sealed[:] = _sealed(rows, ids)
    sealed["loc"] = first + 1
    closed["type"], closed["id"] = Kind.SEQ_CLOSE, sequences
    dropped["type"], dropped["id"], dropped["key"] = Kind.DROP, ids, rows
    dropped["loc"] = number % ROWS_AT_WORK
    return requests.reshape(-1)[:records]
