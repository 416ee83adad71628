"""Caching blocks by copy in one round trip: into room that came with the answer to the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierkv.client.core import Ask, Steps, expect
from tierkv.client.sequences import ExtraKeys, SequenceCore
from tierkv.core.ids import U32
from tierkv.core.prefix import HASH_BYTES
from tierkv.errors import LeaseLost, PoolExhausted
from tierkv.native.pages import Rows
from tierkv.rpc.messages import Request, Store, Stored

if TYPE_CHECKING:
    from tierkv.client.namespaces import NamespaceCore

STOCK_BYTES_MAX = 64 << 20
"""For more a round trip is nothing beside the copying."""

STOCKS_MIN = 16
"""So many workers may have a stock as large as it can be before the device tier is full of them."""

NO_TOKENS = ()
EXTRA_BYTES = 8


class Piece(NamedTuple):
    """Blocks to be cached: ``rows`` are those from ``first`` on.

    ``tokens`` (u32) are those of the whole chain, ``hashes`` and ``extras`` as they travel.
    """

    tokens: U32
    extra_keys: ExtraKeys | None
    hashes: bytes
    extras: bytes
    first: int
    rows: Rows

    def part(self, start: int, stop: int) -> Piece:
        """Rows ``start`` .. ``stop`` - 1."""
        blocks, end = len(self.hashes) // HASH_BYTES, self.first + stop
        return Piece(
            self.tokens[: end * (len(self.tokens) // blocks)],
            self.extra_keys,
            self.hashes[: end * HASH_BYTES],
            self.extras[: end * EXTRA_BYTES],
            self.first + start,
            self.rows[start:stop],
        )


class Stock:
    """Open blocks that this worker holds before it needs them, as many as it wrote last.

    Who writes takes them away, so that no other task or thread writes into their slots.
    """

    def __init__(self, namespace: NamespaceCore) -> None:
        self._namespace = namespace
        self._spare: SequenceCore | None = None

    def write(self, piece: Piece) -> Steps[int]:
        """Cache the blocks; returns how many are, from the first on."""
        while True:
            try:
                if len(piece.rows) <= self._blocks_max():
                    try:
                        return (yield from self._store(piece))
                    except PoolExhausted:
                        pass  # with the stock given back, what is cached already may do
                return (yield from self._write_held(piece))
            except LeaseLost:
                continue  # the daemon came back without our sequence; the data is still here

    def write_rest(self, piece: Piece, known: int) -> Steps[int]:
        """The same for any number of blocks, of which the first ``known`` were cached just now.

        They go in parts that fit a stock, so that no more of the tier need be free at a time.
        """
        count, step = len(piece.rows), self._blocks_max() or len(piece.rows)
        # The last one is always written: its answer is what says that all of them are durable.
        done = min(known, count - 1)
        while done < count:
            part = piece.part(done, min(done + step, count))
            written = yield from self.write(part)
            if not written and known:
                done = known = 0  # they have gone since
                continue
            if not written:
                return 0
            done += written
            if written < len(part.rows):
                break
        return done

    def _blocks_max(self) -> int:
        slots, block_bytes = len(self._namespace.memory), self._namespace.spec.block_bytes
        return min(STOCK_BYTES_MAX // block_bytes, slots // STOCKS_MIN)

    def _store(self, piece: Piece) -> Steps[int]:
        namespace, client, count = self._namespace, self._namespace.client, len(piece.rows)
        stock = yield from self._take(count)
        try:
            sums = namespace.memory.copy_in(stock.table[:count], piece.rows)
            with client.opening_sequence() as number:
                stored = expect((yield self._ask(piece, stock, number, sums.tobytes())), Stored)
        except BaseException:
            client.end([stock])
            raise
        if stored.blocks:
            self._put_back(stock.succeeded_by(number, stored.slots))
        else:
            self._put_back(stock)
        return stored.blocks

    def _ask(self, piece: Piece, stock: SequenceCore, number: int, sums: bytes) -> Ask:
        def ask() -> Request:
            # A daemon that came back may have stored it already: then it finds twins of it.
            stock.require_alive()
            return Store(
                namespace=self._namespace.id,
                stock=stock.number,
                new_stock=number,
                first=piece.first,
                hashes=piece.hashes,
                tokens=piece.tokens.tobytes(),
                checksums=sums,
                extras=piece.extras,
                room_blocks=len(piece.rows),
            )

        return ask

    def _take(self, blocks: int) -> Steps[SequenceCore]:
        """A sequence with so many blocks to write into. Raises PoolExhausted, LeaseLost."""
        tokens = blocks * self._namespace.spec.block_tokens
        spare, self._spare = self._spare, None
        if spare is None:
            return (yield from self._namespace.begin(NO_TOKENS, 0, None, reserve=tokens))
        try:
            yield from spare.reserve(tokens)
        except BaseException:
            spare.client.end([spare])
            raise
        return spare

    def _put_back(self, stock: SequenceCore) -> None:
        if self._spare is None:
            self._spare = stock
        else:  # another task was faster
            stock.client.end([stock])

    def _write_held(self, piece: Piece) -> Steps[int]:
        """The same by a sequence, which holds all blocks until the last one is sealed."""
        room = None if piece.first else 0
        sequence = yield from self._namespace.begin(piece.tokens, 0, piece.extra_keys, room)
        try:
            cached = sequence.sealed
            if cached < piece.first:
                return 0
            rest = piece.tokens[sequence.num_tokens :]
            if len(rest):
                yield from sequence.reserve(len(rest))
                sequence.write_blocks(cached, piece.rows[cached - piece.first :])
                yield from sequence.append(rest)
            else:
                yield from sequence.confirm()
            return len(piece.rows)
        finally:
            sequence.client.end([sequence])
