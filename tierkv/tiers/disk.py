"""The disk tier: blocks in fixed slots of preallocated segment files.

A slot is one header and one payload, each rounded up to 4096 bytes, written by one ``pwritev``:

    offset  size   field
    0       8      magic TKVBLK\\0\\1
    8       4      format version, 2 (little-endian, like all integers)
    12      4      bytes of the entry
    16      16     uuid of the store
    32      ...    the entry (see ``entry``)
    ...     ...    zeroes up to a multiple of 4096 (one page unless blocks have over 994 tokens)
    then    length the payload
    ...     ...    up to a multiple of 4096, without meaning

Every byte of header and payload is checked when a block is read, so a slot needs no other
protection. Headers also are what an index is made from when it is lost, those of slots that blocks
have left as well: what was deleted for good (not merely evicted) is told by ``service.deleted``.

Where a slot lies follows from its number, the pool's slot size and ``segment_bytes``: a store
keeps the ``segment_bytes`` it was made with, or finds none of its blocks again.

Threads: any thread may call any method at any time, on different slots; a slot may be read by
several threads. ``add_pool`` comes before all use of a pool, ``close`` after it.

Crash: whatever a dying process leaves in a slot either is a whole block, named by its id, or fails
the checks. A reader learns from the log which id a slot should hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import distinct
from tierkv.core.ids import I64, U8, U32, U64, Bool
from tierkv.core.spec import PAGE, slot_stride
from tierkv.core.state import PoolShape
from tierkv.errors import InvariantViolation, TierFailed, TierFull, require
from tierkv.tiers.blocks import Blocks
from tierkv.tiers.copy import checked_entries, whole_entries
from tierkv.tiers.disk_io import DiskIO, serial_io
from tierkv.tiers.entry import (
    Entries,
    entry_dtype,
    has_sum,
    payload_sums,
    sums_agree,
)
from tierkv.tiers.pieces import buffers_of, pieces_of
from tierkv.tiers.reads import Batches, Done, ReadList
from tierkv.tiers.runs import consecutive_runs
from tierkv.tiers.segments import Segments, shapes_present, tier_error
from tierkv.tiers.storage import BlockStorage, Buffers

MAGIC = b"TKVBLK\x00\x01"
FORMAT_VERSION = 2
PREFIX_BYTES = 32
STORE_BYTES = 16

WRITE_BYTES = 8 << 20
"""Neighbouring blocks are written together up to this size: the fewer calls, the better. The device
does not begin before the first ones are checked, so there is an end to that."""

READ_BYTES = 1 << 20
"""And read together up to this one: what has arrived is checked while the rest is on its way."""

MERGE_SLOTS_MAX = 256  # at three buffers a slot, below the 1024 of one system call
SCAN_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of a batch of blocks that were to be written, arrays of shape [n].

    ``written``: the block is in its slot. ``intact``: the source's entry was valid and its payload
    had the checksum that the entry states, if any; a block that is not intact is never written.
    ``sum_hi``, ``sum_lo``: the payload's checksum, 0 where it is not intact. ``error``: why the
    rest of the batch was given up, or None; blocks that were not looked at any more count as
    neither intact nor written.
    """

    written: Bool
    intact: Bool
    sum_hi: U64
    sum_lo: U64
    error: TierFull | TierFailed | None


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of a batch of blocks that were to be read.

    ``ok`` (shape [n]): the block is in the arena and every check holds. ``error``: why the
    operating system refused to read some of those that are not, or None. Such a block may be
    whole; all others that are not ``ok`` are damaged or were never there.
    """

    ok: Bool
    error: TierFailed | None


@dataclass(frozen=True, slots=True)
class Scan:
    """What the headers of some neighbouring slots say.

    ``slots`` (u32 [n], ascending) have sound headers with ``entries`` ([n]). ``damaged`` others of
    the ``looked_at`` have been written but are not sound, or cannot be read.
    """

    slots: U32
    entries: Entries
    looked_at: int
    damaged: int


_ZEROES, _SINK = np.zeros((2, 1, PAGE), np.uint8)
"""Where the end of a slot comes from, and where it goes to, that no block fills."""


@dataclass(frozen=True, slots=True)
class _Pool:
    block_bytes: int
    block_tokens: int
    header_bytes: int
    slot_bytes: int
    slot_count: int
    direct: bool
    prefix: U8
    segments: Segments

    def require_slots(self, slots: U32) -> None:
        """Raise InvariantViolation if the pool has no such slots."""
        require(len(slots) == 0 or int(slots.max()) < self.slot_count, "slots are in the pool")

    def runs(self, slots: U32, bytes_max: int) -> list[I64]:
        """The request's indices in runs that one system call can move."""
        self.require_slots(slots)
        return consecutive_runs(
            slots,
            length_max=min(MERGE_SLOTS_MAX, max(1, bytes_max // self.block_bytes)),
            boundary=self.segments.slots_per_segment,
        )

    def blocks_in(self, size_bytes: int) -> int:
        """How many blocks are whole in so many bytes of consecutive slots."""
        needed = self.header_bytes + self.block_bytes
        return 0 if size_bytes < needed else (size_bytes - needed) // self.slot_bytes + 1

    def locate(self, slot: int) -> tuple[int, int]:
        """Segment and offset of a slot."""
        segment, place = divmod(slot, self.segments.slots_per_segment)
        return segment, place * self.slot_bytes

    def slots_of(self, segment: int) -> range:
        """The slots of a segment."""
        first = segment * self.segments.slots_per_segment
        return range(first, min(first + self.segments.slots_per_segment, self.slot_count))

    def pack(self, entries: Entries) -> U8:
        """Header pages for entries, shape [n, header_bytes]."""
        pages = _pages(len(entries), self.header_bytes)
        size = entries.dtype.itemsize
        pages[:, :PREFIX_BYTES] = self.prefix
        pages[:, PREFIX_BYTES : PREFIX_BYTES + size] = entries.view(np.uint8).reshape(-1, size)
        return pages

    def pieces(self, headers: U8, rows: I64, memory: U8, slots: U32, end: U8) -> U64:
        """What slots consist of, in the order they have on disk, shape [n x pieces of one, 2].

        ``rows`` of the ``headers``, ``slots`` of an arena's ``memory``, n of each, and an ``end``
        (shape [1, PAGE]) to fill the last page.
        """
        parts = [pieces_of(headers, rows), pieces_of(memory, slots)]
        padding = self.slot_bytes - self.header_bytes - memory.shape[1]
        if padding:
            parts.append(pieces_of(end[:, :padding], np.zeros_like(rows)))
        return np.stack(parts, axis=1).reshape(-1, 2)

    def unpack(self, pages: U8) -> tuple[Entries, Bool]:
        """The entries in header pages, and which pages are sound in every byte."""
        dtype = entry_dtype(self.block_tokens)
        end = PREFIX_BYTES + dtype.itemsize
        body = np.ascontiguousarray(pages[:, PREFIX_BYTES:end])
        entries: Entries = body.view(dtype).reshape(-1)
        ok: Bool = (pages[:, :PREFIX_BYTES] == self.prefix).all(axis=1)
        ok &= ~pages[:, end:].any(axis=1)
        ok &= whole_entries(entries, self.block_bytes)
        return entries, ok


class DiskTier:
    """All pools of the disk tier, in one directory.

    ``read_errors`` counts the reads that the operating system refused; it only grows.
    """

    def __init__(
        self,
        directory: str,
        budget_bytes: int,
        segment_bytes: int,
        store: bytes,
        storage: BlockStorage,
        open_io: Callable[[BlockStorage, str], DiskIO] = serial_io,
    ) -> None:
        """Make the directory (an absolute path) if need be.

        Slots that another ``store`` (uuid, 16 bytes) wrote are as good as never written.
        ``open_io`` is given the storage and the directory and says how to read and write. Raises
        TierFull or TierFailed, and what ``open_io`` raises.
        """
        require(len(store) == STORE_BYTES, "a store uuid has 16 bytes")
        self.read_errors = 0
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._segment_bytes = segment_bytes
        self._store = store
        self._storage = storage
        self._pools: dict[int, _Pool] = {}
        self._counting = threading.Lock()
        try:
            with contextlib.suppress(FileExistsError):
                storage.mkdir(directory)
            storage.fsync_dir(os.path.dirname(directory))
        except OSError as error:
            raise tier_error(error, "make the directory", directory) from error
        self._io = open_io(storage, directory)

    @property
    def io(self) -> str:
        """How it reads and writes, for people: "io_uring, direct"."""
        return self._io.description

    def add_pool(self, pool: int, block_bytes: int, block_tokens: int) -> None:
        """Get ready for a pool; no file is made. Adding it again changes nothing.

        Raises TierFailed.
        """
        present = self._pools.get(pool)
        if present is not None:
            same = (present.block_bytes, present.block_tokens) == (block_bytes, block_tokens)
            require(same, f"pool {pool} was added before with another geometry")
            return
        entry_bytes = entry_dtype(block_tokens).itemsize
        slot_bytes = disk_slot_bytes(block_bytes, block_tokens)
        header_bytes = slot_bytes - _whole_pages(block_bytes)
        slot_count = self._budget_bytes // slot_bytes
        # The slots of tiny blocks do not begin at pages in memory.
        direct = self._io.direct and slot_stride(block_bytes) % PAGE == 0
        sizes = FORMAT_VERSION.to_bytes(4, "little") + entry_bytes.to_bytes(4, "little")
        self._pools[pool] = _Pool(
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            header_bytes=header_bytes,
            slot_bytes=slot_bytes,
            slot_count=slot_count,
            direct=direct,
            prefix=np.frombuffer(MAGIC + sizes + self._store, np.uint8),
            segments=Segments(
                self._directory,
                PoolShape(block_bytes, block_tokens),
                slot_bytes=slot_bytes,
                slot_count=slot_count,
                slots_per_segment=max(1, self._segment_bytes // slot_bytes),
                storage=self._storage,
                direct=direct,
            ),
        )

    def shapes(self) -> list[PoolShape]:
        """Geometries of the blocks that lie here, added or not, the smallest first.

        Raises TierFailed.
        """
        try:
            return sorted(
                shapes_present(self._storage, self._directory),
                key=lambda shape: (shape.block_bytes, shape.block_tokens),
            )
        except OSError as error:
            raise tier_error(error, "list the segments of", self._directory) from error

    def place(self, pool: int, slot: int) -> tuple[str, int]:
        """The path of the segment that a slot lies in, and at which byte."""
        known = self._pool(pool)
        segment, offset = known.locate(slot)
        return known.segments.path(segment), offset

    def slot_count(self, pool: int) -> int:
        """How many slots the pool has if it gets the whole budget."""
        return self._pool(pool).slot_count

    def slot_bytes(self, pool: int) -> int:
        """What a slot takes on disk, header included."""
        return self._pool(pool).slot_bytes

    def write(self, pool: int, slots: U32, arena: Blocks, arena_slots: U32) -> WriteResult:
        """Write blocks from the arena into disk slots (both shape [n]).

        Never writes a block whose payload does not have the checksum in its entry. Gives the rest
        of the batch up after the first error; what is written by then stays written. Raises
        nothing for the medium's errors: they are in the result.

        The device begins with each piece at once, while the next ones are checked: so ``sync``
        finds most of the work done, and little memory waits to be written.
        """
        known = self._pool(pool)
        require(arena.block_bytes(pool) == known.block_bytes, "arena and disk have the same pools")
        written, intact = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.bool_)
        sum_hi, sum_lo = np.zeros(len(slots), np.uint64), np.zeros(len(slots), np.uint64)
        failures: list[TierFull | TierFailed] = []

        def write_piece(run: I64) -> None:
            if failures:
                return
            # Checked just before it is written: its bytes are still in the processor's cache.
            entries, sound = checked_entries(arena, pool, arena_slots[run])
            entries, good = entries[sound], run[sound]
            intact[good] = True
            sum_hi[good], sum_lo[good] = entries["sum_hi"], entries["sum_lo"]
            for part in known.runs(slots[good], WRITE_BYTES):
                indices = good[part]
                headers, memory = known.pack(entries[part]), arena.slots(pool)
                each = np.arange(len(part))
                pieces = known.pieces(headers, each, memory, arena_slots[indices], _ZEROES)
                failure = self._write_run(known, int(slots[indices[0]]), buffers_of(pieces))
                if failure is not None:
                    failures.append(failure)
                    return
                written[indices] = True

        self._io.writes.each(write_piece, known.runs(slots, WRITE_BYTES))
        return WriteResult(written, intact, sum_hi, sum_lo, failures[0] if failures else None)

    def read(
        self, pool: int, slots: U32, expected_ids: U64, arena: Blocks, arena_slots: U32
    ) -> ReadResult:
        """Read blocks into the arena (all arrays shape [n]).

        Checked are the header in every byte, the block's id and the payload's checksum. Where one
        fails, or the slot cannot be read at all, the arena's entry is empty and its payload
        without meaning. Raises nothing for the medium's errors: they are in the result.

        Crash: the arena's entry is emptied first and written last.
        """
        known = self._pool(pool)
        require(arena.block_bytes(pool) == known.block_bytes, "arena and disk have the same pools")
        arena.empty(pool, arena_slots)
        good = np.zeros(len(slots), np.bool_)
        headers = _pages(len(slots), known.header_bytes)
        error: TierFailed | None = None
        runs = known.runs(slots, READ_BYTES)
        while runs:
            refused: list[I64] = []
            order, lengths = np.concatenate(runs), np.array(list(map(len, runs)))
            pieces = known.pieces(headers, order, arena.slots(pool), arena_slots[order], _SINK)
            firsts = slots[order[np.cumsum(lengths) - lengths]]
            with closing(self._read_from(known, firsts, lengths, pieces)) as batches:
                for numbers, got in batches:
                    arrived = [np.zeros(0, np.int64)]
                    for number, bytes_got in zip(numbers.tolist(), got.tolist(), strict=True):
                        run = runs[number]
                        if bytes_got >= 0:
                            arrived.append(run[: known.blocks_in(bytes_got)])
                        elif len(run) > 1:
                            # The refusal may be about one slot: its neighbours get a chance.
                            refused.extend(run[:, None])
                        elif error is None:
                            path, _ = self.place(pool, int(slots[run[0]]))
                            why = OSError(-bytes_got, os.strerror(-bytes_got))
                            error = TierFailed(f"cannot read {path}: {why}", path=path)
                    here = np.concatenate(arrived)
                    good[here] = _accept(
                        known, headers[here], expected_ids[here], arena, pool, arena_slots[here]
                    )
            runs = refused
        return ReadResult(good, error)

    def headers(self, pool: int, slots: U32) -> tuple[Entries, Bool]:
        """The entries in the slots' headers, and which of them are sound; both shape [n].

        Reads no payload. The entry of a slot that is not sound is empty.
        """
        known = self._pool(pool)
        known.require_slots(slots)
        entries, ok = known.unpack(self._header_pages(known, slots)[0])
        entries[~ok] = np.zeros((), entries.dtype)
        return entries, ok

    def present_slots(self, pool: int) -> int:
        """How many slots the pool's existing segments have."""
        known = self._pool(pool)
        return sum(len(known.slots_of(segment)) for segment in known.segments.present())

    def scan(self, pool: int) -> Iterator[Scan]:
        """The headers of all slots of the existing segments, batch by batch, in order.

        Raises TierFailed if a segment cannot be opened; a header that cannot be read is damaged.
        """
        known = self._pool(pool)
        for segment in known.segments.present():
            every = known.slots_of(segment)
            self._require_readable(known, segment)
            for start in range(0, len(every), SCAN_SLOTS):
                slots = np.array(every[start : start + SCAN_SLOTS], np.uint32)
                pages, readable = self._header_pages(known, slots)
                entries, ok = known.unpack(pages)
                damaged = ~ok & (pages.any(axis=1) | ~readable)
                yield Scan(slots[ok], entries[ok], len(slots), int(np.count_nonzero(damaged)))

    def sync(self) -> None:
        """Make every write that has returned durable. Raises TierFailed: then nothing is sure."""
        for pool in list(self._pools.values()):
            pool.segments.sync()

    def close(self) -> None:
        """Close all files, without syncing them."""
        for pool in self._pools.values():
            pool.segments.close()
        self._pools.clear()
        self._io.close()

    def _pool(self, pool: int) -> _Pool:
        try:
            return self._pools[pool]
        except KeyError:
            raise InvariantViolation(f"pool {pool} was not added to {self._directory}") from None

    def _require_readable(self, known: _Pool, segment: int) -> None:
        try:
            known.segments.fd_to_read(segment)
        except OSError as error:
            raise tier_error(error, "read", known.segments.path(segment)) from error

    def _header_pages(self, known: _Pool, slots: U32) -> tuple[U8, Bool]:
        """Header pages of slots, shape [n, header_bytes], and which could be read."""
        pages = _pages(len(slots), known.header_bytes)
        readable = np.ones(len(slots), np.bool_)
        # In the order they have on disk.
        order = np.argsort(slots, kind="stable")
        each = np.ones(len(order), np.int64)
        reads = self._read_from(known, slots[order], each, pieces_of(pages, order))
        with closing(reads) as batches:
            for numbers, got in batches:
                readable[order[numbers[got < 0]]] = False
        return pages, readable

    def _read_from(self, known: _Pool, firsts: U32, lengths: I64, pieces: U64) -> Batches:
        """Read from slots ``firsts`` (shape [n]) on, as ``Reads`` does.

        Each read fills as many of the ``pieces`` as its length is times what one slot has. Without
        a segment no bytes come.
        """
        counts = lengths * (len(pieces) // max(1, int(lengths.sum())))
        segments, places = np.divmod(firsts.astype(np.int64), known.segments.slots_per_segment)
        fds, without = np.full(len(firsts), -1), np.zeros(len(firsts), np.int64)
        for segment in distinct(segments).tolist():
            try:
                fd = known.segments.fd_to_read(segment)
            except OSError as error:
                without[segments == segment] = -(error.errno or errno.EIO)
            else:
                fds[segments == segment] = -1 if fd is None else fd
        here, missing = np.flatnonzero(fds >= 0), np.flatnonzero(fds < 0)
        asked = ReadList(
            fds[here],
            places[here] * known.slot_bytes,
            counts[here],
            pieces[np.repeat(fds >= 0, counts)],
        )
        with closing(self._io.reads.read(asked)) as batches:
            for numbers, got in batches:
                self._count_errors(got)
                yield Done(here[numbers], got)
        self._count_errors(without)
        yield Done(missing, without[missing])

    def _count_errors(self, got: I64) -> None:
        with self._counting:
            self.read_errors += int(np.count_nonzero(got < 0))

    def _write_run(self, known: _Pool, slot: int, buffers: Buffers) -> TierFull | TierFailed | None:
        """Write consecutive slots by one call; returns why not, if it was refused."""
        segment, offset = known.locate(slot)
        try:
            fd = known.segments.fd_to_write(segment)
            self._storage.pwritev(fd, buffers, offset)
        except OSError as error:
            return tier_error(error, "write", known.segments.path(segment))
        except (TierFull, TierFailed) as error:
            return error
        known.segments.mark_dirty(segment)
        if not known.direct:
            self._storage.start_writeback(fd, offset, sum(map(len, buffers)))
        return None


def disk_slot_bytes(block_bytes: int, block_tokens: int) -> int:
    """What one block takes on disk: header and payload, each in whole pages."""
    entry_bytes = entry_dtype(block_tokens).itemsize
    return _whole_pages(PREFIX_BYTES + entry_bytes) + _whole_pages(block_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def _pages(count: int, size_bytes: int) -> U8:
    """Zeroes, shape [count, size_bytes], that begin at a page."""
    memory = np.zeros(count * size_bytes + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + count * size_bytes].reshape(count, size_bytes)


def _accept(
    known: _Pool, headers: U8, ids: U64, arena: Blocks, pool: int, arena_slots: U32
) -> Bool:
    """Which of the blocks that have arrived are the expected ones, whole; those get an entry."""
    entries, ok = known.unpack(headers)
    ok &= (entries["id"] == ids) & has_sum(entries)
    likely = np.flatnonzero(ok)
    sums = payload_sums(arena.payload(pool), arena_slots[likely])
    ok[likely] = sums_agree(entries, likely, sums)
    arena.table(pool)[arena_slots[ok]] = entries[ok]
    return ok
