"""A namespace as the worker holds it: the pool it maps, and where sequences begin."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from tierkv.client.attach import MappedArena
from tierkv.client.copying import paged_blocks, rows_of
from tierkv.client.core import ClientCore, Steps, expect
from tierkv.client.memory import GonePool, GpuPool, HostPool, PoolMemory, in_one_piece
from tierkv.client.sequences import (
    ExtraKeys,
    FoundPrefix,
    SequenceCore,
    extras_blob,
    extras_of,
)
from tierkv.client.stock import Piece, Stock
from tierkv.client.tokens import TokenIds, token_array
from tierkv.client.uses import Uses
from tierkv.core.ids import I32, U8, U32, U64
from tierkv.core.prefix import HASH_BYTES, extra_digests
from tierkv.core.spec import DTYPE_BYTES, KVSpec
from tierkv.errors import InvalidArgument, InvariantViolation, LimitExceeded, ProtocolError
from tierkv.gpu import GpuRows
from tierkv.native.directory import PLACE_BYTES, PLACES
from tierkv.native.pages import PagedBlocks, Rows
from tierkv.native.reading import Readable
from tierkv.rpc.messages import (
    Acquire,
    Attend,
    Done,
    Existing,
    Exists,
    Found,
    Lookup,
    NamespaceOpened,
    OpenNamespace,
    Request,
    Table,
    Used,
)

SCRATCH_ALIGN = 64
SUM_AT = 32
"""Where an entry has the payload's checksum, see ``tiers.entry``."""
NO_EXTRAS: U64 = np.empty(0, np.uint64)


class AttendPlan(NamedTuple):
    """One paged attention: everything but the query.

    ``tables`` i32 [n, longest], ``seq_lens`` u32 [n], ``q_indptr`` u32 [n + 1].
    """

    layer: int
    sequences: list[SequenceCore]
    tables: I32
    seq_lens: U32
    q_indptr: U32
    q_heads: int
    scale: float
    causal: bool
    window: int
    softcap: float


class Reading(NamedTuple):
    """A read on its way: of a chain, it is to copy the blocks from ``first`` on into ``rows``.

    ``found``: how many leading blocks of the chain are there.
    """

    tokens: U32
    extras: U64
    hashes: U8
    first: int
    rows: Rows
    found: int

    @property
    def copied(self) -> int:
        """How many blocks have been copied."""
        return max(self.found - self.first, 0)

    @property
    def done(self) -> bool:
        """Whether nothing is missing."""
        return self.found == len(self.hashes)

    @property
    def wanted(self) -> U8:
        """Names of the blocks to be copied, u8 [n, 16]."""
        return self.hashes[self.first :]


class NamespaceCore:
    """``memory``: the namespace's part of the arena, another one after that was mapped anew."""

    def __init__(self, client: ClientCore, spec: KVSpec) -> None:
        self.client = client
        self.spec = spec
        self.digest = spec.digest
        self.id = 0
        self.memory: PoolMemory
        self.uses = Uses()
        self._entries: U8
        self._readable: Readable | None = None
        self._place: object = None
        self._stock = Stock(self)

    def ask_open(self) -> Request:
        """The request that opens this namespace on a connection."""
        return OpenNamespace(self.spec, self.digest)

    def adopt(self, opened: NamespaceOpened) -> bool:
        """Take the daemon's word on id and place; True if the place has changed.

        Raises ProtocolError when the pool does not fit the arena or a block not its slot.
        """
        arena = self.client.arena
        end = opened.slot_offset + opened.slots * opened.slot_stride
        if arena is None or opened.slot_offset < 0 or opened.slots < 0 or end > arena.size_bytes:
            raise ProtocolError(
                f"namespace {opened.namespace} ends at byte {end}, outside of the arena"
            )
        if opened.slot_stride < self.spec.block_bytes:
            raise ProtocolError(
                f"slots of {opened.slot_stride} bytes for blocks of {self.spec.block_bytes}"
            )
        self.id = opened.namespace
        # After a reconnect, too: a new daemon goes on taking.
        arena.populate(opened.slot_offset, end)
        place = (arena, msgspec.structs.replace(opened, namespace=0))
        if place == self._place:
            return False
        memory = self._map_slots(arena, opened)
        self._map_table(arena, opened, memory)
        self.memory, self._place = memory, place
        return True

    def let_go(self) -> None:
        """Map the slots no more. Views of them that somebody holds keep the mapping."""
        self.memory, self._place = GonePool(len(self.memory)), None

    def _map_slots(self, arena: MappedArena, opened: NamespaceOpened) -> PoolMemory:
        first, count, stride = opened.slot_offset, opened.slots, opened.slot_stride
        loops, block_bytes = self.client.loops, self.spec.block_bytes
        if arena.gpu is not None:
            return GpuPool(loops, GpuRows(arena.gpu, first, count, stride, block_bytes))
        slots = arena.data[first : first + count * stride].reshape(count, stride)
        return HostPool(loops, slots, block_bytes)

    def _map_table(self, arena: MappedArena, opened: NamespaceOpened, memory: PoolMemory) -> None:
        places_bytes = opened.buckets * PLACES * PLACE_BYTES
        places_at = opened.directory_offset - opened.entries_offset
        entries_bytes = opened.slots * opened.entry_bytes
        if not 0 <= entries_bytes <= places_at or opened.buckets <= 0 or places_at % PLACE_BYTES:
            raise ProtocolError(f"namespace {opened.namespace} has no table: {opened}")
        mapped = arena.map_table(opened.entries_offset, places_at + places_bytes)
        entries = mapped[:entries_bytes].reshape(opened.slots, opened.entry_bytes)
        places = mapped[places_at:].view(np.uint64).reshape(-1, PLACES)
        self._entries, self._readable = entries, None
        if not isinstance(memory, HostPool):
            return
        payload, tokens = memory.payload, self.spec.block_tokens
        try:
            self._readable = Readable(entries, payload, places, self.digest, tokens)
        except InvariantViolation as error:
            raise ProtocolError(f"namespace {opened.namespace}: {error.message}") from error

    def lookup(
        self,
        token_ids: TokenIds,
        keep: int,
        extra_keys: ExtraKeys | None,
        prefetch: bool = False,
    ) -> Steps[FoundPrefix]:
        """How many leading tokens are cached."""
        tokens, extras = self._offer(token_ids, keep, extra_keys)
        hashes = self._hashes(tokens, extras).tobytes()
        found = expect((yield lambda: Lookup(self.id, hashes, prefetch)), Found)
        tokens_found = found.blocks * self.spec.block_tokens
        load_s = found.load_us / 1e6
        return FoundPrefix(tokens_found, found.device, found.host, found.disk, load_s)

    def exists(self, hashes: U8) -> Steps[U8]:
        """The fastest tier of each block (u8 [n]), 255 where it is not cached."""
        blob = np.ascontiguousarray(hashes).tobytes()
        found = expect((yield lambda: Exists(self.id, blob)), Existing)
        return np.frombuffer(found.tiers, np.uint8)

    def begin(
        self,
        token_ids: TokenIds,
        keep: int,
        extra_keys: ExtraKeys | None,
        reserve: int | None = None,
        wait: bool = True,
    ) -> Steps[SequenceCore]:
        """A sequence on the longest cached prefix of ``token_ids``, maybe with room for more."""
        if reserve is not None and reserve < 0:
            raise InvalidArgument(f"reserve is {reserve}; it must be at least 0, or None")
        prompt = token_array(token_ids, self.spec.vocab_size)
        tokens, extras = self._offer(prompt, keep, extra_keys)
        hashes = self._hashes(tokens, extras)
        room = 0 if reserve is None else len(prompt) + reserve
        with self.client.opening_sequence() as number:
            yield from self.client.release_orphans()
            blobs = (hashes.tobytes(), tokens.tobytes(), extras_blob(extras, 0, len(hashes)))
            table = expect((yield lambda: Acquire(self.id, number, *blobs, room, wait)), Table)
            sequence = SequenceCore.begun(self, number, table, tokens, hashes, extras, room)
        self.client.sequences[number] = sequence
        return sequence

    def rows_to_fill(self, out: U8) -> U8:
        """``out``, if blocks can be copied into it. Raises InvalidArgument."""
        if out.dtype != np.uint8 or out.ndim != 2 or out.shape[1] != self.spec.block_bytes:
            raise InvalidArgument(
                f"out is {out.dtype} {list(out.shape)}; blocks are uint8 [n, "
                f"{self.spec.block_bytes}]"
            )
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise InvalidArgument("out is not contiguous, or read-only; blocks are copied into it")
        return out

    def paged(self, pages: Any, ids: Any, *, writable: bool) -> PagedBlocks:
        """Blocks of an engine's pages to copy from, or to. Raises InvalidArgument."""
        rows = paged_blocks(pages, ids, self.spec.block_bytes, writable=writable)
        if isinstance(self.memory, GpuPool):
            in_one_piece(rows)
        return rows

    def read_here(
        self, token_ids: TokenIds, rows: Rows, extra_keys: ExtraKeys | None, first: int = 0
    ) -> Reading:
        """Copy the leading blocks that lie in the device tier; asks nobody.

        ``rows`` takes the blocks from ``first`` on; into pages, there are tokens for all of them.
        """
        tokens, extras = self._offer(token_ids, 0, extra_keys)
        if isinstance(rows, PagedBlocks):
            self._check_tokens(tokens, first, len(rows))
        elif first < 0:
            raise InvalidArgument(f"first is {first}; it must be at least 0")
        blocks = first + len(rows) if len(rows) else 0
        tokens = tokens[: blocks * self.spec.block_tokens]
        reading = Reading(tokens, extras, self._hashes(tokens, extras), first, rows, 0)
        reading = reading._replace(found=self._copy_out(reading, reading.hashes, None))
        if reading.done:
            self.uses.add(reading.wanted)
        return reading

    def read_on(self, reading: Reading, extra_keys: ExtraKeys | None) -> Steps[int]:
        """Copy what is missing, too, as far as it is cached; returns how many blocks are there."""
        blob = reading.hashes.tobytes()
        found = expect((yield lambda: Lookup(self.id, blob)), Found)
        if found.blocks <= max(reading.found, reading.first):
            missed = len(reading.wanted) - reading.copied
            self.uses.add(reading.wanted[: reading.copied], missed)
            return reading.copied
        # The others must come up, or their slots went to others while they were copied.
        held, right = yield from self._copy_held_out(reading, extra_keys)
        if right < held:
            # They were pinned, so their bytes are damaged. The daemon may have them in another
            # tier; if not, they are lost, and can be cached anew.
            yield from self.client.release_orphans()
            damaged = reading.hashes[right:held].tobytes()
            expect((yield lambda: Used(self.id, b"", 0, damaged)), Done)
            held, right = yield from self._copy_held_out(reading, extra_keys)
        return max(right - reading.first, 0)

    def _copy_held_out(
        self, reading: Reading, extra_keys: ExtraKeys | None
    ) -> Steps[tuple[int, int]]:
        """Copy blocks out of a sequence's slots; how many leading ones it held, and were right."""
        sequence = yield from self.begin(reading.tokens, 0, extra_keys)
        try:
            slots = sequence.table.view(np.uint32)
            held = len(slots)
            if held <= reading.first:
                return held, held
            return held, self._copy_out(reading, reading.hashes[:held], slots)
        finally:
            self.client.end([sequence])

    def _copy_out(self, reading: Reading, hashes: U8, slots: U32 | None) -> int:
        """Copy these blocks from their slots, or from where they may lie.

        Returns how many leading ones of the chain are right.
        """
        first, rows = min(reading.first, len(hashes)), reading.rows
        if self._readable is None:
            return 0 if slots is None else first + self._copy_held(slots[first:], rows)
        return self.client.loops.read(
            self._readable,
            hashes,
            *self._said(reading.tokens, reading.extras, hashes),
            slots,
            rows,
            first,
        )

    def _said(self, tokens: U32, extras: U64, hashes: U8) -> tuple[U32, U64 | None]:
        """The token ids of these leading blocks, and the digests of their extra keys."""
        ids = tokens[: len(hashes) * self.spec.block_tokens]
        return ids, extras_of(extras, 0, len(hashes)) if len(extras) else None

    def _known_here(self, tokens: U32, extras: U64, hashes: U8) -> int:
        """How many leading blocks of a chain lie in the device tier; asks nobody."""
        if self._readable is None:
            return 0
        said = self._said(tokens, extras, hashes)
        nothing = self._readable.payload[:0]
        return self.client.loops.read(self._readable, hashes, *said, None, nothing, len(hashes))

    def _copy_held(self, slots: U32, out: Rows) -> int:
        """Copy sealed blocks that this worker holds; how many leading ones are right."""
        rows = in_one_piece(out[: len(slots)])
        self.memory.copy_out(slots, rows)
        stated = np.ascontiguousarray(self._entries[slots, SUM_AT : SUM_AT + HASH_BYTES])
        sums = self.client.loops.checksums(rows, np.arange(len(rows)))
        right = (stated.view("<u8") == sums.view(">u8")).all(1)
        return int(np.argmin(np.append(right, False)))

    def tell_uses(self) -> Steps[None]:
        """Tell the daemon of blocks that were read here."""
        hashes, missed = self.uses.take()
        if hashes or missed:
            expect((yield lambda: Used(self.id, hashes, missed)), Done)

    def write(
        self, token_ids: TokenIds, data: Any, first: int, extra_keys: ExtraKeys | None
    ) -> Steps[int]:
        """Cache whole blocks by copy, as blocks ``first`` .. of a chain; returns how many are."""
        rows = rows_of("data", data, self.spec.block_bytes)
        tokens, extras = self._offer(token_ids, 0, extra_keys)
        self._check_tokens(tokens, first, len(rows))
        if not len(rows):
            return 0
        piece = self._piece(tokens, extras, extra_keys, first, rows)
        return (yield from self._stock.write(piece))

    def write_pages(
        self, token_ids: TokenIds, rows: PagedBlocks, first: int, extra_keys: ExtraKeys | None
    ) -> Steps[int]:
        """The same out of pages, but for leading blocks that lie in the device tier already."""
        tokens, extras = self._offer(token_ids, 0, extra_keys)
        self._check_tokens(tokens, first, len(rows))
        if not len(rows):
            return 0
        piece = self._piece(tokens, extras, extra_keys, first, rows)
        hashes = np.frombuffer(piece.hashes, np.uint8).reshape(-1, HASH_BYTES)
        known = self._known_here(piece.tokens, extras, hashes) - first
        return (yield from self._stock.write_rest(piece, max(known, 0)))

    def _check_tokens(self, tokens: U32, first: int, blocks: int) -> None:
        """Raise InvalidArgument unless there are tokens for blocks ``first`` .. of the chain."""
        stop = (first + blocks) * self.spec.block_tokens
        if first < 0 or len(tokens) < stop:
            raise InvalidArgument(
                f"{blocks} blocks from block {first} on end at token {stop}; there are "
                f"{len(tokens)} token ids in whole blocks"
            )

    def _piece(
        self, tokens: U32, extras: U64, extra_keys: ExtraKeys | None, first: int, rows: Rows
    ) -> Piece:
        tokens = tokens[: (first + len(rows)) * self.spec.block_tokens]
        hashes = self._hashes(tokens, extras)
        blob = extras_blob(extras, 0, len(hashes))
        return Piece(tokens, extra_keys, hashes.tobytes(), blob, first, rows)

    def attend(self, plan: AttendPlan, q: U8, out: U8) -> Steps[None]:
        """Paged attention in the daemon; ``q`` and ``out`` are the bytes of [T, q_heads, D]."""
        out_offset = -(-q.size // SCRATCH_ALIGN) * SCRATCH_ALIGN
        lse_offset = 2 * out_offset
        row_bytes = plan.q_heads * self.spec.head_dim * DTYPE_BYTES[self.spec.dtype]
        end = lse_offset + q.size // row_bytes * plan.q_heads * 4

        def ask() -> Request:
            for sequence in plan.sequences:
                sequence.require_active()
            scratch = self.client.scratch
            if end > scratch.size:
                raise LimitExceeded(
                    f"attention of {q.size} query bytes takes {end} bytes of scratch memory; "
                    f"the daemon gives {scratch.size}: ask for fewer tokens at a time",
                    limit=scratch.size,
                    asked=end,
                )
            scratch[: q.size] = q
            return Attend(
                namespace=self.id,
                layer=plan.layer,
                sequences=[sequence.number for sequence in plan.sequences],
                seq_lens=plan.seq_lens.tobytes(),
                q_indptr=plan.q_indptr.tobytes(),
                q_heads=plan.q_heads,
                q_offset=0,
                out_offset=out_offset,
                lse_offset=lse_offset,
                scale=plan.scale,
                causal=plan.causal,
                window=plan.window,
                softcap=plan.softcap,
            )

        expect((yield ask), Done)
        out[:] = self.client.scratch[out_offset : out_offset + q.size]

    def _offer(
        self, token_ids: TokenIds, keep: int, extra_keys: ExtraKeys | None
    ) -> tuple[U32, U64]:
        """The tokens of the full blocks to reuse, and the extra digests of all blocks."""
        if keep < 0:
            raise InvalidArgument(f"keep is {keep}; it must be at least 0")
        tokens = token_array(token_ids, self.spec.vocab_size)
        offered = max(len(tokens) - keep, 0) // self.spec.block_tokens
        extras = _digests(extra_keys)
        return tokens[: offered * self.spec.block_tokens], extras

    def _hashes(self, tokens: U32, extras: U64) -> U8:
        blocks = len(tokens) // self.spec.block_tokens
        return self.client.loops.chain_hashes(
            self.digest,
            tokens,
            self.spec.block_tokens,
            extras_of(extras, 0, blocks) if len(extras) else None,
        )


def _digests(extra_keys: ExtraKeys | None) -> U64:
    """One for each block's extra keys; who knows no more than these gives them as they are."""
    if isinstance(extra_keys, np.ndarray):
        return extra_keys
    return extra_digests(extra_keys) if extra_keys else NO_EXTRAS


def open_namespace(client: ClientCore, spec: KVSpec) -> Steps[NamespaceCore]:
    """Open ``spec``'s namespace; the same object for the same spec."""
    spec.check()
    known = client.namespaces.get(spec.digest)
    if known is not None:
        return known
    namespace = NamespaceCore(client, spec)
    namespace.adopt(expect((yield namespace.ask_open), NamespaceOpened))
    return client.namespaces.setdefault(namespace.digest, namespace)
