"""The verbs: what a worker's request means for the state.

Each verb is a flow (see ``core.effects``): it checks, decides, commits records and returns its
result. Between an effect and its result other flows run, so every flow looks at the state again
after it waited. All verbs are idempotent, because a worker repeats its last request after a
reconnect.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from tierkv.core.blocks import SEALED
from tierkv.core.effects import Flow, Headers, Move, Moved, ReadHeaders, Wait
from tierkv.core.ids import I64, NO_BLOCK, U32, U64, Bool, Tier, lease_of, sequence_id
from tierkv.core.placement import Entries, Placement
from tierkv.core.records import Kind, Records, blank, push
from tierkv.core.state import Lease, PoolShape, Sequence, State
from tierkv.errors import (
    CorruptionError,
    InvalidArgument,
    LimitExceeded,
    NotOwner,
    PoolExhausted,
    UnknownNamespace,
    UnknownSequence,
)

LOCAL_MAX = 2**32

RECORDS_PER_BLOCK_MAX = 3
"""Most records that one commit makes for one block of a request (a place and two drops)."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what one worker may ask for."""

    sequences: int = 65_536
    blocks_per_request: int = 65_536


@dataclass(frozen=True)
class Chain:
    """Blocks of a request as they came: names, tokens, digests of extra keys.

    ``hi``, ``lo`` u64 [n], ``tokens`` u32 [n, block_tokens], ``extras`` u64 [n].
    """

    hi: U64
    lo: U64
    tokens: U32
    extras: U64

    def __len__(self) -> int:
        return len(self.hi)

    def part(self, start: int, stop: int) -> Chain:
        """Blocks start .. stop - 1."""
        part = slice(start, stop)
        return Chain(self.hi[part], self.lo[part], self.tokens[part], self.extras[part])


@dataclass(frozen=True)
class TableView:
    """A sequence's block table: device slots (u32 [n]) and how many leading blocks are sealed.

    ``by_tier``: for ``acquire``, how many of the blocks came from each tier.
    """

    slots: U32
    sealed: int
    by_tier: tuple[int, int, int] = (0, 0, 0)


class Planner:
    """Verbs over one state and its placement."""

    def __init__(self, state: State, placement: Placement, limits: Limits) -> None:
        self.state = state
        self.placement = placement
        self.limits = limits
        self.sealed: list[tuple[I64, U64]] = []
        """Rows and ids sealed since the owner last looked: candidates for write-behind."""

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
        rows = [sequence.rows for sequence in sequences]
        records = blank(1, Kind.LEASE_CLOSE)
        records["key"] = lease
        self.placement.commit(records)
        self._touch_released(rows)

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

    def lookup(self, namespace: int, hi: U64, lo: U64) -> tuple[int, int, int]:
        """Leading blocks that are cached, by the best tier each is in. Touches nothing."""
        self._pool(namespace)
        rows = self._match(namespace, hi, lo)
        return self._count_tiers(rows)

    def sequence(self, lease: int, local: int) -> Sequence:
        """A lease's own sequence. Raises UnknownSequence, NotOwner."""
        if local >= LOCAL_MAX:
            if lease_of(local) != lease:
                raise NotOwner(f"sequence {local:#x} belongs to another lease")
            local &= LOCAL_MAX - 1
        found = self.state.sequences.get(sequence_id(lease, local))
        if found is None:
            raise UnknownSequence(f"there is no sequence {local}; it ended or was never begun")
        return found

    def table(self, sequence: Sequence) -> TableView:
        """The block table of a sequence as it is now."""
        rows = sequence.rows
        return TableView(self.state.blocks.slot[Tier.DEVICE][rows], self._sealed_count(rows))

    # --- verbs ------------------------------------------------------------------------------------

    def acquire(self, lease: int, namespace: int, local: int, chain: Chain) -> Flow[TableView]:
        """Begin a sequence on the longest cached prefix of ``chain``: pinned, verified, mapped.

        Raises UnknownNamespace, LimitExceeded, InvalidArgument.
        """
        self._pool(namespace)
        self._check_size(len(chain))
        identity = self._new_identity(lease, local)
        if identity in self.state.sequences:
            # Asked before: maybe by a worker whose daemon died on the way to the reply.
            return (yield from self._acquire_again(lease, local, chain))
        rows = self._match(namespace, chain.hi, chain.lo)
        rows = rows[: self._proven(rows, chain)]
        by_tier = self._best_tiers(rows)
        opened = blank(1, Kind.SEQ_OPEN)
        opened["id"] = identity
        opened["key"] = namespace
        self.placement.commit(np.concatenate([opened, push(identity, rows.astype(np.uint32))]))
        try:
            usable = yield from self._bring_leading(rows)
        except PoolExhausted:
            usable = self._leading_in_device(rows)
        sequence = self.sequence(lease, local)
        usable = min(usable, self._proven(rows[:usable], chain))
        if usable < len(rows):
            self._truncate(sequence, usable)
        view = self.table(sequence)
        hits = np.bincount(by_tier[:usable], minlength=len(Tier)).tolist()
        tokens = chain.tokens.shape[1]
        self.placement.counters.looked_up(
            len(chain) * tokens,
            device=hits[Tier.DEVICE] * tokens,
            host=hits[Tier.HOST] * tokens,
            disk=hits[Tier.DISK] * tokens,
        )
        return TableView(view.slots, view.sealed, (hits[0], hits[1], hits[2]))

    def _acquire_again(self, lease: int, local: int, chain: Chain) -> Flow[TableView]:
        """The sequence that an earlier attempt left, as far as its blocks are ``chain``'s."""
        # If a block is lost, the sequence keeps those before it: a shorter prefix.
        with contextlib.suppress(CorruptionError):
            yield from self.resume(lease, local)
        sequence = self.sequence(lease, local)
        sealed = sequence.rows[: min(self._sealed_count(sequence.rows), len(chain))]
        proven = self._proven(sealed, chain)
        if proven < len(sealed):
            self._truncate(sequence, proven)
        return self.table(sequence)

    def reserve(self, lease: int, local: int, written: int, total: int) -> Flow[TableView]:
        """Room for ``total`` tokens; blocks from token ``written`` on are exclusive.

        All or nothing. Raises PoolExhausted, InvalidArgument, UnknownSequence.
        """
        while True:
            sequence = self._active_sequence(lease, local)
            pool = self._pool(sequence.namespace)
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
                return self.table(sequence)
            copied = rows[first : first + 1] if keep == first and written % block_tokens else None
            slots = yield from self.placement.room(Tier.DEVICE, pool, fresh)
            try:
                again = self.state.sequences.get(sequence.id)
                if again is not sequence or not np.array_equal(sequence.rows, rows):
                    continue
                if copied is not None and not (yield from self._copy_block(pool, copied, slots)):
                    continue
                if not np.array_equal(sequence.rows, rows) or sequence.suspended:
                    continue
                self._extend(sequence, keep, slots)
            finally:
                self.placement.unhold_slots(Tier.DEVICE, pool, slots)
            return self.table(sequence)

    def seal(
        self, lease: int, local: int, first: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> Flow[TableView]:
        """Blocks ``first`` .. are full: name them, or take the cached twin of each instead.

        Raises InvalidArgument, UnknownSequence.
        """
        sequence = self._active_sequence(lease, local)
        sealed = self._sealed_count(sequence.rows)
        if first > sealed or first + len(chain) > len(sequence):
            raise InvalidArgument(
                f"seal: blocks {first} to {first + len(chain) - 1} of a sequence with "
                f"{len(sequence)} blocks, {sealed} of them sealed; blocks are sealed in order"
            )
        skip = min(sealed - first, len(chain))
        self._check_resealed(sequence, first, chain.part(0, skip))
        chain = chain.part(skip, len(chain))
        at = first + skip
        twins = yield from self._twins(lease, local, at, chain)
        # The world may have moved on while headers were read.
        sequence = self._active_sequence(lease, local)
        if self._sealed_count(sequence.rows) != at or len(sequence) < at + len(chain):
            raise InvalidArgument("seal: the sequence changed while it was being sealed")
        self._take_twins(sequence, at, twins, chain, sum_hi[skip:], sum_lo[skip:])
        done = len(twins)
        self._seal_own(
            sequence,
            at + done,
            chain.part(done, len(chain)),
            sum_hi[skip + done :],
            sum_lo[skip + done :],
        )
        return self.table(sequence)

    def truncate(self, lease: int, local: int, tokens: int) -> TableView:
        """Keep the first ``tokens`` tokens. Mutates."""
        sequence = self.sequence(lease, local)
        block_tokens = self._block_tokens(sequence)
        keep = -(-tokens // block_tokens)
        if tokens < 0 or keep > len(sequence):
            raise InvalidArgument(
                f"truncate to {tokens} tokens: the sequence has {len(sequence)} blocks of "
                f"{block_tokens}"
            )
        if keep < len(sequence):
            self._truncate(sequence, keep)
        return self.table(sequence)

    def fork(self, lease: int, local: int, new_local: int, tokens: int) -> TableView:
        """A new sequence on the same first ``tokens`` tokens; nothing is copied yet. Mutates."""
        sequence = self._active_sequence(lease, local)
        identity = self._new_identity(lease, new_local)
        if identity in self.state.sequences:
            return self.table(self.state.sequences[identity])
        count = -(-tokens // self._block_tokens(sequence))
        if tokens < 0 or count > len(sequence):
            raise InvalidArgument(
                f"fork at {tokens} tokens: the sequence has only {len(sequence)} blocks"
            )
        opened = blank(1, Kind.SEQ_OPEN)
        opened["id"] = identity
        opened["key"] = sequence.namespace
        rows = sequence.rows[:count].astype(np.uint32)
        self.placement.commit(np.concatenate([opened, push(identity, rows)]))
        return self.table(self.state.sequences[identity])

    def suspend(self, lease: int, local: int) -> None:
        """The worker maps the blocks no more: they may spill. Mutates."""
        sequence = self.sequence(lease, local)
        if sequence.suspended:
            return
        self._log_sequence(Kind.SEQ_SUSPEND, sequence)
        self.placement.touch(sequence.rows[::-1])

    def resume(self, lease: int, local: int) -> Flow[TableView]:
        """Bring all blocks back into the device tier; slots may differ from before.

        Raises PoolExhausted (the sequence stays suspended), CorruptionError (a block is lost; the
        sequence keeps the blocks before it and is active).
        """
        sequence = self.sequence(lease, local)
        if not sequence.suspended:
            return self.table(sequence)
        self._log_sequence(Kind.SEQ_RESUME, sequence)
        rows = sequence.rows
        try:
            usable = yield from self._bring_leading(rows)
        except PoolExhausted:
            if self.state.sequences.get(sequence.id) is sequence and not sequence.suspended:
                self.suspend(lease, local)
            raise
        sequence = self.sequence(lease, local)
        if usable < len(rows):
            self._truncate(sequence, usable)
            raise CorruptionError(
                f"block {usable} of the sequence is lost; it keeps the {usable} before it",
                blocks=usable,
            )
        # The worker writes on in unsealed blocks: copies made of them are out of date.
        blocks = self.state.blocks
        open_rows = rows[(blocks.flags[rows] & SEALED) == 0]
        self.placement.drop_lower_copies(open_rows, "stale")
        slots = blocks.slot[Tier.DEVICE][open_rows].astype(np.int64)
        pool = self._pool(sequence.namespace)
        self.placement.tables.open(Tier.DEVICE, pool, slots, blocks.id[open_rows])
        return self.table(sequence)

    def release(self, lease: int, locals_: list[int]) -> None:
        """End sequences; their full blocks stay cached. Unknown names are ignored. Mutates.

        Raises NotOwner, before anything is released, if one belongs to another lease.
        """
        ending: dict[int, Sequence] = {}
        for local in locals_:
            try:
                sequence = self.sequence(lease, local)
            except UnknownSequence:
                continue
            ending[sequence.id] = sequence
        if not ending:
            return
        rows = [sequence.rows for sequence in ending.values()]
        records = blank(len(ending), Kind.SEQ_CLOSE)
        records["id"] = list(ending)
        self.placement.commit(records)
        self._touch_released(rows)

    # --- matching ---------------------------------------------------------------------------------

    def _match(self, namespace: int, hi: U64, lo: U64) -> I64:
        """Rows of the longest chain under these hashes whose links are proven, shape [<= n]."""
        blocks = self.state.blocks
        rows = self.state.index.get_prefix(hi, lo, blocks.hash_hi, blocks.hash_lo)
        if not len(rows):
            return rows
        parents = np.concatenate([[np.uint64(NO_BLOCK)], blocks.id[rows[:-1]]])
        good = (blocks.parent[rows] == parents) & (blocks.namespace[rows] == namespace)
        bad = np.flatnonzero(~good)
        if len(bad):
            self.placement.counters.mismatched_blocks += 1
            rows = rows[: bad[0]]
        return rows

    def _proven(self, rows: I64, chain: Chain) -> int:
        """How many leading rows do not contradict the chain's tokens and extra keys.

        Blocks that are only on disk cannot be judged yet and pass; they are judged again when
        they have come up.
        """
        blocks = self.state.blocks
        good = np.ones(len(rows), np.bool_)
        seen = np.zeros(len(rows), np.bool_)
        for tier in (Tier.DEVICE, Tier.HOST):
            here = blocks.has_copy(rows, tier) & ~seen
            seen |= here
            for pool, members in self.state.by_pool(rows[here]):
                slots = blocks.slot[tier][members].astype(np.int64)
                tables = self.placement.tables
                same = (tables.tokens(tier, pool, slots) == chain.tokens[: len(rows)][here]).all(1)
                same &= tables.extras(tier, pool, slots) == chain.extras[: len(rows)][here]
                good[here] = same
        bad = np.flatnonzero(~good)
        if len(bad):
            self.placement.counters.mismatched_blocks += 1
            return int(bad[0])
        return len(rows)

    def _best_tiers(self, rows: I64) -> I64:
        return self.state.blocks.best_tier(rows)

    def _count_tiers(self, rows: I64) -> tuple[int, int, int]:
        counts = np.bincount(self._best_tiers(rows), minlength=len(Tier))
        return int(counts[0]), int(counts[1]), int(counts[2])

    def _bring_leading(self, rows: I64) -> Flow[int]:
        if not len(rows):
            return 0
        return (yield from self.placement.bring_up(rows))

    def _leading_in_device(self, rows: I64) -> int:
        missing = np.flatnonzero(~self.state.blocks.has_copy(rows, Tier.DEVICE))
        return int(missing[0]) if len(missing) else len(rows)

    # --- reserve ----------------------------------------------------------------------------------

    def _exclusive_until(self, rows: I64, first: int) -> int:
        """How many leading blocks stay: from ``first`` on none may be sealed or shared.

        From the first that is, all later ones are replaced too (they have no content yet), so
        that ids keep growing along a chain.
        """
        tail = rows[first:]
        blocks = self.state.blocks
        unfit = np.flatnonzero(((blocks.flags[tail] & SEALED) != 0) | (blocks.refs[tail] > 1))
        return first + int(unfit[0]) if len(unfit) else len(rows)

    def _copy_block(self, pool: int, row: I64, slots: I64) -> Flow[bool]:
        """Copy-on-write: the payload of ``row`` into the first of ``slots``."""
        blocks = self.state.blocks
        source = blocks.slot[Tier.DEVICE][row].astype(np.int64)
        moved: Moved = yield Move(pool, blocks.id[row], Tier.DEVICE, source, Tier.DEVICE, slots[:1])
        return bool(moved.ok[0])

    def _extend(self, sequence: Sequence, keep: int, slots: I64) -> None:
        """Log ``len(slots)`` fresh blocks behind the first ``keep`` of the sequence."""
        fresh = len(slots)
        rows = self.state.row_set.hold(fresh)
        allocated = blank(fresh, Kind.ALLOC)
        allocated["key"] = rows
        allocated["id"] = np.arange(fresh) + self.state.next_block
        allocated["aux"] = sequence.namespace
        allocated["tier"] = Tier.DEVICE
        allocated["loc"] = slots
        records = [allocated]
        if keep < len(sequence):
            cut = blank(1, Kind.SEQ_TRUNCATE)
            cut["id"] = sequence.id
            cut["loc"] = keep
            records.append(cut)
        records.append(push(sequence.id, rows.astype(np.uint32)))
        pool = self._pool(sequence.namespace)
        self.placement.tables.open(Tier.DEVICE, pool, slots, allocated["id"])
        cut_off = sequence.rows[keep:]
        ids = self.state.blocks.id[cut_off].copy()
        self.placement.commit(np.concatenate(records))
        self._touch_idle(cut_off[self.state.blocks.id[cut_off] == ids])

    # --- seal -------------------------------------------------------------------------------------

    def _twins(self, lease: int, local: int, at: int, chain: Chain) -> Flow[I64]:
        """Rows of cached blocks that are the same as the leading blocks of ``chain``, proven."""
        blocks = self.state.blocks
        while True:
            sequence = self._active_sequence(lease, local)
            rows = self.state.index.get_prefix(chain.hi, chain.lo, blocks.hash_hi, blocks.hash_lo)
            if not len(rows):
                return rows
            parents = np.concatenate(
                [[np.uint64(self._parent_id(sequence, at))], blocks.id[rows[:-1]]]
            )
            linked = blocks.parent[rows] == parents
            linked &= blocks.namespace[rows] == sequence.namespace
            rows = _leading(rows, linked)
            rows = rows[: self._proven(rows, chain)]
            coming = [self.placement.arriving(row) for row in rows.tolist()]
            signal = next((one for one in coming if one is not None), None)
            if signal is None:
                return (yield from self._prove_on_disk(rows, chain))
            yield Wait(signal)

    def _prove_on_disk(self, rows: I64, chain: Chain) -> Flow[I64]:
        """Cut ``rows`` where a block that is only on disk has other tokens than ``chain``."""
        blocks = self.state.blocks
        cold = np.flatnonzero(blocks.best_tier(rows) == Tier.DISK)
        if not len(cold):
            return rows
        ids = blocks.id[rows].copy()
        pool = int(self.state.pool_of(rows[:1])[0])
        slots = blocks.slot[Tier.DISK][rows[cold]].astype(np.int64)
        headers: Headers = yield ReadHeaders(pool, ids[cold], slots)
        same = headers.ok & (headers.tokens == chain.tokens[cold]).all(1)
        same &= headers.extras == chain.extras[cold]
        good = np.ones(len(rows), np.bool_)
        good[cold] = same
        good &= (blocks.id[rows] == ids) & blocks.has_any_copy(rows)
        return _leading(rows, good)

    def _take_twins(
        self, sequence: Sequence, at: int, twins: I64, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> None:
        """Put cached twins in place of the sequence's own blocks, whose slots become free.

        A twin that is in the device tier is used as it is. One that is only further down gets
        the worker's fresh payload as its device copy instead of being read back.
        """
        if not len(twins):
            return
        blocks = self.state.blocks
        own = sequence.rows[at : at + len(twins)]
        slots = blocks.slot[Tier.DEVICE][own].astype(np.int64)
        swaps = blank(len(twins), Kind.SEQ_SWAP)
        swaps["id"] = sequence.id
        swaps["loc"] = np.arange(at, at + len(twins))
        swaps["key"] = twins
        cold = np.flatnonzero(~blocks.has_copy(twins, Tier.DEVICE))
        chosen = twins[cold]
        # Before the slots' entries change: a crash in between must not find the twins' entries in
        # slots that are still the sequence's own.
        self.placement.commit(swaps)
        if len(cold):
            placed = blank(len(cold), Kind.PLACE)
            placed["key"] = chosen
            placed["id"] = blocks.id[chosen]
            placed["tier"] = Tier.DEVICE
            placed["loc"] = slots[cold]
            placed["extra_hi"], placed["extra_lo"] = sum_hi[cold], sum_lo[cold]
            part = Chain(chain.hi[cold], chain.lo[cold], chain.tokens[cold], chain.extras[cold])
            parents = blocks.parent[chosen]
            self._fill(sequence, slots[cold], chosen, parents, part, sum_hi[cold], sum_lo[cold])
            self.placement.commit(np.concatenate([placed, *self._forget_lower(chosen)]))
        self.placement.counters.deduplicated_blocks += len(twins)
        if len(cold):
            self.sealed.append((chosen, blocks.id[chosen].copy()))

    def _forget_lower(self, rows: I64) -> list[Records]:
        """DROP records of all copies below the device tier: they hold an older payload."""
        blocks = self.state.blocks
        dropped = []
        for tier in (Tier.HOST, Tier.DISK):
            here = rows[blocks.has_copy(rows, tier)]
            records = blank(len(here), Kind.DROP)
            records["key"] = here
            records["id"] = blocks.id[here]
            records["tier"] = tier
            records["loc"] = blocks.slot[tier][here]
            self.placement.policies[tier].forget(here)
            dropped.append(records)
        return dropped

    def _fill(
        self,
        sequence: Sequence,
        slots: I64,
        rows: I64,
        parents: U64,
        chain: Chain,
        sum_hi: U64,
        sum_lo: U64,
    ) -> None:
        """Write slot entries. They must be there before the log says the slot holds the block."""
        ids = self.state.blocks.id[rows]
        entries = Entries(
            sequence.namespace,
            ids,
            parents,
            chain.hi,
            chain.lo,
            sum_hi,
            sum_lo,
            chain.extras,
            chain.tokens,
        )
        self.placement.tables.fill(Tier.DEVICE, self._pool(sequence.namespace), slots, entries)

    def _seal_own(
        self, sequence: Sequence, at: int, chain: Chain, sum_hi: U64, sum_lo: U64
    ) -> None:
        if not len(chain):
            return
        blocks = self.state.blocks
        rows = sequence.rows[at : at + len(chain)]
        ids = blocks.id[rows].copy()
        parents = np.concatenate([[np.uint64(self._parent_id(sequence, at))], ids[:-1]])
        records = blank(len(rows), Kind.SEAL)
        records["key"] = rows
        records["id"] = ids
        records["hash_hi"], records["hash_lo"] = chain.hi, chain.lo
        records["loc"] = parents
        records["gen"] = chain.extras
        records["extra_hi"], records["extra_lo"] = sum_hi, sum_lo
        records["tier"] = 1
        slots = blocks.slot[Tier.DEVICE][rows].astype(np.int64)
        self._fill(sequence, slots, rows, parents, chain, sum_hi, sum_lo)
        self.placement.commit(records)
        self.sealed.append((rows, ids))

    # --- parts ------------------------------------------------------------------------------------

    def _pool(self, namespace: int) -> int:
        entry = self.state.namespaces.get(namespace)
        if entry is None:
            raise UnknownNamespace(f"there is no namespace {namespace}; open it first")
        return entry.pool

    def _block_tokens(self, sequence: Sequence) -> int:
        return self.state.pools[self._pool(sequence.namespace)].block_tokens

    def _active_sequence(self, lease: int, local: int) -> Sequence:
        sequence = self.sequence(lease, local)
        if sequence.suspended:
            raise InvalidArgument(f"sequence {local} is suspended; resume it first")
        return sequence

    def _new_identity(self, lease: int, local: int) -> int:
        if not 1 <= local < LOCAL_MAX:
            raise InvalidArgument(f"sequence number {local}: it must be 1 to {LOCAL_MAX - 1}")
        if len(self.state.lease_sequences[lease]) >= self.limits.sequences:
            raise LimitExceeded(
                f"a lease may hold {self.limits.sequences} sequences; end some first",
                limit=self.limits.sequences,
            )
        return sequence_id(lease, local)

    def _check_size(self, blocks: int) -> None:
        if blocks > self.limits.blocks_per_request:
            raise LimitExceeded(
                f"{blocks} blocks in one request; the limit is {self.limits.blocks_per_request} "
                "(server.blocks_per_request_max)",
                limit=self.limits.blocks_per_request,
                asked=blocks,
            )

    def _sealed_count(self, rows: I64) -> int:
        sealed = (self.state.blocks.flags[rows] & SEALED) != 0
        return int(np.argmin(sealed)) if not sealed.all() else len(rows)

    def _parent_id(self, sequence: Sequence, at: int) -> int:
        return int(self.state.blocks.id[sequence.rows[at - 1]]) if at else NO_BLOCK

    def _check_resealed(self, sequence: Sequence, first: int, chain: Chain) -> None:
        rows = sequence.rows[first : first + len(chain)]
        blocks = self.state.blocks
        if not (
            np.array_equal(blocks.hash_hi[rows], chain.hi)
            and np.array_equal(blocks.hash_lo[rows], chain.lo)
        ):
            raise InvalidArgument("seal: a block of the sequence is sealed under another hash")

    def _log_sequence(self, kind: Kind, sequence: Sequence) -> None:
        records = blank(1, kind)
        records["id"] = sequence.id
        self.placement.commit(records)

    def _truncate(self, sequence: Sequence, keep: int) -> None:
        cut_off = sequence.rows[keep:]
        ids = self.state.blocks.id[cut_off].copy()
        records = blank(1, Kind.SEQ_TRUNCATE)
        records["id"] = sequence.id
        records["loc"] = keep
        self.placement.commit(records)
        self._touch_idle(cut_off[self.state.blocks.id[cut_off] == ids])

    def _touch_released(self, tables: list[I64]) -> None:
        for rows in tables:
            self._touch_idle(rows[self.state.blocks.id[rows] != 0])

    def _touch_idle(self, rows: I64) -> None:
        """A request let go of these blocks (in chain order): most recent now, leaf to root."""
        self.placement.touch(rows[::-1])


def _leading(rows: I64, good: Bool) -> I64:
    """Rows up to the first that is not good."""
    return rows if good.all() else rows[: int(np.argmin(good))]
