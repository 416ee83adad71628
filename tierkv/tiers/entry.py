"""The slot entry: what says which block a slot holds, in RAM slot tables and disk headers alike.

An entry is a fixed-size little-endian struct whose size depends only on the tokens per block:

    offset  size              field
    0       8                 id            64-bit block id, never reused; 0 = the slot is empty
    8       8                 parent        id of the block before it in its chain; 0 = first
    16      8 + 8             hash          chain hash, high and low half
    32      8 + 8             sum           xxh3_128 of the payload; both 0 = not computed yet
    48      8                 extra         xxh3_64 of the extra keys; 0 = none
    56      4                 length        payload bytes; always the pool's block bytes
    60      4                 block_tokens  tokens per block; always the pool's
    64      16                digest        of the namespace; all 0 = the block is not sealed
    80      4 x block_tokens  tokens        token ids
    ...     0 or 4            reserved      zero; keeps the size a multiple of 8
    ...     8                 check         xxh3_64 of all bytes before it

An empty entry is all zeroes, which is no valid entry either: its check would not be 0.

An entry says all that the index knows of a sealed block, so that an index can be made anew from
entries alone (see ``service.rebuild``).

128-bit digests travel as 16 big-endian bytes; their halves are ordinary integers here.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import I64, U8, U32, U64, Bool
from tierkv.errors import InvalidArgument
from tierkv.native.loops import EntryColumns, Slots, loops

DIGEST_BYTES = 16
CHECK_BYTES = 8
OPEN = bytes(DIGEST_BYTES)
"""In place of the digest: the block is not sealed, so it has no name yet."""

Entries = npt.NDArray[np.void]
"""Entries of one pool, shape [n], dtype ``entry_dtype(block_tokens)``."""

Sums = tuple[U64, U64]
"""xxh3_128 of payloads: high halves, low halves, shape [n] each."""

Integers = npt.ArrayLike
"""An integer for all entries, or one integer per entry."""


@functools.cache
def entry_dtype(block_tokens: int) -> np.dtype[np.void]:
    """The dtype of an entry for blocks of ``block_tokens`` tokens."""
    fields: list[tuple[str, str] | tuple[str, str, tuple[int]]] = [
        ("id", "<u8"),
        ("parent", "<u8"),
        ("hash_hi", "<u8"),
        ("hash_lo", "<u8"),
        ("sum_hi", "<u8"),
        ("sum_lo", "<u8"),
        ("extra", "<u8"),
        ("length", "<u4"),
        ("block_tokens", "<u4"),
        ("digest", "u1", (DIGEST_BYTES,)),
        ("tokens", "<u4", (block_tokens,)),
    ]
    if block_tokens % 2:
        fields.append(("reserved", "<u4"))
    fields.append(("check", "<u8"))
    return np.dtype(fields)


def blank_entries(count: int, block_tokens: int) -> Entries:
    """``count`` empty entries."""
    return np.zeros(count, entry_dtype(block_tokens))


def make_entries(
    *,
    ids: npt.NDArray[np.uint64],
    parents: Integers,
    hash_hi: Integers,
    hash_lo: Integers,
    tokens: npt.NDArray[np.uint32],
    length: Integers,
    digest: bytes,
    extra: Integers = 0,
    sum_hi: Integers = 0,
    sum_lo: Integers = 0,
) -> Entries:
    """Entries with their checks set.

    ``ids`` has shape [n], ``tokens`` [n, block_tokens]; ``digest`` is the namespace's, 16 bytes;
    all other arguments are one integer or n. Leave the sum out where the payload may still change.
    """
    entries = blank_entries(len(ids), tokens.shape[1])
    entries["id"] = ids
    entries["parent"] = parents
    entries["hash_hi"] = hash_hi
    entries["hash_lo"] = hash_lo
    entries["sum_hi"] = sum_hi
    entries["sum_lo"] = sum_lo
    entries["extra"] = extra
    entries["length"] = length
    entries["block_tokens"] = tokens.shape[1]
    entries["digest"] = np.frombuffer(digest, np.uint8)
    entries["tokens"] = tokens
    set_checks(entries)
    return entries


def write_entries(
    table: Entries,
    slots: Slots,
    *,
    ids: U64,
    length: int,
    digest: bytes,
    parents: U64 | None = None,
    hash_hi: U64 | None = None,
    hash_lo: U64 | None = None,
    sum_hi: U64 | None = None,
    sum_lo: U64 | None = None,
    extra: U64 | None = None,
    tokens: U32 | None = None,
) -> None:
    """Put entries as ``make_entries`` makes them into slots of a table. Mutates ``table``."""
    if not len(slots):
        return
    words = (ids, parents, hash_hi, hash_lo, sum_hi, sum_lo, extra)
    rows = _as_rows(table)
    block_tokens = table.dtype["tokens"].shape[0]
    loops().write_entries(rows, slots, EntryColumns(words, length, block_tokens, digest, tokens))


def same_content(table: Entries, slots: Slots, tokens: U32, extras: U64) -> Bool:
    """Which slots of a table hold blocks of these tokens and digests of extra keys, shape [n].

    ``tokens``: shape [n, block_tokens], ``extras``: [n]. Looks at nothing else in the entries.
    """
    if not len(slots):
        return np.zeros(0, np.bool_)
    return loops().same_content(_as_rows(table), slots, tokens, extras)


def set_checks(entries: Entries) -> None:
    """Compute every entry's check. Mutates ``entries``."""
    entries["check"] = _checks(entries)


def checks_match(entries: Entries) -> Bool:
    """Which entries are whole and not empty, shape [n]."""
    whole: Bool = (entries["check"] == _checks(entries)) & (entries["id"] != 0)
    return whole


def has_sum(entries: Entries) -> Bool:
    """Which entries know their payload's checksum, shape [n]."""
    known: Bool = (entries["sum_hi"] | entries["sum_lo"]) != 0
    return known


def _checks(entries: Entries) -> U64:
    rows = _as_rows(np.ascontiguousarray(entries))
    return loops().checks(rows[:, : rows.shape[1] - CHECK_BYTES])


def _as_rows(entries: Entries) -> U8:
    """The bytes of contiguous entries, shape [n, bytes of one]; shares their memory."""
    return entries.view(np.uint8).reshape(len(entries), entries.dtype.itemsize)


def payload_sums(payload: U8, slots: Slots) -> Sums:
    """Checksums of the blocks in these slots of ``payload`` ([count, block_bytes]).

    Frees the GIL.
    """
    return split_hashes(loops().checksums(payload, slots).tobytes())


def copy_payload(target: U8, to: Slots, source: U8, at: Slots) -> Sums:
    """Copy blocks from slots of one payload to those of another; checksums of the copies.

    Frees the GIL. No slot is written twice.
    """
    return split_hashes(loops().copy_between(target, to, source, at).tobytes())


def fill_sums(entries: Entries, chosen: I64, sums: Sums) -> None:
    """Let those of the chosen entries that know no sum state theirs. Mutates ``entries``."""
    fresh = ~has_sum(entries)[chosen]
    if not fresh.any():
        return
    filled = entries[chosen[fresh]]
    filled["sum_hi"], filled["sum_lo"] = sums[0][fresh], sums[1][fresh]
    set_checks(filled)
    entries[chosen[fresh]] = filled


def sums_agree(entries: Entries, chosen: I64, sums: Sums) -> Bool:
    """Which of the chosen entries state these sums, shape [len(chosen)]."""
    stated_hi, stated_lo = entries["sum_hi"][chosen], entries["sum_lo"][chosen]
    agree: Bool = (stated_hi == sums[0]) & (stated_lo == sums[1])
    return agree


def split_hashes(hashes: bytes | memoryview) -> tuple[U64, U64]:
    """n x 16 digest bytes as two u64 arrays of shape [n]: high halves, low halves.

    Raises InvalidArgument if the length is not a multiple of 16.
    """
    if len(hashes) % DIGEST_BYTES:
        raise InvalidArgument(
            f"hashes have {len(hashes)} bytes; they must be a multiple of {DIGEST_BYTES}"
        )
    halves = np.frombuffer(hashes, ">u8").reshape(-1, 2)
    return halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)
