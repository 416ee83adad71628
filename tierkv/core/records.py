"""The logical records: what happened, in 64 bytes each.

Live operation feeds arrays of these records to ``state.apply``, recovery to ``replay``. The log
stores them as they are; ``wal/FORMAT.md`` describes the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError

RECORD = np.dtype(
    [
        ("type", "u1"),
        ("tier", "u1"),
        ("aux", "<u2"),
        ("key", "<u4"),
        ("id", "<u8"),
        ("hash_hi", "<u8"),
        ("hash_lo", "<u8"),
        ("loc", "<u8"),
        ("gen", "<u8"),
        ("extra_hi", "<u8"),
        ("extra_lo", "<u8"),
    ]
)
"""One record. Which field means what depends on the type; see ``Kind``."""

ROWS_PER_PUSH = 12
"""Block rows that fit the 48 bytes of a PUSH record behind its id."""

SKIPPED_FROM = 128
"""From this type on a reader skips what it does not know. Below, it must know the type."""

Records = npt.NDArray[np.void]
U8 = npt.NDArray[np.uint8]


class Kind(IntEnum):
    """Record types. Those below SKIPPED_FROM a reader must know."""

    LEASE_OPEN = 1
    """key = lease, extra = token, id = worker pid, gen = its start time (clock ticks), loc = uid"""
    LEASE_CLOSE = 2
    """key = lease; ends all its sequences"""
    NAMESPACE = 3
    """key = namespace, hash = digest, id = block bytes, loc = block tokens"""
    SEQ_OPEN = 4
    """id = sequence, key = namespace"""
    SEQ_PUSH = 5
    """id = sequence, aux = count, then `count` block rows (u32) in hash, loc, gen and extra"""
    SEQ_SWAP = 6
    """id = sequence, loc = index in its table, key = the row that takes the place"""
    SEQ_TRUNCATE = 7
    """id = sequence, loc = blocks that stay"""
    SEQ_CLOSE = 8
    """id = sequence"""
    SEQ_SUSPEND = 9
    """id = sequence; no worker maps its blocks"""
    SEQ_RESUME = 10
    """id = sequence; its blocks are in the device tier and mapped again"""
    ALLOC = 11
    """key = row, id = block, aux = namespace, tier and loc = its first copy"""
    SEAL = 12
    """key = row, id = block, hash = chain hash, extra = payload xxh3_128, loc = parent block,
    gen = xxh3_64 of the extra keys, tier = 1 if the hash index shall point to it"""
    PLACE = 13
    """key = row, id = block, tier and loc = a new readable copy, extra = payload xxh3_128"""
    DROP = 14
    """key = row, id = block, tier and loc = a copy that is gone"""
    EPOCH = 15
    """id = epoch (daemon incarnation)"""
    SEQ_FENCE = 16
    """id = sequence; it ends, but keeps the unsealed blocks that its worker may still write into"""
    DELETE = 17
    """key = row, id = block; nobody finds it any more, and it is gone once no sequence holds it"""


def require_known(kinds: U8) -> None:
    """Raise ConfigError if one of these types (shape [n]) must be known and is not.

    A newer version wrote it, so it is no damage.
    """
    strange = kinds[(kinds < SKIPPED_FROM) & ~np.isin(kinds, list(Kind))]
    if len(strange):
        raise ConfigError(
            f"the log has records of type {strange[0]}, so it is of a newer tierkv: use that one, "
            "or move the state directory aside"
        )


def blank(count: int, kind: Kind) -> Records:
    """``count`` zeroed records of one type, shape [count], dtype RECORD."""
    records = np.zeros(count, RECORD)
    records["type"] = kind
    return records


def join(parts: Sequence[Records]) -> Records:
    """All records of the parts, in order."""
    # As bytes: numpy concatenates structured arrays field by field, many times slower.
    whole = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])
    return whole.view(RECORD)


def of_copies(
    kind: Kind,
    tier: int,
    rows: npt.NDArray[np.int64],
    ids: npt.NDArray[np.uint64],
    slots: npt.NDArray[np.integer[Any]],
) -> Records:
    """PLACE or DROP records for the copies of blocks in the tier's slots (all shape [n])."""
    records = blank(len(rows), kind)
    records["key"] = rows
    records["id"] = ids
    records["tier"] = tier
    records["loc"] = slots
    return records


def push(sequence: int, rows: npt.NDArray[np.uint32]) -> Records:
    """PUSH records that append ``rows`` (shape [n], u32) to a sequence's table."""
    count = -(-len(rows) // ROWS_PER_PUSH)
    records = blank(count, Kind.SEQ_PUSH)
    records["id"] = sequence
    padded = np.zeros((count, ROWS_PER_PUSH), "<u4")
    padded.reshape(-1)[: len(rows)] = rows
    records["aux"] = ROWS_PER_PUSH
    if count:
        records["aux"][-1] = len(rows) - (count - 1) * ROWS_PER_PUSH
    records.view("<u4").reshape(count, 16)[:, 4:16] = padded
    return records


def pushed_rows(records: Records) -> npt.NDArray[np.uint32]:
    """The rows carried by a run of PUSH records, in order (shape [n], u32)."""
    words = records.view("<u4")
    if len(records) == 1:
        return words[4 : 4 + int(records["aux"][0])]
    table = words.reshape(len(records), 16)[:, 4:16]
    counts = records["aux"].astype(np.int64)
    mask = np.arange(ROWS_PER_PUSH)[None, :] < counts[:, None]
    return table[mask]
