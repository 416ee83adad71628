"""A namespace as the worker holds it: the pool it maps, and where sequences begin."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tierkv.client.copying import rows_of
from tierkv.client.core import ClientCore, Steps, expect
from tierkv.client.sequences import (
    ExtraKeys,
    FoundPrefix,
    SequenceCore,
    extras_blob,
    extras_of,
)
from tierkv.client.stock import Piece, Stock
from tierkv.client.tokens import TokenIds, token_array
from tierkv.core.ids import U8, U32, U64
from tierkv.core.prefix import HASH_BYTES, extra_digests
from tierkv.core.spec import DTYPE_BYTES, KVSpec
from tierkv.errors import InvalidArgument, LimitExceeded, ProtocolError
from tierkv.rpc.messages import (
    Acquire,
    Attend,
    Done,
    Existing,
    Exists,
    Found,
    Locate,
    Located,
    Lookup,
    NamespaceOpened,
    OpenNamespace,
    Request,
    Table,
)

SCRATCH_ALIGN = 64
NO_EXTRAS: U64 = np.empty(0, np.uint64)


class AttendPlan(NamedTuple):
    """One paged attention: everything but the query. ``seq_lens`` u32 [n], ``q_indptr`` [n + 1]."""

    layer: int
    sequences: list[SequenceCore]
    seq_lens: U32
    q_indptr: U32
    q_heads: int
    scale: float
    causal: bool
    window: int
    softcap: float


class NamespaceCore:
    """``pool`` is the namespace's part of the arena: u8 [slots, slot stride], shared, writable.

    It is another array after the arena was mapped anew.
    """

    def __init__(self, client: ClientCore, spec: KVSpec) -> None:
        self.client = client
        self.spec = spec
        self.digest = spec.digest
        self.id = 0
        self.pool: U8 = np.empty((0, 0), np.uint8)
        self.payload: U8 = self.pool
        """The slots without their padding: u8 [slots, block_bytes]."""
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
        if arena is None or opened.slot_offset < 0 or opened.slots < 0 or end > len(arena.data):
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
        place = (arena, opened.slot_offset, opened.slot_stride, opened.slots)
        if place == self._place:
            return False
        self._place = place
        self.pool = arena.data[opened.slot_offset : end].reshape(opened.slots, opened.slot_stride)
        self.payload = self.pool[:, : self.spec.block_bytes]
        return True

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

    def read(self, token_ids: TokenIds, out: U8, extra_keys: ExtraKeys | None) -> Steps[int]:
        """Copy the leading cached blocks into ``out`` (u8 [n, block bytes]); returns how many.

        Where they lie in the device tier they are copied without being pinned: what has the
        block's checksum is the block.
        """
        if out.dtype != np.uint8 or out.ndim != 2 or out.shape[1] != self.spec.block_bytes:
            raise InvalidArgument(
                f"out is {out.dtype} {list(out.shape)}; blocks are uint8 [n, "
                f"{self.spec.block_bytes}]"
            )
        tokens, extras = self._offer(token_ids, 0, extra_keys)
        tokens = tokens[: len(out) * self.spec.block_tokens]
        hashes = self._hashes(tokens, extras)
        blobs = (hashes.tobytes(), tokens.tobytes(), extras_blob(extras, 0, len(hashes)))

        def ask() -> Request:
            return Locate(self.id, *blobs)

        copied = self._copy_out(expect((yield ask), Located), out)
        if copied == len(hashes):
            return copied
        found = yield from self.lookup(tokens, 0, extra_keys)
        if found.tokens <= copied * self.spec.block_tokens:
            return copied
        # The others must come up, or their slots went to others while they were copied.
        sequence = yield from self.begin(tokens, 0, extra_keys)
        try:
            return self._copy_out(expect((yield ask), Located), out)
        finally:
            self.client.end([sequence])

    def _copy_out(self, located: Located, out: U8) -> int:
        """Copy slots into the first rows of ``out``; returns how many leading ones are right."""
        slots = np.frombuffer(located.slots, "<u4")
        if not len(slots):
            return 0
        copied = self.client.loops.copy_out_summed(self.payload, slots, out[: len(slots)])
        stated = np.frombuffer(located.checksums, np.uint8).reshape(-1, HASH_BYTES)
        if copied.tobytes() == located.checksums:
            return len(slots)
        return int((copied != stated).any(axis=1).argmax())

    def write(
        self, token_ids: TokenIds, data: Any, first: int, extra_keys: ExtraKeys | None
    ) -> Steps[int]:
        """Cache whole blocks by copy, as blocks ``first`` .. of a chain; returns how many are."""
        rows = rows_of("data", data, self.spec.block_bytes)
        tokens, extras = self._offer(token_ids, 0, extra_keys)
        stop = (first + len(rows)) * self.spec.block_tokens
        if first < 0 or len(tokens) < stop:
            raise InvalidArgument(
                f"{len(rows)} blocks from block {first} on end at token {stop}; there are "
                f"{len(tokens)} token ids in whole blocks"
            )
        if not len(rows):
            return 0
        tokens = tokens[:stop]
        hashes = self._hashes(tokens, extras)
        blob = extras_blob(extras, 0, len(hashes))
        piece = Piece(tokens, extra_keys, hashes.tobytes(), blob, first, rows)
        return (yield from self._stock.write(piece))

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
        extras = extra_digests(extra_keys) if extra_keys else NO_EXTRAS
        return tokens[: offered * self.spec.block_tokens], extras

    def _hashes(self, tokens: U32, extras: U64) -> U8:
        blocks = len(tokens) // self.spec.block_tokens
        return self.client.loops.chain_hashes(
            self.digest,
            tokens,
            self.spec.block_tokens,
            extras_of(extras, 0, blocks) if len(extras) else None,
        )


def open_namespace(client: ClientCore, spec: KVSpec) -> Steps[NamespaceCore]:
    """Open ``spec``'s namespace; the same object for the same spec."""
    spec.check()
    known = client.namespaces.get(spec.digest)
    if known is not None:
        return known
    namespace = NamespaceCore(client, spec)
    namespace.adopt(expect((yield namespace.ask_open), NamespaceOpened))
    return client.namespaces.setdefault(namespace.digest, namespace)
