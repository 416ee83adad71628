"""Test support: a small daemon on the real Listener. Its state is dicts, its arena a real file.

It keeps the contract that the client relies on (idempotent verbs, prefix sharing, copy-on-write,
leases) and lets a test cut connections, restart, forget and recover at will.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from tests.rpc.serving import Serving
from tierkv.core.spec import KVSpec, slot_stride
from tierkv.errors import CorruptionError, NamespaceMismatch, PoolExhausted, UnknownSequence
from tierkv.native.directory import PLACES, bucket_count, enter
from tierkv.rpc import messages as m
from tierkv.rpc.connection import Connection
from tierkv.tiers.entry import entry_dtype, split_hashes, write_entries

ARENA_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 16
SLOTS = 64
TABLE_BYTES = 1 << 16
BUCKETS = bucket_count(SLOTS)


@dataclass
class Held:
    namespace: int
    slots: list[int]
    sealed: int = 0
    suspended: bool = False


@dataclass
class Lease:
    number: int
    token: bytes
    sequences: dict[int, Held] = field(default_factory=dict)


class FakeDaemon:
    """``start`` and ``stop`` it; attributes say how it behaves. One namespace per spec."""

    def __init__(self, folder: Path, loop_factory) -> None:
        self.path = folder / "tierkv.sock"
        self.loop_factory = loop_factory
        self.state = "serving"
        self.epoch = 1
        self.next_lease = 1
        self.arena_file = folder / "arena"
        self.namespace_base = 1
        self.slot_offset = 4096
        self.leases: dict[bytes, Lease] = {}
        self.of_connection: dict[Connection, Lease] = {}
        self.requests: list[m.Request] = []
        self.cut_before: list[type] = []
        """Verbs at whose next arrival the connection is cut, before they are executed."""
        self.cut_after: list[type] = []
        """The same, after they are executed and before the reply."""
        self.silent: list[type] = []
        """Verbs whose next arrival is never answered."""
        self.lost_block: int | None = None
        """The block that the next resume finds damaged."""
        self.limits = None
        self.serving: Serving | None = None
        self.keep_leases = False
        """True: a connection that ends leaves its lease (as if the daemon had been the one)."""
        self.new_arena()

    # --- what tests do ----------------------------------------------------------------------------

    def new_arena(self) -> None:
        """A new, empty arena with a new identity: every sequence and block is gone."""
        self.arena_file.unlink(missing_ok=True)
        self.arena_fd = os.open(self.arena_file, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.arena_fd, ARENA_BYTES)
        self.table_fd = os.memfd_create("table", os.MFD_CLOEXEC)
        os.ftruncate(self.table_fd, 2 * TABLE_BYTES)
        self.table_map = mmap.mmap(self.table_fd, 2 * TABLE_BYTES)
        self.places = np.frombuffer(self.table_map, np.uint64, offset=TABLE_BYTES)[: 8 * BUCKETS]
        self.where = np.zeros(SLOTS, np.uint32)
        self.arena_id = os.urandom(16)
        self.arena = np.memmap(self.arena_file, np.uint8, "r+")
        self.specs: dict[int, KVSpec] = {}
        self.cached: dict[bytes, int] = {}
        self.checksums: dict[int, bytes] = {}
        self.free = list(range(SLOTS - 1, 0, -1))
        self.references: dict[int, int] = {}
        self.leases.clear()

    def start(self) -> FakeDaemon:
        self.serving = Serving(self, self.path, self.loop_factory, limits=self.limits)
        self.serving.__enter__()
        return self

    def stop(self, *, keep_leases: bool = True) -> None:
        """Die: connections break; leases stay for the next incarnation, or not."""
        if self.serving is not None:
            self.keep_leases = True
            self.serving.__exit__()
            self.keep_leases = False
            self.serving = None
        self.epoch += 1
        if not keep_leases:
            for lease in list(self.leases.values()):
                self.end_lease(lease)

    def restart(self, *, keep_leases: bool = True) -> None:
        self.stop(keep_leases=keep_leases)
        self.start()

    def close(self) -> None:
        self.stop()
        os.close(self.arena_fd)
        os.close(self.table_fd)

    def cut_all(self) -> None:
        """Break every connection; the daemon stays and keeps the leases."""

        def cut() -> None:
            self.keep_leases = True
            for connection in list(self.of_connection):
                connection.abort()
            self.keep_leases = False

        self.serving.call(cut)

    def count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.requests)

    def held(self) -> dict[int, Held]:
        """All sequences of all leases (tests use one lease)."""
        return {n: held for lease in self.leases.values() for n, held in lease.sequences.items()}

    def pool(self, spec: KVSpec) -> np.ndarray:
        stride = slot_stride(spec.block_bytes)
        return self.arena[self.slot_offset :][: SLOTS * stride].reshape(SLOTS, stride)

    # --- RequestHandler ---------------------------------------------------------------------------

    def greeting(self) -> m.Greeting:
        return m.Greeting(
            m.PROTOCOL_VERSION, self.epoch, self.arena_id, ARENA_BYTES, SCRATCH_BYTES, self.state
        )

    def connected(self, connection: Connection) -> None:
        pass

    def disconnected(self, connection: Connection) -> None:
        lease = self.of_connection.pop(connection, None)
        if lease is not None and not self.keep_leases:
            self.end_lease(lease)

    def request(self, connection: Connection, request_id: int, message: m.Request) -> None:
        self.requests.append(message)
        kind = type(message)
        if kind in self.cut_before:
            self.cut_before.remove(kind)
            self._cut(connection)
            return
        if kind in self.silent:
            self.silent.remove(kind)
            return
        if kind is m.Hello:
            reply = self.hello(connection, message)
        else:
            reply = getattr(self, kind.__struct_config__.tag)(
                self.of_connection[connection], message, connection
            )
        if kind in self.cut_after:
            self.cut_after.remove(kind)
            self._cut(connection)
            return
        connection.reply(request_id, reply)

    def _cut(self, connection: Connection) -> None:
        self.keep_leases = True
        connection.abort()
        self.keep_leases = False

    # --- verbs ------------------------------------------------------------------------------------

    def hello(self, connection: Connection, message: m.Hello) -> m.Welcome:
        lease = self.leases.get(message.token)
        resumed = lease is not None
        if lease is None:
            lease = Lease(self.next_lease, os.urandom(16))
            self.next_lease += 1
            self.leases[lease.token] = lease
        self.of_connection[connection] = lease
        states = [
            m.SequenceState(number, held.namespace, blob(held.slots), held.sealed, held.suspended)
            for number, held in lease.sequences.items()
        ]
        return m.Welcome(lease.number, lease.token, self.epoch, resumed, states)

    def open_namespace(self, lease, message, connection) -> m.NamespaceOpened:
        if message.digest != message.spec.digest:
            raise NamespaceMismatch("digests differ")
        known = [number for number, spec in self.specs.items() if spec == message.spec]
        number = known[0] if known else self.namespace_base + len(self.specs)
        self.specs[number] = message.spec
        stride = slot_stride(message.spec.block_bytes)
        entry_bytes = entry_dtype(message.spec.block_tokens).itemsize
        place = (0, entry_bytes, TABLE_BYTES, BUCKETS)
        return m.NamespaceOpened(number, self.slot_offset, stride, SLOTS, *place)

    def lookup(self, lease, message, connection) -> m.Found:
        blocks = len(self.prefix(message.hashes))
        return m.Found(blocks, blocks, 0, 0)

    def used(self, lease, message, connection) -> m.Done:
        return m.Done()

    def acquire(self, lease, message, connection) -> m.Table:
        if message.sequence not in lease.sequences:
            slots = self.prefix(message.hashes)
            self.hold(slots)
            lease.sequences[message.sequence] = Held(message.namespace, slots, len(slots))
            if message.room_tokens:
                self.make_room(lease, message)
        held = lease.sequences[message.sequence]
        return self.table(message.sequence, held, device=len(held.slots))

    def make_room(self, lease, message) -> None:
        held = lease.sequences[message.sequence]
        written = len(held.slots) * self.specs[held.namespace].block_tokens
        try:
            total = max(message.room_tokens, written)
            self.reserve(lease, m.Reserve(message.sequence, written, total), None)
        except PoolExhausted:
            self.drop(lease.sequences.pop(message.sequence).slots)
            raise

    def reserve(self, lease, message, connection) -> m.Table:
        held = self.find(lease, message.sequence)
        tokens = self.specs[held.namespace].block_tokens
        needed = -(-message.total_tokens // tokens)
        first = message.written_tokens // tokens
        shared = [i for i in range(first, len(held.slots)) if self.is_shared(held, i)]
        if needed - len(held.slots) + len(shared) > len(self.free):
            raise PoolExhausted("no room", tier="device", asked=needed, free=len(self.free))
        for i in shared:
            copy = self.take_slot()
            pool = self.pool(self.specs[held.namespace])
            pool[copy] = pool[held.slots[i]]
            self.drop([held.slots[i]])
            held.slots[i] = copy
        held.sealed = min(held.sealed, first)
        while len(held.slots) < needed:
            held.slots.append(self.take_slot())
        return self.table(message.sequence, held)

    def seal(self, lease, message, connection) -> m.Table:
        held = self.find(lease, message.sequence)
        spec = self.specs[held.namespace]
        for i in range(len(message.hashes) // 16):
            name = message.hashes[16 * i : 16 * i + 16]
            at = message.first + i
            slot = held.slots[at]
            existing = self.cached.get(name)
            if existing is None:
                payload = self.pool(spec)[slot, : spec.block_bytes]
                checksum = xxhash.xxh3_128_digest(payload.tobytes())
                assert checksum == message.checksums[16 * i : 16 * i + 16]
                self.cached[name] = slot
                self.show(spec, slot, held.slots[at - 1] if at else None, message, i, i)
            elif existing != slot:
                self.hold([existing])
                self.drop([slot])
                held.slots[at] = existing
            held.sealed = max(held.sealed, at + 1)
        return self.table(message.sequence, held)

    def store(self, lease, message, connection) -> m.Stored:
        count = len(message.checksums) // 16
        if message.new_stock in lease.sequences and message.stock not in lease.sequences:
            return m.Stored(count, blob(lease.sequences[message.new_stock].slots))
        held = self.find(lease, message.stock)
        spec, first = self.specs[message.namespace], message.first
        assert len(message.hashes) // 16 == first + count
        assert len(message.tokens) == 4 * spec.block_tokens * (first + count)
        if len(self.prefix(message.hashes)) < first:
            return m.Stored(0, b"")
        left = held.slots[count:]
        for i, slot in enumerate(held.slots[:count]):
            name = message.hashes[16 * (first + i) :][:16]
            if name in self.cached:
                left.append(slot)
                continue
            payload = self.pool(spec)[slot, : spec.block_bytes].tobytes()
            assert xxhash.xxh3_128_digest(payload) == message.checksums[16 * i :][:16]
            self.cached[name] = slot
            before = self.cached[message.hashes[16 * (first + i - 1) :][:16]] if first + i else None
            self.show(spec, slot, before, message, first + i, i)
        del lease.sequences[message.stock]
        self.drop([slot for slot in held.slots if slot not in left[: message.room_blocks]])
        new = Held(message.namespace, left[: message.room_blocks])
        while len(new.slots) < message.room_blocks and self.free:
            new.slots.append(self.take_slot())
        lease.sequences[message.new_stock] = new
        return m.Stored(count, blob(new.slots))

    def show(
        self,
        spec: KVSpec,
        slot: int,
        before: int | None,
        message: m.Seal | m.Store,
        at: int,
        i: int,
    ) -> None:
        """Let workers find the block in this slot, behind that in the slot ``before``.

        It is the message's number ``at`` by name and number ``i`` by checksum.
        """
        size = spec.block_tokens
        table = np.frombuffer(self.table_map, entry_dtype(size), SLOTS)
        hi, lo = split_hashes(message.hashes[16 * at : 16 * at + 16])
        sum_hi, sum_lo = split_hashes(message.checksums[16 * i : 16 * i + 16])
        write_entries(
            table,
            np.array([slot]),
            ids=np.array([slot + 1], np.uint64),
            parents=np.array([0 if before is None else before + 1], np.uint64),
            hash_hi=hi,
            hash_lo=lo,
            sum_hi=sum_hi,
            sum_lo=sum_lo,
            tokens=np.frombuffer(message.tokens, "<u4").reshape(-1, size)[at : at + 1],
            length=spec.block_bytes,
            digest=spec.digest,
            extra=np.frombuffer(message.extras, "<u8")[at] if message.extras else 0,
        )
        enter(self.places.reshape(-1, PLACES), self.where, np.array([slot]), lo)

    def truncate(self, lease, message, connection) -> m.Table:
        held = self.find(lease, message.sequence)
        blocks = -(-message.tokens // self.specs[held.namespace].block_tokens)
        self.drop(held.slots[blocks:])
        del held.slots[blocks:]
        held.sealed = min(held.sealed, blocks)
        return self.table(message.sequence, held)

    def fork(self, lease, message, connection) -> m.Table:
        held = self.find(lease, message.sequence)
        if message.new_sequence not in lease.sequences:
            blocks = -(-message.tokens // self.specs[held.namespace].block_tokens)
            slots = held.slots[:blocks]
            self.hold(slots)
            lease.sequences[message.new_sequence] = Held(
                held.namespace, slots, min(held.sealed, blocks)
            )
        return self.table(message.new_sequence, lease.sequences[message.new_sequence])

    def suspend(self, lease, message, connection) -> m.Done:
        self.find(lease, message.sequence).suspended = True
        return m.Done()

    def resume(self, lease, message, connection) -> m.Table:
        held = self.find(lease, message.sequence)
        if self.lost_block is not None:
            kept, self.lost_block = self.lost_block, None
            self.drop(held.slots[kept:])
            del held.slots[kept:]
            held.sealed = min(held.sealed, kept)
            raise CorruptionError("a block is lost", blocks=kept)
        if held.suspended:
            held.suspended = False
            pool = self.pool(self.specs[held.namespace])
            for i, slot in enumerate(held.slots):
                if not self.is_shared(held, i):
                    held.slots[i] = self.take_slot()
                    pool[held.slots[i]] = pool[slot]
                    self.drop([slot])
        return self.table(message.sequence, held)

    def release(self, lease, message, connection) -> m.Done:
        for number in message.sequences:
            held = lease.sequences.pop(number, None)
            if held is not None:
                self.drop(held.slots)
        return m.Done()

    def attend(self, lease, message, connection) -> m.Done:
        """Not attention: the query doubled, so that a test sees its bytes make the trip."""
        spec = self.specs[message.namespace]
        rows = int(np.frombuffer(message.q_indptr, "<u4")[-1])
        count = rows * message.q_heads * spec.head_dim
        size = 4 * count
        q = np.frombuffer(os.pread(connection.scratch_fd, size, message.q_offset), np.float32)
        os.pwrite(connection.scratch_fd, (2 * q).tobytes(), message.out_offset)
        return m.Done()

    def stat(self, lease, message, connection) -> m.Status:
        return m.Status({"epoch": self.epoch, "slots_free": len(self.free)})

    def flush(self, lease, message, connection) -> m.Done:
        return m.Done()

    # --- blocks -----------------------------------------------------------------------------------

    def prefix(self, hashes: bytes) -> list[int]:
        slots = []
        for i in range(0, len(hashes), 16):
            slot = self.cached.get(hashes[i : i + 16])
            if slot is None:
                break
            slots.append(slot)
        return slots

    def is_shared(self, held: Held, i: int) -> bool:
        slot = held.slots[i]
        return self.references[slot] > 1 or slot in self.cached.values()

    def find(self, lease: Lease, number: int) -> Held:
        if number not in lease.sequences:
            raise UnknownSequence(f"no sequence {number}")
        return lease.sequences[number]

    def take_slot(self) -> int:
        slot = self.free.pop()
        self.references[slot] = 1
        return slot

    def hold(self, slots: list[int]) -> None:
        for slot in slots:
            self.references[slot] = self.references.get(slot, 0) + 1

    def drop(self, slots: list[int]) -> None:
        for slot in slots:
            self.references[slot] -= 1
            if not self.references[slot] and slot not in self.cached.values():
                self.free.append(slot)

    def end_lease(self, lease: Lease) -> None:
        self.leases.pop(lease.token, None)
        for held in lease.sequences.values():
            self.drop(held.slots)

    def table(self, number: int, held: Held, device: int = 0) -> m.Table:
        return m.Table(number, blob(held.slots), held.sealed, device=device)


def blob(slots: list[int]) -> bytes:
    return np.array(slots, "<u4").tobytes()
