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
protection. Headers also are what an index is made from when it is lost. So to delete a block for
good (not merely to evict it) is to blank its header, and to sync that, before saying so.

Where a slot lies follows from its number, the pool's slot size and ``segment_bytes``: a store
keeps the ``segment_bytes`` it was made with, or finds none of its blocks again.

Threads: any thread may call any method at any time, on different slots; a slot may be read by
several threads. ``add_pool`` comes before all use of a pool, ``close`` after it.

Crash: whatever a dying process leaves in a slot either is a whole block, named by its id, or fails
the checks. A reader learns from the log which id a slot should hold.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import distinct
from tierkv.core.ids import I64, U8, U32, U64, Bool
from tierkv.core.spec import PAGE
from tierkv.core.state import PoolShape
from tierkv.errors import InvariantViolation, TierFailed, TierFull, require
from tierkv.tiers.arena import Arena
from tierkv.tiers.copy import whole_entries
from tierkv.tiers.entry import (
    Entries,
    blank_entries,
    entry_dtype,
    fill_sums,
    has_sum,
    payload_sums,
    sums_agree,
)
from tierkv.tiers.runs import consecutive_runs
from tierkv.tiers.segments import Segments, shapes_present, tier_error
from tierkv.tiers.storage import BlockStorage

MAGIC = b"TKVBLK\x00\x01"
FORMAT_VERSION = 2
PREFIX_BYTES = 32
STORE_BYTES = 16

MERGE_BYTES_MAX = 8 << 20
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


@dataclass(frozen=True, slots=True)
class _Pool:
    block_bytes: int
    block_tokens: int
    header_bytes: int
    slot_bytes: int
    slot_count: int
    prefix: U8
    segments: Segments

    def require_slots(self, slots: U32) -> None:
        """Raise InvariantViolation if the pool has no such slots."""
        require(len(slots) == 0 or int(slots.max()) < self.slot_count, "slots are in the pool")

    def runs(self, slots: U32) -> list[I64]:
        """The request's indices in runs that one system call can move."""
        self.require_slots(slots)
        return consecutive_runs(
            slots,
            length_max=min(MERGE_SLOTS_MAX, max(1, MERGE_BYTES_MAX // self.slot_bytes)),
            boundary=self.segments.slots_per_segment,
        )

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
        pages = np.zeros((len(entries), self.header_bytes), np.uint8)
        size = entries.dtype.itemsize
        pages[:, :PREFIX_BYTES] = self.prefix
        pages[:, PREFIX_BYTES : PREFIX_BYTES + size] = entries.view(np.uint8).reshape(-1, size)
        return pages

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
    ) -> None:
        """Make the directory (an absolute path) if need be.

        Slots that another ``store`` (uuid, 16 bytes) wrote are as good as never written. Raises
        TierFull or TierFailed.
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
        sizes = FORMAT_VERSION.to_bytes(4, "little") + entry_bytes.to_bytes(4, "little")
        self._pools[pool] = _Pool(
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            header_bytes=header_bytes,
            slot_bytes=slot_bytes,
            slot_count=slot_count,
            prefix=np.frombuffer(MAGIC + sizes + self._store, np.uint8),
            segments=Segments(
                self._directory,
                PoolShape(block_bytes, block_tokens),
                slot_bytes=slot_bytes,
                slot_count=slot_count,
                slots_per_segment=max(1, self._segment_bytes // slot_bytes),
                storage=self._storage,
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

    def write(
        self, pool: int, slots: U32, arena: Arena, arena_slots: U32, *, sync_follows: bool = False
    ) -> WriteResult:
        """Write blocks from the arena into disk slots (both shape [n]).

        Never writes a block whose payload does not have the checksum in its entry. Gives the rest
        of the batch up after the first error; what is written before it stays written. Raises
        nothing for the medium's errors: they are in the result.

        With ``sync_follows`` the device begins with each piece while the next one is checked and
        written; ``sync`` then finds most of the work done.
        """
        known = self._pool(pool)
        require(arena.block_bytes(pool) == known.block_bytes, "arena and disk have the same pools")
        written, intact = np.zeros(len(slots), np.bool_), np.zeros(len(slots), np.bool_)
        sum_hi, sum_lo = np.zeros(len(slots), np.uint64), np.zeros(len(slots), np.uint64)
        for run in known.runs(slots):
            # Checked just before it is written: its bytes are still in the processor's cache.
            entries, sound = _checked_source(arena, pool, arena_slots[run])
            entries, good = entries[sound], run[sound]
            intact[good] = True
            sum_hi[good], sum_lo[good] = entries["sum_hi"], entries["sum_lo"]
            for part in known.runs(slots[good]):
                indices = good[part]
                buffers = _slot_buffers(
                    known, known.pack(entries[part]), arena.slots(pool), arena_slots[indices]
                )
                failure = self._write_run(known, int(slots[indices[0]]), buffers, sync_follows)
                if failure is not None:
                    return WriteResult(written, intact, sum_hi, sum_lo, failure)
                written[indices] = True
        return WriteResult(written, intact, sum_hi, sum_lo, None)

    def read(
        self, pool: int, slots: U32, expected_ids: U64, arena: Arena, arena_slots: U32
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
        error: TierFailed | None = None
        for run in known.runs(slots):
            entries, ok, refused = self._read_run(
                known, slots[run], arena.slots(pool), arena_slots[run]
            )
            error = error or refused
            ok &= (entries["id"] == expected_ids[run]) & has_sum(entries)
            likely = np.flatnonzero(ok)
            sums = payload_sums(arena.payload(pool), arena_slots[run[likely]])
            ok[likely] = sums_agree(entries, likely, sums)
            arena.table(pool)[arena_slots[run[ok]]] = entries[ok]
            good[run] = ok
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
        size, width = known.header_bytes, known.segments.slots_per_segment
        pages = np.zeros((len(slots), size), np.uint8)
        readable = np.ones(len(slots), np.bool_)
        view = pages.reshape(-1).data
        segments, places = np.divmod(slots.astype(np.int64), width)
        for segment in distinct(segments).tolist():
            members = np.flatnonzero(segments == segment)
            members = members[np.argsort(places[members])]
            try:
                fd = known.segments.fd_to_read(segment)
            except OSError:
                self._count_read_error()
                readable[members] = False
                continue
            if fd is None:
                continue
            offsets = (places[members] * known.slot_bytes).tolist()
            for index, offset in zip(members.tolist(), offsets, strict=True):
                try:
                    page = view[index * size : (index + 1) * size]
                    self._storage.preadv(fd, [page], offset)
                except OSError:
                    self._count_read_error()
                    readable[index] = False
        return pages, readable

    def _count_read_error(self) -> None:
        with self._counting:
            self.read_errors += 1

    def _write_run(
        self, known: _Pool, slot: int, buffers: list[memoryview], sync_follows: bool
    ) -> TierFull | TierFailed | None:
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
        if sync_follows:
            self._storage.start_writeback(fd, offset, sum(map(len, buffers)))
        return None

    def _read_run(
        self, known: _Pool, slots: U32, memory: U8, arena_slots: U32
    ) -> tuple[Entries, Bool, TierFailed | None]:
        """Read consecutive slots: entries, which are whole up to the checksum, why not read."""
        headers = np.zeros((len(slots), known.header_bytes), np.uint8)
        buffers = _slot_buffers(known, headers, memory, arena_slots)
        done = self._read_some(known, int(slots[0]), buffers)
        if isinstance(done, int):
            entries, ok = known.unpack(headers)
            ends = np.arange(len(slots)) * known.slot_bytes + known.header_bytes + known.block_bytes
            return entries, ok & (ends <= done), None
        if len(slots) == 1:
            return blank_entries(1, known.block_tokens), np.zeros(1, np.bool_), done
        # The refusal may be about one slot only: its neighbours get their own chance.
        parts = [
            self._read_run(known, slots[i : i + 1], memory, arena_slots[i : i + 1])
            for i in range(len(slots))
        ]
        entries = np.concatenate([entries for entries, _, _ in parts])
        ok = np.concatenate([ok for _, ok, _ in parts])
        return entries, ok, next((error for _, _, error in parts if error is not None), None)

    def _read_some(self, known: _Pool, slot: int, buffers: list[memoryview]) -> int | TierFailed:
        """Read from a slot on: bytes read (0 without a segment), or why the system refused."""
        segment, offset = known.locate(slot)
        try:
            fd = known.segments.fd_to_read(segment)
            return 0 if fd is None else self._storage.preadv(fd, buffers, offset)
        except OSError as error:
            self._count_read_error()
            path = known.segments.path(segment)
            return TierFailed(f"cannot read {path}: {error}", path=path)


def disk_slot_bytes(block_bytes: int, block_tokens: int) -> int:
    """What one block takes on disk: header and payload, each in whole pages."""
    entry_bytes = entry_dtype(block_tokens).itemsize
    return _whole_pages(PREFIX_BYTES + entry_bytes) + _whole_pages(block_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def _checked_source(arena: Arena, pool: int, slots: U32) -> tuple[Entries, Bool]:
    """Entries, with checksums, of blocks about to be written, and which blocks are intact."""
    entries: Entries = arena.table(pool)[slots]
    intact = whole_entries(entries, arena.block_bytes(pool))
    likely = np.flatnonzero(intact)
    sums = payload_sums(arena.payload(pool), slots[likely])
    fill_sums(entries, likely, sums)
    intact[likely] = sums_agree(entries, likely, sums)
    return entries, intact


def _slot_buffers(known: _Pool, headers: U8, memory: U8, arena_slots: U32) -> list[memoryview]:
    """Header and memory of consecutive disk slots, in the order they have on disk."""
    stride = memory.shape[1]
    padding = np.zeros(known.slot_bytes - known.header_bytes - stride, np.uint8)
    buffers: list[memoryview] = []
    for index, slot in enumerate(arena_slots.tolist()):
        buffers.append(headers[index].data)
        buffers.append(memory[slot].data)
        if len(padding):
            buffers.append(padding.data)
    return buffers
