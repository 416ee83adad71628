"""The loops over blocks that are worth C: one interface, in Python and native.

Both do the same to the last bit, and check the same. Pools and rows are u8 matrices [rows, bytes]
whose rows are contiguous; between rows there may be gaps. An engine's blocks may also lie in pages
(``native.pages``).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.core import prefix
from tierkv.core.ids import U8, U32, U64, Bool
from tierkv.core.structures import Structures
from tierkv.errors import require
from tierkv.native import directory, reading
from tierkv.native.core import structures
from tierkv.native.library import Library, NoLibrary, load
from tierkv.native.memory import LastingAddresses, address
from tierkv.native.pages import PagedBlocks, Rows, block_bytes_of, described
from tierkv.native.reading import Readable

DIGEST_BYTES = 16
CHECKED_MIN = 17
EXTRA_BYTES = 8
CHECK_BYTES = 8
EXTRA_AT = 6
"""The word of an entry that is the digest of its extra keys."""
TOKENS_AT = 20
"""The first 32-bit word of an entry that is a token."""
ENTRY_WORDS = 7
U32_BYTES = 4
QUICK_BYTES_MAX = 256 << 10
"""To read more than this is worth giving the GIL away for."""
IN_POOL = "slots are in the pool"
ONE_EACH = "one source for each target"
WRITABLE = "the target is writable"

Slots = npt.NDArray[np.integer[Any]]
"""Row numbers, shape [n], of any integer type."""

log = logging.getLogger(__name__)


class Loops(Protocol):
    """What takes long in Python. ``missing`` says why it is not done in C; empty if it is.

    All raise InvariantViolation for rows that are not there.
    """

    missing: str

    def chain_hashes(
        self, seed: bytes, tokens: U32, block_tokens: int, extras: U64 | None = None
    ) -> U8:
        """See ``core.prefix.chain_hashes``."""
        ...

    def checksums(self, pool: U8, slots: Slots) -> U8:
        """xxh3_128 of rows of the pool, u8 [n, 16]."""
        ...

    def copy_in(self, pool: U8, slots: Slots, source: Rows) -> U8:
        """Copy the blocks of ``source``, n of them, into slots of the pool; u8 [n, 16].

        Returns the checksums of the bytes that came to lie in the slots, whoever changes the
        source meanwhile.
        """
        ...

    def copy_out(self, pool: U8, slots: Slots, target: Rows) -> None:
        """Copy slots of the pool into the blocks of ``target``, n of them."""
        ...

    def copy_between(self, pool: U8, slots: Slots, source: U8, source_slots: Slots) -> U8:
        """The same as ``copy_in``, from slots of another pool. No slot is written twice."""
        ...

    def checks(self, rows: U8) -> U64:
        """xxh3_64 of rows of more than 16 bytes, u64 [n]."""
        ...

    def write_entries(self, table: U8, slots: Slots, entries: EntryColumns) -> None:
        """Write entries, whole with their checks, into rows of a slot table.

        ``table``: u8 [rows, entry bytes], contiguous. ``tiers.entry`` describes the format.
        """
        ...

    def same_content(self, table: U8, slots: Slots, tokens: U32, extras: U64) -> Bool:
        """Which rows of a slot table have these tokens and digests of extra keys, shape [n].

        ``table``: u8 [rows, entry bytes], contiguous.
        """
        ...

    def enter(self, places: U64, where: U32, slots: Slots, hash_lo: U64) -> None:
        """Slots hold blocks of these names, u64 [n], now. See ``native.directory``."""
        ...

    def leave(self, places: U64, where: U32, slots: Slots) -> None:
        """Slots hold nothing that anybody should find. See ``native.directory``."""
        ...

    def read(
        self,
        pool: Readable,
        hashes: U8,
        tokens: U32,
        extras: U64 | None,
        slots: U32 | None,
        out: Rows,
        first: int = 0,
    ) -> int:
        """Copy the leading blocks of a chain into the blocks of ``out``, at least n - ``first``.

        Returns how many are there and right; what lies behind these may have been written to. The
        ``first`` ones are only found, and not copied: ``out`` has the others. ``hashes``: u8 [n,
        16], ``tokens``: u32 [n x block_tokens], contiguous both, ``extras``: u64 [>= n] or None.
        ``slots``: u32 [n], where they lie; None: where the directory says.
        """
        ...

    def structures(self) -> Structures:
        """What the core keeps its rows and slots in."""
        ...


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """Entries to be written: ``words`` has their first seven fields, u64 [n] each, or None for 0.

    ``tokens``: u32 [n, block_tokens], or None for zeroes. ``digest``: 16 bytes.
    """

    words: tuple[U64 | None, ...]
    length: int
    block_tokens: int
    digest: bytes
    tokens: U32 | None


class PythonLoops:
    """One call of numpy or xxhash per block."""

    def __init__(self, missing: str) -> None:
        self.missing = missing

    def chain_hashes(
        self, seed: bytes, tokens: U32, block_tokens: int, extras: U64 | None = None
    ) -> U8:
        """See Loops."""
        return prefix.chain_hashes(seed, tokens, block_tokens, extras)

    def checksums(self, pool: U8, slots: Slots) -> U8:
        """See Loops."""
        _check_slots(pool, slots)
        digest = xxhash.xxh3_128_digest
        sums = b"".join([digest(pool[slot].data) for slot in slots.tolist()])
        return np.frombuffer(sums, np.uint8).reshape(-1, DIGEST_BYTES)

    def copy_in(self, pool: U8, slots: Slots, source: Rows) -> U8:
        """See Loops."""
        if not isinstance(source, PagedBlocks):
            return self.copy_between(pool, slots, source, np.arange(len(source)))
        _check_slots(pool, slots)
        _check_widths(pool, source)
        _check_pages(source, len(slots))
        require(pool.flags.writeable, WRITABLE)
        for slot, block in zip(slots.tolist(), source.ids.tolist(), strict=True):
            np.concatenate(source.pages.of(block), out=pool[slot])
        return self.checksums(pool, slots)

    def copy_out(self, pool: U8, slots: Slots, target: Rows) -> None:
        """See Loops."""
        _check_slots(pool, slots)
        _check_widths(pool, target)
        require(len(slots) == len(target), ONE_EACH)
        if not isinstance(target, PagedBlocks):
            for row, slot in zip(target, slots.tolist(), strict=True):
                np.copyto(row, pool[slot])
            return
        _check_pages(target, len(slots), written=True)
        for block, slot in zip(target.ids.tolist(), slots.tolist(), strict=True):
            reading.scatter(pool[slot], target.pages.of(block))

    def copy_between(self, pool: U8, slots: Slots, source: U8, source_slots: Slots) -> U8:
        """See Loops."""
        _check_slots(pool, slots)
        _check_slots(source, source_slots)
        _check_widths(pool, source)
        require(len(slots) == len(source_slots), ONE_EACH)
        digest, sums = xxhash.xxh3_128_digest, []
        for to, at in zip(slots.tolist(), source_slots.tolist(), strict=True):
            copied = pool[to]
            np.copyto(copied, source[at])
            sums.append(digest(copied.data))
        return np.frombuffer(b"".join(sums), np.uint8).reshape(-1, DIGEST_BYTES)

    def checks(self, rows: U8) -> U64:
        """See Loops."""
        _check_rows(rows)
        require(rows.shape[1] >= CHECKED_MIN, "rows have more than 16 bytes")
        digest = xxhash.xxh3_64_intdigest
        return np.fromiter((digest(row.data) for row in rows), np.uint64, len(rows))

    def write_entries(self, table: U8, slots: Slots, entries: EntryColumns) -> None:
        """See Loops."""
        _check_slots(table, slots)
        _check_entries(table, entries)
        rows = np.zeros((len(slots), table.shape[1]), np.uint8)
        words, sizes = rows.view("<u8"), rows.view("<u4")
        for word, column in enumerate(entries.words):
            if column is not None:
                words[:, word] = column
        at = 2 * len(entries.words)
        sizes[:, at], sizes[:, at + 1] = entries.length, entries.block_tokens
        rows[:, 4 * at + 8 : 4 * at + 24] = np.frombuffer(entries.digest, np.uint8)
        if entries.tokens is not None:
            sizes[:, at + 6 : at + 6 + entries.block_tokens] = entries.tokens
        words[:, -1] = self.checks(rows[:, :-CHECK_BYTES])
        table.view("<u8")[slots] = words

    def same_content(self, table: U8, slots: Slots, tokens: U32, extras: U64) -> Bool:
        """See Loops."""
        _check_slots(table, slots)
        block_tokens = tokens.shape[1]
        held = table.view("<u4")[:, TOKENS_AT : TOKENS_AT + block_tokens][slots]
        same = (held == tokens).all(1)
        same &= table.view("<u8")[:, EXTRA_AT][slots] == extras
        return np.asarray(same)

    def enter(self, places: U64, where: U32, slots: Slots, hash_lo: U64) -> None:
        """See Loops."""
        _check_numbers(slots, len(where))
        directory.enter(places, where, slots, hash_lo)

    def leave(self, places: U64, where: U32, slots: Slots) -> None:
        """See Loops."""
        _check_numbers(slots, len(where))
        directory.leave(places, where, slots)

    def read(
        self,
        pool: Readable,
        hashes: U8,
        tokens: U32,
        extras: U64 | None,
        slots: U32 | None,
        out: Rows,
        first: int = 0,
    ) -> int:
        """See Loops."""
        _check_reading(pool, hashes, tokens, extras, slots, out, first)
        return reading.read(pool, hashes, tokens, extras, slots, out, first)

    def structures(self) -> Structures:
        """See Loops."""
        return Structures()


class NativeLoops:
    """One call of the library for all blocks."""

    missing = ""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lasting = LastingAddresses()

    def chain_hashes(
        self, seed: bytes, tokens: U32, block_tokens: int, extras: U64 | None = None
    ) -> U8:
        """See Loops."""
        require(len(seed) == prefix.HASH_BYTES, "a chain starts from 16 bytes")
        blocks = len(tokens) // block_tokens
        ids = np.ascontiguousarray(tokens, "<u4")
        keys = None
        if extras is not None:
            require(len(extras) >= blocks, "one extra digest per block")
            keys = np.ascontiguousarray(extras, np.uint64)
        hashes = np.empty((blocks, prefix.HASH_BYTES), np.uint8)
        self._library.bytes.tierkv_chain_hashes(
            *(seed, address(ids), blocks, 4 * block_tokens),
            None if keys is None else address(keys),
            ctypes.create_string_buffer(prefix.HASH_BYTES + 4 * block_tokens + EXTRA_BYTES),
            address(hashes),
        )
        return hashes

    def checksums(self, pool: U8, slots: Slots) -> U8:
        """See Loops."""
        numbers = _numbers(slots)
        sums = np.empty((len(slots), DIGEST_BYTES), np.uint8)
        failed = self._library.bytes.tierkv_checksums(
            *(*_matrix(pool), address(numbers)),
            *(len(slots), pool.shape[1], address(sums)),
        )
        require(not failed, IN_POOL)
        return sums

    def copy_in(self, pool: U8, slots: Slots, source: Rows) -> U8:
        """See Loops."""
        sums = np.empty((len(slots), DIGEST_BYTES), np.uint8)
        if not isinstance(source, PagedBlocks):
            self._copy(pool, slots, source, None, sums)
            return sums
        _check_widths(pool, source)
        _check_pages(source, len(slots))
        require(pool.flags.writeable, WRITABLE)
        numbers, ids = _numbers(slots), _numbers(source.ids)
        failed = self._library.bytes.tierkv_pages_in(
            *(*self._pool(pool), address(numbers)),
            *(ctypes.byref(described(source)), len(source.pages), address(ids)),
            *(len(numbers), address(sums)),
        )
        require(not failed, IN_POOL)
        return sums

    def copy_out(self, pool: U8, slots: Slots, target: Rows) -> None:
        """See Loops."""
        if not isinstance(target, PagedBlocks):
            self._copy(target, None, pool, slots, None)
            return
        _check_widths(pool, target)
        _check_pages(target, len(slots), written=True)
        numbers, ids = _numbers(slots), _numbers(target.ids)
        failed = self._library.bytes.tierkv_pages_out(
            *(*self._pool(pool), address(numbers)),
            *(ctypes.byref(described(target)), len(target.pages), address(ids), len(numbers)),
        )
        require(not failed, IN_POOL)

    def copy_between(self, pool: U8, slots: Slots, source: U8, source_slots: Slots) -> U8:
        """See Loops."""
        sums = np.empty((len(slots), DIGEST_BYTES), np.uint8)
        self._copy(pool, slots, source, source_slots, sums)
        return sums

    def checks(self, rows: U8) -> U64:
        """See Loops."""
        require(rows.shape[1] >= CHECKED_MIN, "rows have more than 16 bytes")
        found = np.empty(len(rows), np.uint64)
        self._library.quick.tierkv_checks(*_matrix(rows), rows.shape[1], address(found))
        return found

    def write_entries(self, table: U8, slots: Slots, entries: EntryColumns) -> None:
        """See Loops."""
        _check_entries(table, entries)
        numbers = _numbers(slots)
        columns = [
            None if word is None else np.ascontiguousarray(word, np.uint64)
            for word in entries.words
        ]
        tokens = entries.tokens
        if tokens is not None:
            tokens = np.ascontiguousarray(tokens, np.uint32)
            require(tokens.shape == (len(slots), entries.block_tokens), "tokens for each entry")
        given = [column for column in columns if column is not None]
        require(all(len(column) == len(slots) for column in given), "a value for each entry")
        addresses = [0 if column is None else address(column) for column in columns]
        failed = self._library.quick.tierkv_entries(
            *(*_matrix(table), address(numbers), len(slots)),
            (ctypes.c_void_p * len(addresses))(*addresses),
            *(entries.length, entries.block_tokens, entries.digest),
            None if tokens is None else address(tokens),
        )
        require(not failed, IN_POOL)

    def structures(self) -> Structures:
        """See Loops."""
        return structures(self._library)

    def same_content(self, table: U8, slots: Slots, tokens: U32, extras: U64) -> Bool:
        """See Loops."""
        numbers = _numbers(slots)
        tokens = np.ascontiguousarray(tokens, np.uint32)
        extras = np.ascontiguousarray(extras, np.uint64)
        require(len(tokens) == len(extras) == len(slots), "tokens and extras for each slot")
        same = np.empty(len(slots), np.bool_)
        failed = self._library.quick.tierkv_entries_same(
            *(*_matrix(table), address(numbers), len(slots)),
            *(tokens.shape[1], address(tokens), address(extras), address(same)),
        )
        require(not failed, IN_POOL)
        return same

    def enter(self, places: U64, where: U32, slots: Slots, hash_lo: U64) -> None:
        """See Loops."""
        numbers = _numbers(slots)
        names = np.ascontiguousarray(hash_lo, np.uint64)
        require(len(names) == len(numbers), "a name for each slot")
        failed = self._library.quick.tierkv_directory_enter(
            *(self._lasting(places), len(places) - 1, self._lasting(where), len(where)),
            *(address(numbers), address(names), len(numbers)),
        )
        require(not failed, IN_POOL)

    def leave(self, places: U64, where: U32, slots: Slots) -> None:
        """See Loops."""
        numbers = _numbers(slots)
        failed = self._library.quick.tierkv_directory_leave(
            *(self._lasting(places), self._lasting(where), len(where)),
            *(address(numbers), len(numbers)),
        )
        require(not failed, IN_POOL)

    def read(
        self,
        pool: Readable,
        hashes: U8,
        tokens: U32,
        extras: U64 | None,
        slots: U32 | None,
        out: Rows,
        first: int = 0,
    ) -> int:
        """See Loops."""
        _check_reading(pool, hashes, tokens, extras, slots, out, first)
        count = len(hashes)
        if extras is not None:
            extras = np.ascontiguousarray(extras, np.uint64)
        much = (count - first) * block_bytes_of(out) > QUICK_BYTES_MAX
        library = self._library.bytes if much else self._library.quick
        ids = _numbers(out.ids) if isinstance(out, PagedBlocks) else None
        found: int = library.tierkv_read(
            *(pool.library_address, None if slots is None else address(slots)),
            *(address(hashes), address(tokens), None if extras is None else address(extras)),
            *(first, count, ctypes.byref(described(out)), None if ids is None else address(ids)),
            ctypes.create_string_buffer(pool.entries.shape[1]),
        )
        return found

    def _pool(self, pool: U8) -> tuple[int, int, int]:
        """As ``_matrix``, for memory that is most often the same."""
        _check_rows(pool)
        return self._lasting(pool), pool.strides[0], len(pool)

    def _copy(
        self,
        to: U8,
        to_slots: Slots | None,
        source: U8,
        source_slots: Slots | None,
        sums: U8 | None,
    ) -> None:
        _check_widths(to, source)
        count = len(to) if to_slots is None else len(to_slots)
        given = len(source) if source_slots is None else len(source_slots)
        require(count == given, ONE_EACH)
        require(to.flags.writeable, WRITABLE)
        targets = None if to_slots is None else _numbers(to_slots)
        sources = None if source_slots is None else _numbers(source_slots)
        failed = self._library.bytes.tierkv_copy(
            *(*_matrix(to), None if targets is None else address(targets)),
            *(*self._pool(source), None if sources is None else address(sources)),
            *(count, to.shape[1], None if sums is None else address(sums)),
        )
        require(not failed, IN_POOL)


@functools.cache
def loops() -> Loops:
    """The native loops, or those in Python; the first call says so if there are none in C.

    Raises ConfigError for a wrong value of the environment variable.
    """
    try:
        return NativeLoops(load())
    except NoLibrary as error:
        level = logging.INFO if error.wanted else logging.WARNING
        log.log(level, "hot loops run in Python, several times slower: %s", error)
        return PythonLoops(str(error))


def _matrix(matrix: U8) -> tuple[int, int, int]:
    """Where rows lie: the first one's address, the bytes from one to the next, their number."""
    _check_rows(matrix)
    return address(matrix), matrix.strides[0], len(matrix)


def _numbers(slots: Slots) -> U32:
    """Row numbers for the library, which checks them; those that are none stay none."""
    if slots.dtype.itemsize > U32_BYTES:
        require(not len(slots) or bool(((slots >> 32) == 0).all()), IN_POOL)
    return np.ascontiguousarray(slots).astype(np.uint32, copy=False)


def _check_rows(matrix: U8) -> None:
    contiguous = matrix.strides[1] == 1 or matrix.shape[1] <= 1 or not len(matrix)
    require(contiguous and matrix.strides[0] >= 0, "the bytes of a row are contiguous")


def _check_entries(table: U8, entries: EntryColumns) -> None:
    whole = len(entries.words) == ENTRY_WORDS and len(entries.digest) == DIGEST_BYTES
    require(whole, "an entry has seven words and a digest")
    sizes_bytes = 8
    fixed_bytes = 8 * ENTRY_WORDS + sizes_bytes + DIGEST_BYTES + CHECK_BYTES
    fits = fixed_bytes + 4 * entries.block_tokens <= table.shape[1] == table.strides[0]
    require(fits, "an entry fits its row")
    require(table.flags.writeable, "the table is writable")


def _check_widths(one: U8, other: Rows) -> None:
    require(one.shape[1] == block_bytes_of(other), "blocks are copied into blocks of the same size")


def _check_pages(blocks: PagedBlocks, count: int, *, written: bool = False) -> None:
    require(len(blocks) == count, ONE_EACH)
    _check_numbers(blocks.ids, len(blocks.pages))
    require(blocks.pages.writable or not written, WRITABLE)


def _check_slots(pool: U8, slots: Slots) -> None:
    _check_rows(pool)
    _check_numbers(slots, len(pool))


def _check_numbers(slots: Slots, rows: int) -> None:
    if len(slots):
        require(int(slots.min()) >= 0 and int(slots.max()) < rows, IN_POOL)


def _check_reading(
    pool: Readable,
    hashes: U8,
    tokens: U32,
    extras: U64 | None,
    slots: U32 | None,
    out: Rows,
    first: int,
) -> None:
    count = len(hashes)
    require(hashes.size == count * DIGEST_BYTES and hashes.flags.c_contiguous, "16 bytes each")
    whole = tokens.dtype == np.uint32 and tokens.flags.c_contiguous
    require(whole and tokens.size == count * pool.block_tokens, "tokens for each block")
    require(extras is None or len(extras) >= count, "one extra digest per block")
    require(0 <= first <= count, "blocks that are not copied are of the chain")
    _check_widths(pool.payload, out)
    require(len(out) >= count - first, "room for each block")
    if isinstance(out, PagedBlocks):
        _check_pages(out, len(out), written=True)
    else:
        _check_rows(out)
        require(out.flags.writeable, WRITABLE)
    if slots is not None:
        require(len(slots) == count, "a slot for each block")
        _check_numbers(slots, len(pool.payload))
