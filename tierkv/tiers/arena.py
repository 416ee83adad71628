"""One RAM tier: payload slots and their slot tables in two shared, sparse files.

Where the two files are kept while no daemon runs is the matter of an ``ArenaHome``. The first
holds the payload (see ``payload``, it may also be a GPU's memory). Pool p owns the bytes
[p * region, (p + 1) * region), where the region is the tier's whole budget: the pools share the
budget (the core does the accounting), so one descriptor covers every pool there is or will be.
Only touched pages exist.

The second, the table, says what lies in the slots (little-endian):

    page 0   magic TKVARN\\0\\1, version u4, 4 x 0, store uuid 16, arena identity 16, boot id 48,
             budget u8, region u8, xxh3_64 of the bytes before it u8
    page 1   64 pool records of 64 bytes: block bytes u8, table offset u8, table bytes u8,
             block tokens u4, 4 x 0, xxh3_64 of the bytes before it u8; all 0 = no such pool
    then     per pool, in order of creation, two page-aligned arrays: entries (see ``entry``), and
             the directory (see ``native.directory``), which no process takes over from another

Memory: a page exists from when it is first written, or ``populate`` takes it, until it is given
back.

Threads: ``add_pool`` may be called at any time from any thread; ``close`` only when no other
call runs. Everything else may run at the same time on different slots. Who may use which slot when
is for the caller to say.

Crash: the files stay when the process dies, and so does every byte that was stored in them. An
entry is to be trusted only if its check holds and its id is what the log says about that slot.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import xxhash

from tierkv.core.ids import U8, U32, U64
from tierkv.core.spec import PAGE, slot_stride
from tierkv.core.state import PoolShape
from tierkv.errors import (
    ConfigError,
    InvariantViolation,
    LimitExceeded,
    TierFailed,
    TierFull,
    require,
)
from tierkv.gpu import Gpu, GpuRows
from tierkv.native.directory import PLACE_BYTES, PLACES, bucket_count
from tierkv.native.loops import Slots, loops
from tierkv.pages import backed_ranges, huge_bytes, populate
from tierkv.tiers.entry import Entries, entry_dtype
from tierkv.tiers.linux import is_tmpfs, punch_hole
from tierkv.tiers.numa import NodePolicy
from tierkv.tiers.payload import FilePayload, Payload, choose_nodes
from tierkv.tiers.runs import consecutive_runs

POOLS_MAX = 64
REGION_ALIGN = 2 << 20
IDENTITY_BYTES = 16

_MAGIC = b"TKVARN\x00\x01"
_VERSION = 3
_HEADER = struct.Struct("<8sI4x16s16s48sQQ")
_POOL_RECORD = struct.Struct("<QQQI4x")
_CHECK = struct.Struct("<Q")
_POOL_RECORD_BYTES = 64
_POOLS_OFFSET = PAGE
_TABLES_OFFSET = 2 * PAGE
_STAT_BLOCK = 512


class ArenaFds(NamedTuple):
    """Descriptors of an arena's two files, open for reading and writing."""

    payload: int
    table: int

    @property
    def used_bytes(self) -> int:
        """Memory that the two files take."""
        return sum(os.fstat(fd).st_blocks * _STAT_BLOCK for fd in self)

    def close(self) -> None:
        """Close both."""
        for fd in self:
            os.close(fd)


class ArenaHome(Protocol):
    """Where arenas are kept while no daemon runs. ``str`` of it names the place for people.

    Every method raises OSError or TierkvError.
    """

    def find(self, name: str) -> ArenaFds | None:
        """The arena that an earlier process left, None unless both files are there.

        The caller closes the descriptors.
        """

    def free_bytes(self) -> int:
        """How much more arenas may grow here, bytes."""

    def make(self, name: str, payload_bytes: int, table: bytes) -> ArenaFds:
        """A new arena: a sparse payload file of so many bytes, and a table that begins so.

        The caller closes the descriptors. There must be none of this name.

        Crash: ``find`` gives both files whole, or nothing.
        """

    def drop(self, name: str) -> None:
        """Forget the arena, if there is one: ``find`` gives it to nobody any more.

        Crash: it may be there, whole, or not.
        """


class TablePlace(NamedTuple):
    """Where a pool's entries and its directory lie in the table file; offsets in bytes."""

    entries_offset: int
    entry_bytes: int
    directory_offset: int
    buckets: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """``table_bytes``: all that is mapped of the table; entries and places lie in there.

    ``region``: all that is mapped of the slots, None where they lie on a ``gpu``.
    ``where``: see ``native.directory``.
    """

    block_bytes: int
    block_tokens: int
    stride: int
    count: int
    table: Entries
    table_offset: int
    places: U64
    where: U32
    region: U8 | None
    gpu: GpuRows | None
    table_bytes: U8
    table_map: mmap.mmap


class Arena:
    """The slots of one RAM tier. Made by ``Arena.open``.

    ``adopted`` says whether the files of an earlier process were taken over, and
    ``adopted_bytes`` how much memory they took then. ``identity`` (16 bytes) names the arena from
    its creation on, ``region_bytes`` is the distance from one pool's first slot to the next one's.
    ``numa`` says where its pages go; None: where they are first written. Pool numbers are below
    ``pools_max``.
    """

    def __init__(
        self,
        name: str,
        payload: Payload,
        table_fd: int,
        budget_bytes: int,
        identity: bytes,
        numa: NodePolicy | None,
        *,
        adopted_bytes: int | None,
        pools_max: int,
    ) -> None:
        """``adopted_bytes``: None if it is new."""
        self.name = name
        self.numa = numa
        self.identity = identity
        self.adopted = adopted_bytes is not None
        self.adopted_bytes = adopted_bytes or 0
        self.budget_bytes = budget_bytes
        self.pools_max = pools_max
        self.region_bytes = _region(budget_bytes)
        self._payload = payload
        self._pools: dict[int, _Pool] = {}
        self._adding = threading.Lock()
        self._table_fd = table_fd
        self._shown_table_fd = -1

    @classmethod
    def open(
        cls,
        home: ArenaHome,
        name: str,
        budget_bytes: int,
        store: bytes,
        boot_id: str,
        numa: NodePolicy | None = None,
    ) -> Self:
        """Take over the arena that an earlier process left at ``home``, or make a new one there.

        Taken over is what was made for the same ``store`` (uuid, 16 bytes) and budget and, in
        memory, under the same boot of the kernel (``boot_id``). Takes no longer for big arenas.
        ``numa``: on which nodes new pages shall lie.

        Raises TierFull if the home cannot hold the budget, ConfigError for a budget below 1,
        TierFailed if the files cannot be made.

        Crash: see ``ArenaHome``.
        """
        if budget_bytes < 1:
            raise ConfigError(f"{name}.bytes is {budget_bytes}; it must be at least 1")
        require(len(store) == IDENTITY_BYTES, "a store uuid has 16 bytes")
        try:
            with contextlib.ExitStack() as failing:
                left = home.find(name)
                if left is not None:
                    failing.callback(left.close)
                    identity = _adoptable(left, budget_bytes, store, boot_id)
                    if identity is not None:
                        _require_space(home, name, budget_bytes, left.used_bytes)
                        failing.pop_all()
                        return cls._of(left, name, budget_bytes, identity, numa, left.used_bytes)
            home.drop(name)
            _require_space(home, name, budget_bytes, 0)
            identity = os.urandom(IDENTITY_BYTES)
            header = _header(budget_bytes, store, boot_id, identity)
            made = home.make(name, _payload_bytes(budget_bytes), header)
            return cls._of(made, name, budget_bytes, identity, numa, None)
        except OSError as error:
            raise TierFailed(f"cannot set up the {name} arena in {home}: {error}") from error

    @classmethod
    def _of(
        cls,
        fds: ArenaFds,
        name: str,
        budget_bytes: int,
        identity: bytes,
        numa: NodePolicy | None,
        adopted_bytes: int | None,
    ) -> Self:
        return cls(
            name,
            FilePayload(fds.payload, _region(budget_bytes), numa),
            fds.table,
            budget_bytes,
            identity,
            numa,
            adopted_bytes=adopted_bytes,
            pools_max=POOLS_MAX,
        )

    @classmethod
    def on(cls, payload: Payload, name: str, budget_bytes: int, pools_max: int) -> Self:
        """An arena on memory that does not outlive this process, which it owns from now on.

        It has no past and no future: its table is memory without a name. Raises TierFailed.
        """
        identity = os.urandom(IDENTITY_BYTES)
        header = _header(budget_bytes, bytes(IDENTITY_BYTES), "", identity)
        try:
            table_fd = os.memfd_create(f"tierkv-{name}.table", os.MFD_CLOEXEC)
            os.fchmod(table_fd, 0o600)  # it is shown to workers for reading only
            os.pwrite(table_fd, header, 0)
        except OSError as error:
            raise TierFailed(f"cannot make the table of the {name} arena: {error}") from error
        return cls(
            name,
            payload,
            table_fd,
            budget_bytes,
            identity,
            None,
            adopted_bytes=None,
            pools_max=pools_max,
        )

    @property
    def fd(self) -> int:
        """What workers map for the payload; negative once the arena is closed."""
        return self._payload.fd

    @property
    def size_bytes(self) -> int:
        """How much they map."""
        return self._payload.size_bytes

    @property
    def on_gpu(self) -> Gpu | None:
        """The GPU that the payload lies on; None: it is host memory."""
        return self._payload.on_gpu

    def has(self, pool: int) -> bool:
        """Whether the pool was added."""
        return pool in self._pools

    def add_pool(self, pool: int, block_bytes: int, block_tokens: int) -> bool:
        """Map a pool's slots and table; True if an earlier process left it, with this geometry.

        Adding a pool again changes nothing. Raises LimitExceeded for a pool number above the
        limit, TierFull or TierFailed if the table cannot be made.

        Crash: the pool's record is written after its table, so that a table is never half there.
        """
        if not 0 <= pool < self.pools_max:
            raise LimitExceeded(
                f"pool {pool} passes the {self.pools_max} pools of the {self.name} arena: too "
                "many block sizes; start another daemon, in another state directory, for more",
                limit=self.pools_max,
                asked=pool + 1,
            )
        with self._adding:
            present = self._pools.get(pool)
            if present is not None:
                same = (present.block_bytes, present.block_tokens) == (block_bytes, block_tokens)
                require(same, f"pool {pool} was added before with another geometry")
                return True
            try:
                offset, kept = self._place_table(pool, block_bytes, block_tokens)
                self._pools[pool] = self._map_pool(pool, block_bytes, block_tokens, offset)
            except OSError as error:
                kind = TierFull if error.errno == errno.ENOSPC else TierFailed
                raise kind(f"cannot add pool {pool} to the {self.name} arena: {error}") from error
            return kept

    def recorded_pools(self) -> dict[int, PoolShape]:
        """The pools that any process has added so far, with their geometry."""
        records = {pool: self._recorded(pool) for pool in range(POOLS_MAX)}
        return {
            pool: PoolShape(record[0], record[3])
            for pool, record in records.items()
            if record is not None
        }

    def slots(self, pool: int) -> U8:
        """The pool's slots, shape [count, stride], sharing memory with the file.

        Raises InvariantViolation if they are not host memory; see ``gpu``.
        """
        known = self._pool(pool)
        return _host(known)[: known.count * known.stride].reshape(known.count, known.stride)

    def gpu(self, pool: int) -> GpuRows | None:
        """The same if they lie on a GPU, else None."""
        return self._pool(pool).gpu

    def payload(self, pool: int) -> U8:
        """The pool's slots without their padding, shape [count, block_bytes]."""
        return self.slots(pool)[:, : self._pool(pool).block_bytes]

    def table(self, pool: int) -> Entries:
        """The pool's slot table, shape [count], sharing memory with the file."""
        return self._pool(pool).table

    def block_bytes(self, pool: int) -> int:
        """Payload bytes of the pool's blocks."""
        return self._pool(pool).block_bytes

    def block_tokens(self, pool: int) -> int:
        """Tokens of the pool's blocks."""
        return self._pool(pool).block_tokens

    def empty(self, pool: int, slots: U32) -> None:
        """Say in the slot table that the slots (shape [n]) hold nothing."""
        table = self.table(pool)
        table[slots] = np.zeros((), table.dtype)

    def punch(self, pool: int, slots: U32) -> None:
        """Empty the slots (shape [n]) and give their whole pages back to the file system.

        Raises TierFailed.
        """
        self.empty(pool, slots)
        known = self._pool(pool)
        for run in consecutive_runs(slots, length_max=known.count):
            offset = pool * self.region_bytes + int(slots[run[0]]) * known.stride
            try:
                self._payload.free(offset, offset + len(run) * known.stride)
            except OSError as error:
                raise TierFailed(f"cannot free slots of the {self.name} arena: {error}") from error

    # --- what workers look at ---------------------------------------------------------------------

    @property
    def shown_table_fd(self) -> int:
        """The table file again, for those who must not write into it."""
        if self._shown_table_fd < 0:
            self._shown_table_fd = os.open(f"/proc/self/fd/{self._table_fd}", os.O_RDONLY)
        return self._shown_table_fd

    def table_place(self, pool: int) -> TablePlace:
        """Where the pool's entries and its directory lie in the table file."""
        known = self._pool(pool)
        return TablePlace(
            known.table_offset,
            known.table.dtype.itemsize,
            known.table_offset + _entries_bytes(len(known.table), known.block_tokens),
            len(known.places),
        )

    def enter(self, pool: int, slots: Slots, hash_lo: U64) -> None:
        """Let the directory say that slots hold sealed blocks of these names (low halves, [n])."""
        known = self._pool(pool)
        loops().enter(known.places, known.where, slots, hash_lo)

    def leave(self, pool: int, slots: Slots) -> None:
        """Let the directory say that slots hold nothing that may be read."""
        known = self._pool(pool)
        loops().leave(known.places, known.where, slots)

    # --- memory -----------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Memory that the payload takes, in slots that hold something or not."""
        return self._payload.used_bytes

    @property
    def had_first(self) -> bool:
        """Whether there is, or was, a first pool, whose memory adding another one gives back."""
        return any(self._record_of(0))

    def last_backed(self, pool: int) -> int:
        """The first slot from which on none of the pool has memory. Walks all pages of the pool.

        Raises OSError.
        """
        start = pool * self.region_bytes
        ranges = backed_ranges(self.fd, start, start + self.region_bytes)
        end = max((stop for _, stop in ranges), default=start)
        known = self._pool(pool)
        return int(min(-(-(end - start) // known.stride), known.count))

    def map_backed(self, pool: int, is_stopped: Callable[[], bool]) -> None:
        """Map the memory that the pool has into this process. Raises OSError.

        Without this each page is, when it is first used.
        """
        start, region = pool * self.region_bytes, _host(self._pool(pool))
        for first, stop in backed_ranges(self.fd, start, start + self.region_bytes):
            populate(region, first - start, stop - start, is_stopped)

    def populate(self, pool: int, first: int, stop: int, is_stopped: Callable[[], bool]) -> None:
        """Take the memory of slots ``first`` to ``stop`` and of their entries, whatever they hold.

        Raises OSError: EFAULT if the file system is full.
        """
        known = self._pool(pool)
        self.populate_entries(pool, first, stop, is_stopped)
        populate(_host(known), first * known.stride, stop * known.stride, is_stopped)

    def populate_entries(
        self, pool: int, first: int, stop: int, is_stopped: Callable[[], bool]
    ) -> None:
        """Take the memory of the entries of slots ``first`` to ``stop`` only. See ``populate``.

        And as large a part of the directory's.
        """
        known = self._pool(pool)
        count, entry = len(known.table), known.table.dtype.itemsize
        populate(known.table_bytes, first * entry, stop * entry, is_stopped)
        directory = known.table_bytes[_entries_bytes(count, known.block_tokens) :]
        per_slot = directory.nbytes / max(count, 1)
        populate(directory, int(first * per_slot), int(stop * per_slot), is_stopped)

    def populate_first(self, start: int, stop: int, is_stopped: Callable[[], bool]) -> None:
        """Take memory for the first pool before it is there: of its bytes ``start`` to ``stop``.

        How large its slots will be does not matter. Raises OSError: see ``populate``.
        """
        with self._adding:
            region = self._payload.host(0)
        populate(region, start, stop, is_stopped)

    def huge_bytes(self, pool: int, first: int, stop: int) -> int:
        """How much of slots ``first`` to ``stop`` this process has mapped as huge pages.

        0 if the kernel does not tell (Linux 6.7 does).
        """
        known = self._pool(pool)
        start = first * known.stride // PAGE * PAGE
        try:
            return huge_bytes(_host(known), start, stop * known.stride)
        except OSError:
            return 0

    def give_back(self, pool: int, first: int, stop: int) -> None:
        """Give the memory of slots ``first`` to ``stop`` back. They must hold nothing.

        Raises OSError.
        """
        start, stride = pool * self.region_bytes, self._pool(pool).stride
        self._payload.free(start + first * stride, start + stop * stride)

    def close(self) -> None:
        """Unmap and close the files, which stay. Views handed out keep their own mapping alive.

        Closing again does nothing.
        """
        maps = [pool.table_map for pool in self._pools.values()]
        self._pools.clear()
        self._payload.close()
        for mapped in maps:
            with contextlib.suppress(BufferError):  # a view is still held: it goes with that
                mapped.close()
        for fd in (self._table_fd, self._shown_table_fd):
            if fd >= 0:
                os.close(fd)
        self._table_fd = self._shown_table_fd = -1

    def _pool(self, pool: int) -> _Pool:
        try:
            return self._pools[pool]
        except KeyError:
            raise InvariantViolation(
                f"pool {pool} was not added to the {self.name} arena"
            ) from None

    def _place_table(self, pool: int, block_bytes: int, block_tokens: int) -> tuple[int, bool]:
        """Where the pool's table lies in the table file, and whether it was there before."""
        count = self.budget_bytes // slot_stride(block_bytes)
        entries = _entries_bytes(count, block_tokens)
        size = entries + _directory_bytes(count)
        end = os.fstat(self._table_fd).st_size
        recorded = self._recorded(pool)
        is_new = not any(self._record_of(pool))
        if recorded is not None:
            old_block_bytes, offset, old_size, old_block_tokens = recorded
            same = (old_block_bytes, old_block_tokens, old_size) == (
                block_bytes,
                block_tokens,
                size,
            )
            if same and offset + size <= end:
                punch_hole(self._table_fd, offset + entries, size - entries)
                return offset, True
            self._record(pool, bytes(_POOL_RECORD_BYTES))
            punch_hole(self._table_fd, offset, old_size)
        if not is_new:  # else there may be memory that was taken before, and nothing in it
            start = pool * self.region_bytes
            self._payload.free(start, start + self.region_bytes)
        offset = _round_up(end, PAGE)
        os.ftruncate(self._table_fd, offset + size)
        self._record(pool, _with_check(_POOL_RECORD.pack(block_bytes, offset, size, block_tokens)))
        return offset, False

    def _record_of(self, pool: int) -> bytes:
        at = _POOLS_OFFSET + pool * _POOL_RECORD_BYTES
        return os.pread(self._table_fd, _POOL_RECORD.size + _CHECK.size, at)

    def _recorded(self, pool: int) -> tuple[int, int, int, int] | None:
        body = _checked(self._record_of(pool))
        if body is None:
            return None
        block_bytes, offset, size, block_tokens = _POOL_RECORD.unpack(body)
        return block_bytes, offset, size, block_tokens

    def _record(self, pool: int, record: bytes) -> None:
        os.pwrite(self._table_fd, record, _POOLS_OFFSET + pool * _POOL_RECORD_BYTES)

    def _map_pool(self, pool: int, block_bytes: int, block_tokens: int, offset: int) -> _Pool:
        stride = slot_stride(block_bytes)
        count = self.budget_bytes // stride
        dtype = entry_dtype(block_tokens)
        gpu = self._payload.gpu(pool, block_bytes)
        entries_bytes = _entries_bytes(count, block_tokens)
        size = entries_bytes + _directory_bytes(count)
        table_map = mmap.mmap(self._table_fd, size, offset=offset)
        table_bytes = np.frombuffer(table_map, np.uint8)
        choose_nodes(table_bytes, self.numa)
        return _Pool(
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            stride=stride,
            count=count,
            table=np.frombuffer(table_map, dtype, count) if count else np.zeros(0, dtype),
            table_offset=offset,
            places=np.frombuffer(
                table_map, np.uint64, bucket_count(count) * PLACES, entries_bytes
            ).reshape(-1, PLACES),
            where=np.zeros(count, np.uint32),
            region=self._payload.host(pool) if gpu is None else None,
            gpu=gpu,
            table_bytes=table_bytes,
            table_map=table_map,
        )


def _host(pool: _Pool) -> U8:
    if pool.region is None:
        raise InvariantViolation("slots on a GPU were to be used as host memory")
    return pool.region


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _entries_bytes(slots: int, block_tokens: int) -> int:
    return _round_up(max(slots * entry_dtype(block_tokens).itemsize, 1), PAGE)


def _directory_bytes(slots: int) -> int:
    return _round_up(bucket_count(slots) * PLACES * PLACE_BYTES, PAGE)


def _region(budget_bytes: int) -> int:
    return _round_up(budget_bytes, REGION_ALIGN)


def _payload_bytes(budget_bytes: int) -> int:
    return POOLS_MAX * _region(budget_bytes)


def _with_check(body: bytes) -> bytes:
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def _checked(data: bytes) -> bytes | None:
    """The bytes before the check at the end of ``data``, or None if it does not hold."""
    body, check = data[: -_CHECK.size], data[-_CHECK.size :]
    return body if _with_check(body)[-_CHECK.size :] == check else None


def _header(budget_bytes: int, store: bytes, boot_id: str, identity: bytes) -> bytes:
    """The beginning of a new table: no pools yet."""
    region_bytes = _region(budget_bytes)
    header = _HEADER.pack(
        _MAGIC, _VERSION, store, identity, boot_id.encode(), budget_bytes, region_bytes
    )
    return _with_check(header).ljust(_TABLES_OFFSET, b"\0")


def _adoptable(fds: ArenaFds, budget_bytes: int, store: bytes, boot_id: str) -> bytes | None:
    """The identity of the arena in these files, or None if it is not ours to take over."""
    body = _checked(os.pread(fds.table, _HEADER.size + _CHECK.size, 0))
    if body is None:
        return None
    magic, version, old_store, identity, old_boot, old_budget, old_region = _HEADER.unpack(body)
    ours = (
        (magic, version, old_store) == (_MAGIC, _VERSION, store)
        and (old_budget, old_region) == (budget_bytes, _region(budget_bytes))
        and os.fstat(fds.payload).st_size == _payload_bytes(budget_bytes)
        and os.fstat(fds.table).st_size >= _TABLES_OFFSET
        and (old_boot.rstrip(b"\0").decode() == boot_id or not is_tmpfs(fds.payload))
    )
    return bytes(identity) if ours else None


def _require_space(home: ArenaHome, name: str, budget_bytes: int, taken_bytes: int) -> None:
    """Raise TierFull if there is no room for the budget: a page fault has no error path."""
    free_bytes = home.free_bytes() + taken_bytes
    if free_bytes < budget_bytes:
        raise TierFull(
            f"{home} has {free_bytes} bytes for the {name} tier, which may grow to"
            f" {budget_bytes}: lower {name}.bytes or make room there",
            free=free_bytes,
            asked=budget_bytes,
        )
