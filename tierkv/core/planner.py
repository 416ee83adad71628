"""The verbs: what a worker's request means for the state.

Each verb is a flow (see ``core.effects``): it checks, decides, commits records and returns its
result. Between an effect and its result other flows run, so every flow looks at the state again
after it waited. All verbs are idempotent, because a worker repeats its last request after a
reconnect.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tierkv.core.arrays import distinct, indices, leading
from tierkv.core.coming import MOVE_BYTES, Coming
from tierkv.core.counters import NEW_BLOCKS
from tierkv.core.effects import Flow, Move, Moved
from tierkv.core.ids import I64, U8, U64, Tier
from tierkv.core.matching import Chain, Matcher, TierCounts
from tierkv.core.placement import Placement
from tierkv.core.records import Kind, Records, blank, join, push
from tierkv.core.sealing import Sealer
from tierkv.core.sequences import LOCAL_MAX, Sequences, TableView
from tierkv.core.state import Lease, PoolShape, Sequence, State
from tierkv.core.storing import Stored, Storer, ToStore
from tierkv.core.top_prefixes import Root
from tierkv.errors import (
    CorruptionError,
    InvalidArgument,
    LimitExceeded,
    PoolExhausted,
    TierFailed,
    TierkvError,
    UnknownSequence,
)

NOWHERE = 255
"""In place of a tier: the block is not cached."""

RECORDS_PER_BLOCK_MAX = 3
"""Most records that one commit makes for one block of a request (a place and two drops)."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what one worker may ask for."""

    sequences: int = 65_536
    blocks_per_request: int = 65_536


class Planner:
    """Verbs over one state and its placement."""

    def __init__(self, state: State, placement: Placement, limits: Limits) -> None:
        self.state = state
        self.placement = placement
        self.limits = limits
        self._sequences = Sequences(placement, lambda: self.limits.sequences)
        self._matcher = Matcher(placement)
        self._sealer = Sealer(placement, self._sequences, self._matcher)
        self._storer = Storer(placement, self._sequences, self._matcher, self._sealer)

    # --- leases and namespaces --------------------------------------------------------------------

    def open_lease(self, token: bytes, pid: int, start_time: int, uid: int) -> Lease:
        """A new lease. ``token``: 16 random bytes chosen by the caller. Mutates."""
        records = blank(1, Kind.LEASE_OPEN)
        records["key"] = self.state.next_lease
        records["id"] = pid
        records["gen"] = start_time
        records["loc"] = uid
        records["extra_hi"], records["extra_lo"] = np.frombuffer(token, "<u8")
        self.placement.commit(records)
        return self.state.leases[int(records["key"][0])]

    def close_lease(self, lease: int) -> None:
        """End a lease with all its sequences; full blocks stay cached. Mutates."""
        if lease not in self.state.leases:
            return
        sequences = [self.state.sequences[one] for one in self.state.lease_sequences[lease]]
        tables = [sequence.rows for sequence in sequences]
        records = blank(1, Kind.LEASE_CLOSE)
        records["key"] = lease
        self.placement.commit(records)
        for rows in tables:
            self._sequences.touch_released(rows)

    def fence_lease(self, lease: int) -> bool:
        """End a lease whose worker was not told and may still write. Mutates.

        Its sequences end, but the blocks that the worker may write into stay as they are, so that
        their slots go to nobody. Returns whether there are any: then the lease stands, until the
        worker has released them or ``close_lease`` says that it writes no more.
        """
        if lease not in self.state.leases:
            return False
        held = [self.state.sequences[one] for one in self.state.lease_sequences[lease]]
        if not any(self.state.writable(sequence).any() for sequence in held):
            self.close_lease(lease)
            return False
        ending = [sequence for sequence in held if not sequence.fenced]
        tables = [sequence.rows for sequence in ending]
        records = blank(len(ending), Kind.SEQ_CLOSE)
        records["id"] = [sequence.id for sequence in ending]
        fenced = [bool(self.state.writable(sequence).any()) for sequence in ending]
        records["type"][fenced] = Kind.SEQ_FENCE
        if len(ending):
            self.placement.commit(records)
        for rows in tables:
            self._sequences.touch_released(rows)
        return True

    def open_namespace(self, digest: bytes, shape: PoolShape) -> int:
        """The number of the namespace with this digest, entered if it is new. Mutates."""
        for namespace, entry in self.state.namespaces.items():
            if entry.digest == digest:
                return namespace
        if len(self.state.namespaces) >= 2**16 - 1:
            raise LimitExceeded("this daemon holds 65535 namespaces already", limit=65_535)
        records = blank(1, Kind.NAMESPACE)
        records["key"] = len(self.state.namespaces)
        records["hash_hi"], records["hash_lo"] = np.frombuffer(digest, "<u8")
        records["id"] = shape.block_bytes
        records["loc"] = shape.block_tokens
        self.placement.commit(records)
        return int(records["key"][0])

    # --- reading ----------------------------------------------------------------------------------

    def lookup(self, namespace: int, hi: U64, lo: U64) -> TierCounts:
        """Leading blocks that are cached, by the best tier each is in. Touches nothing."""
        self._sequences.pool(namespace)
        self._check_size(len(hi))
        rows = self._matcher.match(namespace, hi, lo)
        return self._matcher.count_tiers(rows)

    def prefetch(self, namespace: int, hi: U64, lo: U64) -> Flow[int]:
        """Bring leading cached blocks up before somebody acquires them; returns how many came.

        See ``Placement.prefetch``.
        """
        rows = self._matcher.match(namespace, hi, lo)
        return (yield from self.placement.prefetch(rows))

    def exists(self, namespace: int, hi: U64, lo: U64) -> U8:
        """The fastest tier of each block, shape [n], NOWHERE if it is not cached. Touches nothing.

        Found by hash alone: who wants the blocks has them proven by ``acquire``.
        """
        self._sequences.pool(namespace)
        self._check_size(len(hi))
        rows = self._named(namespace, hi, lo)
        tiers = np.full(len(hi), NOWHERE, np.uint8)
        tiers[rows >= 0] = self.state.blocks.best_tier(rows[rows >= 0])
        return tiers

    def used(self, namespace: int, hi: U64, lo: U64, missed: int) -> None:
        """A worker has read these blocks in the device tier, and missed so many more. Mutates.

        Least valuable first. Raises UnknownNamespace, LimitExceeded.
        """
        pool = self._sequences.pool(namespace)
        self._check_size(len(hi))
        rows = self._named(namespace, hi, lo)
        self.placement.touch(rows[rows >= 0], found=True)
        tokens = self.state.pools[pool].block_tokens
        self._count_chains(namespace, rows[rows >= 0], tokens)
        looked_for = (len(hi) + missed) * tokens
        self.placement.counters.looked_up(namespace, looked_for, device=len(hi) * tokens)

    def _count_chains(self, namespace: int, rows: I64, block_tokens: int) -> None:
        """Chains that were found, one behind the other, each with its first block last."""
        blocks = self.state.blocks
        ends = np.flatnonzero(blocks.parent[rows] == 0)
        for row, found in zip(rows[ends].tolist(), np.diff(ends, prepend=-1).tolist(), strict=True):
            root = Root(namespace, int(blocks.hash_hi[row]), int(blocks.hash_lo[row]))
            self.placement.counters.top_prefixes.add(root, found * block_tokens)

    def doubt(self, namespace: int, hi: U64, lo: U64) -> None:
        """A worker found these blocks damaged in the device tier: check them before they are used.

        Mutates. Raises UnknownNamespace, LimitExceeded.
        """
        self._sequences.pool(namespace)
        self._check_size(len(hi))
        rows = distinct(self._named(namespace, hi, lo))
        rows = rows[rows >= 0]
        self.placement.doubt.add(rows[self.state.blocks.has_copy(rows, Tier.DEVICE)])

    def has_sequence(self, lease: int, local: int) -> bool:
        """Whether the lease has begun this sequence, and not ended it."""
        return self._sequences.identity(lease, local) in self.state.sequences

    def sequence(self, lease: int, local: int) -> Sequence:
        """A lease's own sequence. Raises UnknownSequence, NotOwner."""
        return self._sequences.find(lease, local)

    def sequences_of(self, lease: int) -> list[Sequence]:
        """The sequences that a lease holds and its worker may use."""
        held = self.state.lease_sequences.get(lease, {})
        found = [self.state.sequences[one] for one in held]
        return [sequence for sequence in found if not sequence.fenced]

    def table(self, sequence: Sequence) -> TableView:
        """The block table of a sequence as it is now."""
        return self._sequences.view(sequence)

    # --- verbs ------------------------------------------------------------------------------------

    def acquire(
        self,
        lease: int,
        namespace: int,
        local: int,
        chain: Chain,
        coming: Coming[TableView] | None = None,
    ) -> Flow[TableView]:
        """Begin a sequence on the longest cached prefix of ``chain``: pinned, verified, mapped.

        ``coming`` is told of arriving blocks, which come in smaller moves then; see ``progress``.

        Asked again for a sequence that stands where the first answer left it, or would have,
        it gives the same answer: the daemon or the connection may have died on the way to it.

        Raises UnknownNamespace, LimitExceeded, InvalidArgument.
        """
        self._sequences.pool(namespace)
        self._check_size(len(chain))
        if self._sequences.identity(lease, local) in self.state.sequences:
            return (yield from self._acquire_again(lease, local, chain, coming))
        rows = self._matcher.match(namespace, chain.hi, chain.lo)
        if (yield from self.placement.verify(rows)):
            if self._sequences.identity(lease, local) in self.state.sequences:
                return (yield from self._acquire_again(lease, local, chain, coming))
            rows = self._matcher.match(namespace, chain.hi, chain.lo)
        rows = rows[: self._matcher.proven(rows, chain)]
        self._sequences.check_limit(lease)
        opened = blank(1, Kind.SEQ_OPEN)
        opened["id"] = self._sequences.identity(lease, local)
        opened["key"] = namespace
        records = [opened, push(int(opened["id"][0]), rows.astype(np.uint32))]
        self.placement.commit(join(records))
        if coming is not None:
            coming.arrived()
        sequence = self._sequences.find(lease, local)
        if self.placement.usable_as_is(rows):
            return self._begun(sequence, chain, self.state.blocks.count_tiers(rows))
        return (yield from self._bring_prefix(sequence, chain, coming))

    def _acquire_again(
        self, lease: int, local: int, chain: Chain, coming: Coming[TableView] | None
    ) -> Flow[TableView]:
        sequence = self._sequences.find(lease, local)
        if (yield from self.placement.verify(sequence.rows)):
            sequence = self._sequences.find(lease, local)
        rows, blocks = sequence.rows, self.state.blocks
        begun = (
            self._sequences.sealed_count(rows) == len(rows) <= len(chain)
            and np.array_equal(blocks.hash_hi[rows], chain.hi[: len(rows)])
            and np.array_equal(blocks.hash_lo[rows], chain.lo[: len(rows)])
        )
        if not begun:
            return (yield from self.resume(lease, local))
        if sequence.suspended:
            self._sequences.log(Kind.SEQ_RESUME, sequence)
        return (yield from self._bring_prefix(sequence, chain, coming))

    def progress(self, lease: int, local: int, chain: Chain) -> tuple[TableView, TierCounts]:
        """A sequence that is being acquired on ``chain``: how far it is, and what is not up yet.

        The view's ``ready`` leading blocks may be used. Touches nothing. Raises UnknownSequence.
        """
        sequence = self._sequences.find(lease, local)
        rows = sequence.rows
        ready = self._leading_in_device(rows)
        ready = min(ready, self._matcher.proven(rows[:ready], chain))
        view = self._sequences.view(sequence)
        left = self._matcher.count_tiers(rows[ready:])
        return TableView(view.slots, view.sealed, ready=ready), left

    def _bring_prefix(
        self, sequence: Sequence, chain: Chain, coming: Coming[TableView] | None
    ) -> Flow[TableView]:
        """Bring the sequence's blocks up as far as they fit and are what ``chain`` says."""
        rows = sequence.rows
        ids = self.state.blocks.id[rows]
        by_tier = self.state.blocks.best_tier(rows)
        try:
            if coming is None:
                usable = yield from self.placement.bring_up(rows)
            else:
                usable = yield from self.placement.bring_up(rows, MOVE_BYTES, coming.arrived)
        except (PoolExhausted, TierFailed):
            # No room for more, or the disk refuses to be read now: a shorter prefix is one, too.
            usable = self._leading_in_device(rows)
        self._require_unchanged("acquire", sequence, ids)
        usable = min(usable, self._matcher.proven(rows[:usable], chain))
        if usable < len(rows):
            self._sequences.truncate(sequence, usable)
        hits = np.bincount(by_tier[:usable], minlength=len(Tier)).tolist()
        return self._begun(sequence, chain, hits)

    def _begun(self, sequence: Sequence, chain: Chain, hits: list[int]) -> TableView:
        """The sequence stands on cached blocks, of which so many were in each tier before."""
        # Recency of the lower copies; and on disk only those of active blocks may leave.
        self.placement.touch(sequence.rows[::-1], found=True)
        view = self._sequences.view(sequence)
        tokens = chain.tokens.shape[1]
        if found := sum(hits):
            root = Root(sequence.namespace, int(chain.hi[0]), int(chain.lo[0]))
            self.placement.counters.top_prefixes.add(root, found * tokens)
        self.placement.counters.looked_up(
            sequence.namespace,
            len(chain) * tokens,
            device=hits[Tier.DEVICE] * tokens,
            host=hits[Tier.HOST] * tokens,
            disk=hits[Tier.DISK] * tokens,
        )
        return TableView(view.slots, view.sealed, (hits[0], hits[1], hits[2]))

    def acquire_with_room(
        self,
        lease: int,
        namespace: int,
        local: int,
        chain: Chain,
        total: int,
        coming: Coming[TableView] | None = None,
    ) -> Flow[TableView]:
        """``acquire``, and ``reserve`` behind the cached blocks; both, or there is no sequence.

        Raises what they raise.
        """
        fresh = yield from self._begin_fresh(lease, namespace, local, chain, total)
        if fresh is not None:
            return fresh
        begun = yield from self.acquire(lease, namespace, local, chain, coming)
        cached = begun.sealed * chain.tokens.shape[1]
        try:
            table = yield from self.reserve(lease, local, cached, max(total, cached))
        except TierkvError:
            self.release(lease, [local])
            raise
        return TableView(table.slots, table.sealed, begun.by_tier)

    def _begin_fresh(
        self, lease: int, namespace: int, local: int, chain: Chain, total: int
    ) -> Flow[TableView | None]:
        """``acquire_with_room`` where nothing is cached, in one commit; None where something is.

        Or where there is such a sequence: it was asked for before.
        """
        pool = self._sequences.pool(namespace)
        needed = -(-total // self.state.pools[pool].block_tokens)
        self._check_size(max(needed, len(chain)))
        if not self._is_fresh(lease, namespace, local, chain):
            return None
        self._sequences.check_limit(lease)
        slots = yield from self.placement.room(Tier.DEVICE, pool, needed, NEW_BLOCKS)
        try:
            if not self._is_fresh(lease, namespace, local, chain):
                return None
            opened = blank(1, Kind.SEQ_OPEN)
            opened["id"] = identity = self._sequences.identity(lease, local)
            opened["key"] = namespace
            self._log_fresh(identity, namespace, slots, [opened])
        finally:
            self.placement.unhold_slots(Tier.DEVICE, pool, slots)
        tokens = len(chain) * self.state.pools[pool].block_tokens
        self.placement.counters.looked_up(namespace, tokens)
        return TableView(slots.astype(np.uint32), 0)

    def _is_fresh(self, lease: int, namespace: int, local: int, chain: Chain) -> bool:
        """Whether the lease has no such sequence yet, and nothing of the chain is cached."""
        if self._sequences.identity(lease, local) in self.state.sequences:
            return False
        return not len(self._matcher.match(namespace, chain.hi[:1], chain.lo[:1]))

    def reserve(self, lease: int, local: int, written: int, total: int) -> Flow[TableView]:
        """Room for ``total`` tokens; blocks from token ``written`` on are exclusive.

        All or nothing. Raises PoolExhausted, InvalidArgument, UnknownSequence, CorruptionError (the
        block that must be copied is damaged).
        """
        while True:
            sequence = self._sequences.active(lease, local)
            pool = self._sequences.pool(sequence.namespace)
            block_tokens = self.state.pools[pool].block_tokens
            needed = -(-total // block_tokens)
            self._check_size(needed)
            rows = sequence.rows
            first = written // block_tokens
            if not 0 <= written <= total or written > len(rows) * block_tokens:
                raise InvalidArgument(
                    f"reserve: {written} written of {total} tokens, but the sequence has "
                    f"{len(rows)} blocks of {block_tokens}"
                )
            keep = self._exclusive_until(rows, first)
            fresh = max(needed, len(rows)) - keep
            if not fresh:
                return self._sequences.view(sequence)
            copied = rows[first : first + 1] if keep == first and written % block_tokens else None
            ids = self.state.blocks.id[rows]
            slots = yield from self.placement.room(Tier.DEVICE, pool, fresh, NEW_BLOCKS)
            try:
                whole = True
                if copied is not None and self._sequences.steady(sequence, ids):
                    whole = yield from self._copy_block(pool, copied, slots)
                if not self._sequences.steady(sequence, ids):
                    continue
                if self._exclusive_until(rows, first) != keep:
                    continue
                if not whole:
                    self.placement.counters.checksum_failures[Tier.DEVICE.label] += 1
                    raise CorruptionError(
                        f"block {first} of the sequence is damaged and cannot be copied; truncate "
                        f"the sequence to {first * block_tokens} tokens or less",
                        blocks=first,
                    )
                self._extend(sequence, keep, slots)
            finally:
                self.placement.unhold_slots(Tier.DEVICE, pool, slots)
            return self._sequences.view(sequence)

    def seal(
        self, lease: int, local: int, first: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> Flow[TableView]:
        """Blocks ``first`` .. are full: name them, or take the cached twin of each instead.

        Raises InvalidArgument, UnknownSequence.
        """
        return self._sealer.seal(lease, local, first, chain, sum_hi, sum_lo)

    def sealed_rows(self, sequence: Sequence) -> I64:
        """Sealed blocks of a sequence, and those that are found under their names instead of them.

        No row is there twice.
        """
        blocks, rows = self.state.blocks, sequence.rows
        rows = rows[blocks.is_sealed(rows)]
        nameless = rows[~blocks.is_indexed(rows)]
        if not len(nameless):
            return rows
        named = self._named(sequence.namespace, blocks.hash_hi[nameless], blocks.hash_lo[nameless])
        return distinct(np.concatenate([rows, named[named >= 0]]))

    def store(self, lease: int, namespace: int, wanted: ToStore) -> Flow[Stored]:
        """Cache blocks that a worker wrote into its stock; see ``Storer.store``.

        Raises LimitExceeded, InvalidArgument, UnknownSequence.
        """
        self._check_size(max(len(wanted.chain), wanted.room))
        return self._storer.store(lease, namespace, wanted)

    def fill_stock(self, lease: int, wanted: ToStore) -> Flow[None]:
        """Give the new stock that ``store`` made its room; without that it stays as it is.

        What was stored is held by nobody, and may leave to make this room.
        """
        if self.has_sequence(lease, wanted.new_stock):
            room_tokens = wanted.room * wanted.chain.tokens.shape[1]
            with suppress(PoolExhausted):
                yield from self.reserve(lease, wanted.new_stock, 0, room_tokens)

    def take_sealed(self) -> list[tuple[I64, U64]]:
        """Rows and ids sealed since the last call: candidates for write-behind. Mutates."""
        if not self._sealer.newly_sealed:
            return []
        taken, self._sealer.newly_sealed = self._sealer.newly_sealed, []
        return taken

    def truncate(self, lease: int, local: int, tokens: int) -> TableView:
        """Keep the first ``tokens`` tokens. Mutates."""
        sequence = self._sequences.find(lease, local)
        block_tokens = self._sequences.block_tokens(sequence)
        keep = -(-tokens // block_tokens)
        if tokens < 0 or keep > len(sequence):
            raise InvalidArgument(
                f"truncate to {tokens} tokens: the sequence has {len(sequence)} blocks of "
                f"{block_tokens}"
            )
        if keep < len(sequence):
            self._sequences.truncate(sequence, keep)
        return self._sequences.view(sequence)

    def fork(self, lease: int, local: int, new_local: int, tokens: int) -> TableView:
        """A new sequence on the same first ``tokens`` tokens; nothing is copied yet. Mutates."""
        sequence = self._sequences.active(lease, local)
        identity = self._sequences.identity(lease, new_local)
        if identity in self.state.sequences:
            return self._sequences.view(self._sequences.find(lease, new_local))
        self._sequences.check_limit(lease)
        count = -(-tokens // self._sequences.block_tokens(sequence))
        if tokens < 0 or count > len(sequence):
            raise InvalidArgument(
                f"fork at {tokens} tokens: the sequence has only {len(sequence)} blocks"
            )
        opened = blank(1, Kind.SEQ_OPEN)
        opened["id"] = identity
        opened["key"] = sequence.namespace
        rows = sequence.rows[:count].astype(np.uint32)
        self.placement.commit(join([opened, push(identity, rows)]))
        return self._sequences.view(self.state.sequences[identity])

    def suspend(self, lease: int, local: int) -> None:
        """The worker maps the blocks no more: they may spill. Mutates."""
        sequence = self._sequences.find(lease, local)
        if sequence.suspended:
            return
        self._sequences.log(Kind.SEQ_SUSPEND, sequence)
        self.placement.touch(sequence.rows[::-1])

    def resume(self, lease: int, local: int) -> Flow[TableView]:
        """Bring all blocks back into the device tier; slots may differ from before.

        Raises PoolExhausted, TierFailed if the disk refuses to be read now, or CorruptionError if a
        block is lost. The sequence stays suspended, in the last case with the blocks before it.
        """
        sequence = self._sequences.find(lease, local)
        if sequence.suspended and (yield from self.placement.verify(sequence.rows)):
            sequence = self._sequences.find(lease, local)
        if sequence.suspended:
            self._sequences.log(Kind.SEQ_RESUME, sequence)
        elif self._sequences.is_up(sequence):
            return self._sequences.view(sequence)
        rows = sequence.rows
        ids = self.state.blocks.id[rows]
        try:
            usable = yield from self.placement.bring_up(rows)
        except (PoolExhausted, TierFailed):
            self._suspend_unless_up(sequence)
            raise
        self._require_unchanged("resume", sequence, ids)
        if usable < len(rows):
            self._sequences.truncate(sequence, usable)
            self.suspend(lease, local)
            raise CorruptionError(
                f"block {usable} of the sequence is lost; it keeps the {usable} before it",
                blocks=usable,
            )
        self._reopen(sequence)
        self.placement.touch(sequence.rows[::-1])
        return self._sequences.view(sequence)

    def _reopen(self, sequence: Sequence) -> None:
        """The worker writes on in the unsealed blocks: copies made of them are out of date."""
        rows, blocks = sequence.rows, self.state.blocks
        rows = rows[~blocks.is_sealed(rows)]
        self.placement.reopen(rows)
        slots = blocks.slot[Tier.DEVICE][rows].astype(np.int64)
        self.placement.tables.open(
            Tier.DEVICE, self._sequences.pool(sequence.namespace), slots, blocks.id[rows]
        )

    def _suspend_unless_up(self, sequence: Sequence) -> None:
        """A flow gives up on bringing the sequence up. Mutates."""
        if self.state.sequences.get(sequence.id) is not sequence or sequence.fenced:
            return
        if sequence.suspended:
            return
        if not self._sequences.is_up(sequence):
            self._sequences.log(Kind.SEQ_SUSPEND, sequence)
            self.placement.touch(sequence.rows[::-1])

    def _require_unchanged(self, verb: str, sequence: Sequence, ids: U64) -> None:
        """Raise InvalidArgument or UnknownSequence if another request interfered."""
        if self._sequences.unchanged(sequence, ids):
            return
        self._suspend_unless_up(sequence)
        local = sequence.id & (LOCAL_MAX - 1)
        if self.state.sequences.get(sequence.id) is not sequence or sequence.fenced:
            raise UnknownSequence(f"{verb}: sequence {local} was ended meanwhile")
        raise InvalidArgument(
            f"{verb}: another request changed sequence {local} meanwhile; ask once at a time"
        )

    def release(self, lease: int, locals_: list[int]) -> None:
        """End sequences; their full blocks stay cached. Unknown names are ignored. Mutates.

        Raises NotOwner, before anything is released, if one belongs to another lease.
        """
        ending: dict[int, Sequence] = {}
        for local in locals_:
            try:
                sequence = self._sequences.find_any(lease, local)
            except UnknownSequence:
                continue
            ending[sequence.id] = sequence
        if not ending:
            return
        tables = [sequence.rows for sequence in ending.values()]
        records = blank(len(ending), Kind.SEQ_CLOSE)
        records["id"] = list(ending)
        self.placement.commit(records)
        for rows in tables:
            self._sequences.touch_released(rows)

    # --- matching ---------------------------------------------------------------------------------

    def _named(self, namespace: int, hi: U64, lo: U64) -> I64:
        """Rows of the namespace's blocks of these names, whatever chains they are of; -1: none."""
        blocks = self.state.blocks
        rows = self.state.index.get(hi, lo, blocks.hash_hi, blocks.hash_lo)
        found = rows >= 0
        found[found] = blocks.namespace[rows[found]] == namespace
        rows[~found] = -1
        return rows

    def _leading_in_device(self, rows: I64) -> int:
        rows = rows[: leading(self.state.blocks.has_copy(rows, Tier.DEVICE))]
        return self.placement.doubt.leading_sound(rows)

    # --- reserve ----------------------------------------------------------------------------------

    def _exclusive_until(self, rows: I64, first: int) -> int:
        """How many leading blocks stay: from ``first`` on none may be sealed or shared.

        From the first that is, all later ones are replaced too (they have no content yet), so
        that ids keep growing along a chain.
        """
        tail = rows[first:]
        if not len(tail):
            return first
        blocks = self.state.blocks
        unfit = indices(blocks.is_sealed(tail) | (blocks.refs[tail] > 1))
        return first + int(unfit[0]) if len(unfit) else len(rows)

    def _copy_block(self, pool: int, row: I64, slots: I64) -> Flow[bool]:
        """Copy-on-write: the payload of ``row`` (shape [1]) into the first of ``slots``.

        False if it does not have its checksum.
        """
        blocks = self.state.blocks
        ids, source = blocks.id[row].copy(), blocks.slot[Tier.DEVICE][row].astype(np.int64)
        with self.placement.holds[Tier.DEVICE].taken(row):
            moved: Moved = yield Move(pool, ids, Tier.DEVICE, source, Tier.DEVICE, slots[:1])
        return bool(moved.ok[0])

    def _extend(self, sequence: Sequence, keep: int, slots: I64) -> None:
        """Log ``len(slots)`` fresh blocks behind the first ``keep`` of the sequence."""
        records = []
        if keep < len(sequence):
            cut = blank(1, Kind.SEQ_TRUNCATE)
            cut["id"] = sequence.id
            cut["loc"] = keep
            records.append(cut)
        cut_off = sequence.rows[keep:]
        self._log_fresh(sequence.id, sequence.namespace, slots, records)
        self._sequences.touch_released(cut_off)

    def _log_fresh(self, identity: int, namespace: int, slots: I64, before: list[Records]) -> None:
        """Log records, and then fresh blocks in these slots at the end of the sequence."""
        state, fresh = self.state, len(slots)
        rows = state.row_set.hold(fresh)
        first_id = state.next_block
        ids = np.arange(first_id, first_id + fresh, dtype=np.uint64)
        self.placement.tables.open(Tier.DEVICE, self._sequences.pool(namespace), slots, ids)
        added = state.structures.shortcuts.extend(state, identity, namespace, rows, slots, before)
        if added is not None:
            self.placement.commit(added, applied=True)
        else:
            allocated = blank(fresh, Kind.ALLOC)
            allocated["key"], allocated["id"], allocated["loc"] = rows, ids, slots
            allocated["aux"], allocated["tier"] = namespace, Tier.DEVICE
            pushed = push(identity, rows.astype(np.uint32))
            self.placement.commit(join([*before, allocated, pushed]))
        self.placement.doubt.clear(rows)
        self.placement.residency.born(first_id, rows)

    # --- parts ------------------------------------------------------------------------------------

    def _check_size(self, blocks: int) -> None:
        if blocks > self.limits.blocks_per_request:
            raise LimitExceeded(
                f"{blocks} blocks in one request; the limit is {self.limits.blocks_per_request} "
                "(server.blocks_per_request_max)",
                limit=self.limits.blocks_per_request,
                asked=blocks,
            )
