"""A sequence as the worker holds it: its tokens, its block table, and what may be written."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.client.copying import WrittenSums
from tierkv.client.core import Steps, expect
from tierkv.client.tokens import TokenIds, token_array
from tierkv.core.ids import U8, U32, U64
from tierkv.core.prefix import HASH_BYTES
from tierkv.errors import CorruptionError, InvalidArgument, LeaseLost, ProtocolError
from tierkv.native.pages import Rows
from tierkv.rpc.messages import (
    Await,
    Done,
    Fork,
    Request,
    Reserve,
    Resume,
    Seal,
    SequenceState,
    Suspend,
    Table,
    Truncate,
)

if TYPE_CHECKING:
    from tierkv.client.namespaces import NamespaceCore

I32 = npt.NDArray[np.int32]
TOKENS_MIN = 256
ALL_BLOCKS = 2**32 - 1
NOWHERE = ALL_BLOCKS
"""In place of a block's index: behind all of them."""

ExtraKeys = Items[bytes | None] | U64
"""Per block, from the first: bytes that make it another block (an image's hash), or None."""


class CachedPrefix(NamedTuple):
    """How much of a prompt was cached: ``tokens`` in all, and blocks by their fastest tier."""

    tokens: int
    device: int
    host: int
    disk: int


class FoundPrefix(NamedTuple):
    """How much of a prompt is cached: ``tokens`` in all, and blocks by their fastest tier.

    ``load_s``: seconds that ``begin`` should take to bring them up; an engine that computes
    faster may rather do that.
    """

    tokens: int
    device: int
    host: int
    disk: int
    load_s: float


class SequenceCore:
    """``num_tokens`` tokens whose KV lies in the slots of ``table`` (i32 [blocks], in order).

    ``sealed`` leading blocks have their names and may be shared: nobody writes into them.
    ``writable_end`` is the token up to which the last reservation allows writing. While it is
    ``coming``, only the first ``ready`` blocks may be used and the others take ``load_s`` more.
    """

    def __init__(self, namespace: NamespaceCore, number: int) -> None:
        self.namespace = namespace
        self.client = namespace.client
        self.number = number
        self.num_tokens = 0
        self.sealed = 0
        self.writable_end = 0
        self.table: I32 = np.empty(0, np.int32)
        self.cached = CachedPrefix(0, 0, 0, 0)
        self.suspended = False
        self.coming = False
        self.ready = 0
        self.load_s = 0.0
        self.lost = False
        self.ended = False
        self._room_tokens = 0
        self._asked_to_seal = 0
        self._asked_to_reserve_from = NOWHERE
        self._asked_to_suspend = False
        self._tokens: U32 = np.empty(TOKENS_MIN, np.uint32)
        self._hashes = bytearray()
        self._written = WrittenSums()
        self._extras: U64 = np.empty(0, np.uint64)
        self._offered = (np.empty(0, np.uint32), b"")
        """Tokens that this sequence will most likely have, and their blocks' chain hashes."""

    @classmethod
    def begun(
        cls,
        namespace: NamespaceCore,
        number: int,
        table: Table,
        tokens: U32,
        hashes: U8,
        extras: U64,
        room_tokens: int = 0,
    ) -> SequenceCore:
        """What an ``acquire`` made of the offered ``tokens``, with room for ``room_tokens``."""
        self = cls(namespace, number)
        blocks = table.sealed
        if blocks > len(hashes):
            raise ProtocolError(f"{len(hashes)} blocks offered, {blocks} acquired")
        self._extras = extras
        self._hashes += hashes[:blocks].tobytes()
        self._offered = (tokens, hashes.tobytes())
        self._record(tokens[: blocks * self.block_tokens])
        self._room_tokens = room_tokens
        self._arrive(table)
        return self

    def succeeded_by(self, number: int, slots: bytes) -> SequenceCore:
        """The sequence, without tokens, that the daemon has opened in this one's place."""
        new = SequenceCore(self.namespace, number)
        new.adopt(slots, 0)
        new._require_room(0)
        self.ended = True
        self.client.sequences.pop(self.number, None)
        self.client.sequences[number] = new
        return new

    def _arrive(self, table: Table) -> None:
        """Take the table of a sequence that begins: it is there, or a part of it is."""
        self.coming = table.ready >= 0
        self.load_s = table.load_us / 1e6
        if self.coming:
            self.cached = CachedPrefix(self.num_tokens, 0, 0, 0)
            self._adopt_ready(table.slots, table.ready)
            return
        if table.sealed < self.num_tokens // self.block_tokens:
            self._cut(table.sealed * self.block_tokens)
        self.adopt(table.slots, table.sealed)
        self.ready = self.sealed
        self.cached = CachedPrefix(self.num_tokens, table.device, table.host, table.disk)
        if self._room_tokens:
            self._require_room(self._room_tokens)

    def _adopt_ready(self, slots: bytes, ready: int) -> None:
        self.ready = ready
        self.adopt(slots[: 4 * ready], ready)

    def wait(self, n_tokens: int | None) -> Steps[int]:
        """Wait until the first ``n_tokens`` cached tokens (None: all) may be used.

        Returns how many may be: fewer if blocks turned out to be lost.
        """
        self.require_alive()
        blocks = ALL_BLOCKS if n_tokens is None else -(-n_tokens // self.block_tokens)

        def ask() -> Request:
            self.require_alive()
            return Await(self.number, blocks)

        while self.coming and self.ready < blocks:
            self._arrive(expect((yield ask), Table))
        return self.ready * self.block_tokens

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.namespace.spec.block_tokens

    @property
    def tokens(self) -> U32:
        """The ids so far (u32 [num_tokens], read-only); a snapshot that never changes."""
        view = self._tokens[: self.num_tokens]
        view.flags.writeable = False
        return view

    def require_alive(self) -> None:
        """Raise LeaseLost or InvalidArgument if the sequence is gone."""
        if self.lost:
            self.client.told(self.number)
            raise LeaseLost(
                f"the daemon no longer holds sequence {self.number}: begin it again with its tokens"
            )
        if self.ended:
            raise InvalidArgument(f"sequence {self.number} has ended")

    def require_active(self) -> None:
        """The same, and InvalidArgument if it is suspended."""
        self.require_alive()
        if self.suspended:
            raise InvalidArgument(f"sequence {self.number} is suspended: call resume() first")

    def require_writable(self, first_token: int, count: int) -> None:
        """Raise InvalidArgument unless these tokens' places are this sequence's alone."""
        self.require_active()
        begin, end = self.sealed * self.block_tokens, self.writable_end
        if first_token < begin or first_token + count > end:
            room = f"only {begin} to {end - 1}" if begin < end else "none can be"
            raise InvalidArgument(
                f"tokens {first_token} to {first_token + count - 1} of sequence {self.number} may "
                f"not be written, {room}: call reserve() first, and again after "
                "fork() or truncate()"
            )

    def about_to_write(self, first_token: int, count: int) -> None:
        """``require_writable``, and no checksum of these tokens' blocks holds any more."""
        self.require_writable(first_token, count)
        first = first_token // self.block_tokens
        self._written.forget(first, -(-(first_token + count) // self.block_tokens) - first)

    # --- whole blocks, by copy --------------------------------------------------------------------

    def write_blocks(self, first: int, rows: Rows) -> int:
        """Copy whole blocks into the slots of blocks ``first`` on; returns how many."""
        self.about_to_write(first * self.block_tokens, len(rows) * self.block_tokens)
        slots = self.table[first : first + len(rows)]
        sums = self.namespace.memory.copy_in(slots, rows)
        self._written.remember(first, slots, sums)
        return len(rows)

    def read_blocks(self, first: int, rows: Rows) -> int:
        """Fill ``rows`` from the slots of blocks ``first`` on; returns how many."""
        self.require_active()
        held = min(-(-self.num_tokens // self.block_tokens), len(self.table))
        if first < 0 or first + len(rows) > held:
            raise InvalidArgument(
                f"blocks {first} to {first + len(rows) - 1} of sequence {self.number} cannot be "
                f"read, it has {held} with tokens in them: ask for fewer, or wait() for those "
                "that are still coming"
            )
        self.namespace.memory.copy_out(self.table[first : first + len(rows)], rows)
        return len(rows)

    # --- what the daemon says ---------------------------------------------------------------------

    def adopt(self, slots: bytes, sealed: int, *, suspended: bool = False) -> None:
        """Take the daemon's block table. A suspended one's slots mean nothing."""
        table = np.frombuffer(slots, "<u4")
        if not suspended and table.size and int(table.max()) >= len(self.namespace.memory):
            raise ProtocolError(
                f"slot {int(table.max())} in a pool of {len(self.namespace.memory)} slots"
            )
        self.table = table.astype(np.int32)
        self.table.flags.writeable = False
        self.sealed = min(sealed, self.num_tokens // self.block_tokens)
        self.suspended = suspended

    def take_up(self, state: SequenceState) -> bool:
        """Adopt what a daemon that came back holds; False if that is not what it acknowledged.

        It may have got further than it could say: sealed, with a twin in a block's place, with a
        copy of a tail that was shared, or suspended. But it may also have lost its last
        acknowledgements (durability "none"); then what was written since lies in slots that are not
        this sequence's.
        """
        if self.coming and not state.suspended:
            self._adopt_ready(state.slots, self.ready)
            return True
        slots = np.frombuffer(state.slots, "<u4")
        if (
            self.lost
            or state.namespace != self.namespace.id
            or len(slots) < len(self.table)
            or state.sealed < self.sealed
            or (state.suspended and not (self.suspended or self._asked_to_suspend))
        ):
            return False
        if not (state.suspended or self.suspended):
            own = max(self.sealed, min(state.sealed, self._asked_to_seal))
            stop = min(len(self.table), self._asked_to_reserve_from)
            if not np.array_equal(slots[own:stop], self.table[own:stop]):
                return False
        self.adopt(state.slots, state.sealed, suspended=state.suspended)
        return True

    def lose(self) -> None:
        """The daemon does not hold it any more: every later verb raises LeaseLost."""
        self.lost = True

    # --- verbs ------------------------------------------------------------------------------------

    def reserve(self, n_tokens: int) -> Steps[None]:
        """Room for ``n_tokens`` beyond ``num_tokens``, this sequence's alone.

        Where there is room already it still makes sure that the daemon has not gone: another one
        may have given the slots away.
        """
        yield from self.wait(None)
        self.require_active()
        if n_tokens < 0:
            raise InvalidArgument(f"n_tokens is {n_tokens}; it must be at least 0")
        total = self.num_tokens + n_tokens
        covered = total <= self.writable_end

        def ask() -> Request | None:
            self.require_active()
            return None if covered else Reserve(self.number, self.num_tokens, total)

        if not covered:
            # The daemon may copy a tail that was shared.
            self.namespace.memory.settle()
            self._asked_to_reserve_from = self.num_tokens // self.block_tokens
        reply = yield ask
        if covered:
            return
        table = expect(reply, Table)
        self.adopt(table.slots, table.sealed)
        self._asked_to_reserve_from = NOWHERE
        self._require_room(total)

    def _require_room(self, total: int) -> None:
        """The daemon was to make room for so many tokens: they may be written now."""
        writable_end = len(self.table) * self.block_tokens
        if writable_end < total:
            raise ProtocolError(f"room for {total} tokens asked, {writable_end} given")
        self.writable_end = writable_end

    def append(self, token_ids: TokenIds) -> Steps[None]:
        """The KV of these tokens has been written: record them, seal the blocks they fill."""
        ids = token_array(token_ids, self.namespace.spec.vocab_size)
        yield from self.wait(None)
        self.require_active()
        if len(ids):
            self.require_writable(self.num_tokens, len(ids))
            self._record(ids)
        yield from self._seal_full()

    def confirm(self) -> Steps[None]:
        """Return when the sealed blocks are as durable as blocks that this worker seals.

        Whoever sealed them may still be waiting for that.
        """

        def ask() -> Request:
            self.require_active()
            return Seal(self.number, self.sealed, b"", b"", b"", b"")

        expect((yield ask), Table)

    def _seal_full(self) -> Steps[None]:
        full = self.num_tokens // self.block_tokens
        if full > self.sealed:
            yield from self._seal(self.sealed, full)

    def _seal(self, first: int, full: int) -> Steps[None]:
        self.namespace.memory.settle()
        del self._hashes[first * HASH_BYTES :]
        tokens = self._tokens[first * self.block_tokens : full * self.block_tokens]
        hashes = self._names(first, full, tokens)
        self._hashes += hashes
        self._asked_to_seal = full
        message = Seal(
            self.number,
            first,
            hashes,
            tokens.tobytes(),
            self._checksums(first, self.table[first:full]),
            extras_blob(self._extras, first, full - first),
        )

        def ask() -> Request:
            self.require_active()
            return message

        table = expect((yield ask), Table)
        self.adopt(table.slots, table.sealed)

    def _names(self, first: int, full: int, tokens: U32) -> bytes:
        """Chain hashes of blocks ``first`` .. ``full`` - 1, which have these tokens."""
        offered, hashes = self._offered
        end = full * self.block_tokens
        if np.array_equal(self._tokens[:end], offered[:end]):
            return hashes[first * HASH_BYTES : full * HASH_BYTES]
        self._offered = (offered[:0], b"")  # it went on beyond, or another way
        before = bytes(self._hashes[-HASH_BYTES:]) or self.namespace.digest
        extras = extras_of(self._extras, first, full - first)
        chain_hashes = self.client.loops.chain_hashes
        return chain_hashes(before, tokens, self.block_tokens, extras).tobytes()

    def _checksums(self, first: int, slots: I32) -> bytes:
        sums, known = self._written.find(first, slots)
        if not known.all():
            sums[~known] = self.namespace.memory.checksums(slots[~known])
        return sums.tobytes()

    def truncate(self, n_tokens: int) -> Steps[None]:
        """Keep the first ``n_tokens`` tokens."""
        yield from self.wait(None)
        self.require_active()
        if not 0 <= n_tokens <= self.num_tokens:
            raise InvalidArgument(
                f"n_tokens is {n_tokens}; sequence {self.number} has {self.num_tokens}"
            )
        # First here, then there: a daemon that cut already and died must not seem to have lost
        # blocks, and one that never hears of it only holds more than it needs.
        self._cut(n_tokens)

        def ask() -> Request:
            self.require_active()
            return Truncate(self.number, n_tokens)

        table = expect((yield ask), Table)
        self.adopt(table.slots, table.sealed)

    def fork(self) -> Steps[SequenceCore]:
        """A new sequence with the same tokens; both must reserve before they write again."""
        yield from self.wait(None)
        self.require_active()
        yield from self._seal_full()
        self.writable_end = 0
        self._written.forget_all()
        with self.client.opening_sequence() as number:

            def ask() -> Request:
                self.require_active()
                return Fork(self.number, number, self.num_tokens)

            table = expect((yield ask), Table)
            child = SequenceCore(self.namespace, number)
            child._tokens = self._tokens[: max(self.num_tokens, TOKENS_MIN)].copy()
            child.num_tokens = self.num_tokens
            child._hashes += self._hashes[: self.sealed * HASH_BYTES]
            child._extras = self._extras
            child.cached = self.cached
            child.adopt(table.slots, table.sealed)
        self.client.sequences[number] = child
        return child

    def suspend(self) -> Steps[None]:
        """Let the blocks spill; the slots mean nothing until ``resume``."""
        yield from self.wait(None)
        self.require_alive()
        if self.suspended:
            return

        def ask() -> Request:
            self.require_alive()
            return Suspend(self.number)

        self.namespace.memory.settle()
        self._asked_to_suspend = True
        expect((yield ask), Done)
        self.suspended = True

    def resume(self) -> Steps[None]:
        """Bring the blocks back to the device tier, maybe into other slots.

        Raises CorruptionError if one is lost: the tokens before it stay, suspended.
        """
        self.require_alive()
        if not self.suspended:
            return

        def ask() -> Request:
            self.require_alive()
            return Resume(self.number)

        try:
            table = expect((yield ask), Table)
        except CorruptionError as error:
            kept = error.details.get("blocks")
            if isinstance(kept, int) and 0 <= kept < len(self.table):
                self._cut(min(kept * self.block_tokens, self.num_tokens))
            raise
        self.adopt(table.slots, table.sealed)
        self._asked_to_suspend = False

    def _cut(self, n_tokens: int) -> None:
        """Keep the first tokens and what belongs to them."""
        full = n_tokens // self.block_tokens
        self._tokens = self._tokens[: max(n_tokens, TOKENS_MIN)].copy()
        self.num_tokens = n_tokens
        self.writable_end = 0
        self._written.forget_all()
        self.sealed = min(self.sealed, full)
        self._asked_to_seal = min(self._asked_to_seal, self.sealed)
        del self._hashes[full * HASH_BYTES :]
        self.table = self.table[: -(-n_tokens // self.block_tokens)]

    def _record(self, ids: U32) -> None:
        needed = self.num_tokens + len(ids)
        if needed > len(self._tokens):
            grown = np.empty(max(needed, 2 * len(self._tokens)), np.uint32)
            grown[: self.num_tokens] = self._tokens[: self.num_tokens]
            self._tokens = grown
        self._tokens[self.num_tokens : needed] = ids
        self.num_tokens = needed


def extras_of(extras: U64, first: int, blocks: int) -> U64:
    """The digests of ``blocks`` blocks from ``first`` on; 0 past the end (u64 [blocks])."""
    found = np.zeros(blocks, np.uint64)
    known = extras[first : first + blocks]
    found[: len(known)] = known
    return found


def extras_blob(extras: U64, first: int, blocks: int) -> bytes:
    """The same as it travels: empty when none of the blocks has extra keys."""
    if not len(extras):
        return b""
    found = extras_of(extras, first, blocks)
    return found.tobytes() if found.any() else b""
