"""State to index values and back: what a checkpoint stores beside the block rows."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np

from tierkv.core.blocks import INDEXED
from tierkv.core.ids import Tier
from tierkv.core.state import Changes, Lease, PoolShape, Sequence, State
from tierkv.errors import require
from tierkv.tiers.index import BlockRows, IndexChanges, IndexContents

_LEASE = struct.Struct("<16sQQI")
_NAMESPACE = struct.Struct("<16sIQI")
_SEQUENCE = struct.Struct("<II")
_SUSPENDED, _FENCED = 1, 2


def index_changes(
    state: State, changes: Changes, specs: Mapping[int, bytes], meta: Mapping[str, int | bytes]
) -> IndexChanges:
    """The changes of the state in the index's terms. ``specs``: namespace -> spec as JSON."""
    return IndexChanges(
        rows=changes.rows.astype(np.uint32),
        values=state.blocks.export(changes.rows),
        deleted_rows=changes.freed_rows.astype(np.uint32),
        sequences={
            one: _pack_sequence(state.sequences[one]) if one in state.sequences else None
            for one in changes.sequences
        },
        leases={
            one: _pack_lease(state.leases[one]) if one in state.leases else None
            for one in changes.leases
        },
        namespaces={
            one: _pack_namespace(state, one) + specs.get(one, b"") for one in changes.namespaces
        },
        meta={
            **meta,
            "next_block": state.next_block,
            "next_lease": state.next_lease,
            "epoch": state.epoch,
            **{f"{tier.label}_bytes": state.budgets[tier] for tier in Tier},
        },
    )


def restore(state: State, contents: IndexContents, parts: Iterable[BlockRows]) -> dict[int, bytes]:
    """Fill an empty state from the last checkpoint; returns the specs. Mutates the state.

    ``parts`` are all of its blocks; none is kept.
    """
    specs: dict[int, bytes] = {}
    for namespace, value in sorted(contents.namespaces.items()):
        digest, pool, block_bytes, block_tokens = _NAMESPACE.unpack_from(value)
        # Pools are numbered in the order in which their first namespace came.
        state.add_namespace(namespace, digest, PoolShape(block_bytes, block_tokens))
        require(state.namespaces[namespace].pool == pool, "a checkpoint's pools are out of order")
        specs[namespace] = value[_NAMESPACE.size :]
    blocks = state.blocks
    for part in parts:
        rows = part.rows.astype(np.int64)
        blocks.restore(rows, part.values)
        state.row_set.take(rows)
    for tier in Tier:
        for pool, members in state.by_pool(state.rows_in(tier)):
            state.slots[tier, pool].take(blocks.slot[tier][members].astype(np.int64))
    indexed = np.flatnonzero(blocks.flags & INDEXED)
    state.index.put(indexed, blocks.hash_hi, blocks.hash_lo)
    for lease, value in contents.leases.items():
        token, pid, start_time, uid = _LEASE.unpack(value)
        state.add_lease(Lease(lease, token, pid, start_time, uid))
    for identity, value in contents.sequences.items():
        _restore_sequence(state, identity, value)
    state.next_block = int(contents.meta.get("next_block", 1))
    state.next_lease = max(state.next_lease, int(contents.meta.get("next_lease", 1)))
    state.epoch = int(contents.meta.get("epoch", 0))
    return specs


def _pack_sequence(sequence: Sequence) -> bytes:
    rows = sequence.rows.astype("<u4").tobytes()
    flags = _SUSPENDED * sequence.suspended | _FENCED * sequence.fenced
    return _SEQUENCE.pack(sequence.namespace, flags) + rows


def _restore_sequence(state: State, identity: int, value: bytes) -> None:
    namespace, flags = _SEQUENCE.unpack_from(value)
    sequence = Sequence(identity, namespace, bool(flags & _SUSPENDED), bool(flags & _FENCED))
    rows = np.frombuffer(value, "<u4", offset=_SEQUENCE.size)
    sequence.push(rows)
    state.add_sequence(sequence)
    state.blocks.refs[rows] += 1
    if not sequence.suspended:
        state.blocks.active[rows] += 1


def _pack_lease(lease: Lease) -> bytes:
    return _LEASE.pack(lease.token, lease.pid, lease.start_time, lease.uid)


def _pack_namespace(state: State, namespace: int) -> bytes:
    entry = state.namespaces[namespace]
    shape = state.pools[entry.pool]
    return _NAMESPACE.pack(entry.digest, entry.pool, shape.block_bytes, shape.block_tokens)
