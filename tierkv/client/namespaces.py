"""A namespace as the worker holds it: the pool it maps, and where sequences begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierkv.client.core import ClientCore, Steps, expect
from tierkv.client.sequences import (
    CachedPrefix,
    ExtraKeys,
    SequenceCore,
    extras_blob,
    extras_of,
)
from tierkv.client.tokens import TokenIds, token_array
from tierkv.core.ids import U8, U32, U64
from tierkv.core.prefix import chain_hashes, extra_digests
from tierkv.core.spec import DTYPE_BYTES, KVSpec
from tierkv.errors import InvalidArgument, LimitExceeded, ProtocolError
from tierkv.rpc.messages import (
    Acquire,
    Attend,
    Done,
    Found,
    Lookup,
    NamespaceOpened,
    OpenNamespace,
    Request,
    Table,
)

SCRATCH_ALIGN = 64


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
        self._place: object = None

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
        place = (arena, opened.slot_offset, opened.slot_stride, opened.slots)
        if place == self._place:
            return False
        self._place = place
        self.pool = arena.data[opened.slot_offset : end].reshape(opened.slots, opened.slot_stride)
        return True

    def lookup(
        self, token_ids: TokenIds, keep: int, extra_keys: ExtraKeys | None
    ) -> Steps[CachedPrefix]:
        """How many leading tokens are cached. Touches nothing."""
        tokens, extras = self._offer(token_ids, keep, extra_keys)
        hashes = self._hashes(tokens, extras).tobytes()
        found = expect((yield lambda: Lookup(self.id, hashes)), Found)
        return CachedPrefix(
            found.blocks * self.spec.block_tokens, found.device, found.host, found.disk
        )

    def begin(
        self, token_ids: TokenIds, keep: int, extra_keys: ExtraKeys | None
    ) -> Steps[SequenceCore]:
        """A sequence on the longest cached prefix of ``token_ids``."""
        tokens, extras = self._offer(token_ids, keep, extra_keys)
        hashes = self._hashes(tokens, extras)
        offered = len(hashes)
        with self.client.opening_sequence() as number:
            yield from self.client.release_orphans()
            blobs = (hashes.tobytes(), tokens.tobytes(), extras_blob(extras, 0, offered))
            table = expect((yield lambda: Acquire(self.id, number, *blobs)), Table)
            sequence = SequenceCore.begun(self, number, table, tokens, hashes, extras)
        self.client.sequences[number] = sequence
        return sequence

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
        return tokens[: offered * self.spec.block_tokens], extra_digests(extra_keys or ())

    def _hashes(self, tokens: U32, extras: U64) -> U8:
        blocks = len(tokens) // self.spec.block_tokens
        return chain_hashes(
            self.digest, tokens, self.spec.block_tokens, extras_of(extras, 0, blocks)
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
