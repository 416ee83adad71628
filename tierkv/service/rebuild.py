"""The state, made anew from what the slots say of themselves when the index is lost.

Slot entries (headers on disk, slot tables in RAM) name their blocks completely. What only index and
log knew is lost: sequences, leases, and which slots were free. So three rules decide:

- A copy counts unless a log that is left says that it was dropped, or its block was deleted (which
  a file of its own says, see ``deleted``). One that was evicted before the last checkpoint comes
  back if nothing was written over it: sound content, which a cache may serve.
- Of several blocks with one name the youngest stays. Children of one that goes become children of
  the one that stays, if both chains are the same token by token; else they go as well.
- A block with an ancestor that is nowhere goes: ids are never used twice, so it could never be
  found again.

Nothing here does I/O but for reading entries; the result is records, for ``State.apply``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.core.ids import I64, NO_SLOT, U32, U64, Bool, Tier
from tierkv.core.records import RECORD, Kind, Records, blank, join, of_copies, require_known
from tierkv.core.state import PoolShape
from tierkv.service.deleted import Deletion
from tierkv.tiers.arena import POOLS_MAX, Arena
from tierkv.tiers.copy import whole_entries
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.entry import DIGEST_BYTES, Entries, has_sum, split_hashes

COPY = np.dtype(
    [
        ("id", "<u8"),
        ("parent", "<u8"),
        ("hash", "<u8", (2,)),
        ("sum", "<u8", (2,)),
        ("extra", "<u8"),
        ("digest", "<u8", (2,)),
        ("tokens", "<u8", (2,)),
        ("slot", "<u4"),
        ("shape", "<u2"),
        ("tier", "u1"),
    ]
)
"""One slot that holds a sealed block. ``tokens`` is a digest of the token ids that nobody can
forge, ``digest`` the namespace's, ``shape`` counts in the list of geometries beside."""

IDENTITY = ("parent", "hash", "sum", "extra", "digest", "tokens", "shape")
"""What all copies of one block have in common."""

ROWS_AT_ONCE = 8192
NAMESPACES_MAX = 2**16 - 1

Copies = npt.NDArray[np.void]
"""Shape [n], dtype COPY."""


@dataclass
class FoundCopies:
    """All copies in the slots' own words. ``damaged``: slots that were written but say nothing."""

    shapes: list[PoolShape] = field(default_factory=list)
    parts: list[Copies] = field(default_factory=list)
    damaged: int = 0

    def add(self, tier: Tier, shape: PoolShape, slots: U32, entries: Entries) -> None:
        """Take note of slots (shape [n]) with sound entries; open blocks are passed over."""
        if shape not in self.shapes:
            self.shapes.append(shape)
        sealed = has_sum(entries) & entries["digest"].any(axis=1)
        copies = _copies_of(slots[sealed], entries[sealed])
        copies["shape"] = self.shapes.index(shape)
        copies["tier"] = tier
        self.parts.append(copies)

    def all(self) -> Copies:
        """All of them, in no order."""
        return _join(self.parts)


@dataclass
class LastWords:
    """What a log that can no longer be replayed still says: rows in it mean nothing any more.

    ``placed``: PLACE and DROP records, in order.
    """

    placed: list[Records] = field(default_factory=list)
    next_block: int = 1
    next_lease: int = 1
    epoch: int = 0

    def hear(self, records: Records) -> None:
        """Listen to the records of a frame. Raises ConfigError if a newer version wrote them."""
        kinds = records["type"]
        require_known(kinds)
        self.placed.append(records[(kinds == Kind.PLACE) | (kinds == Kind.DROP)].copy())
        for kind, field_name, name, above in (
            (Kind.ALLOC, "id", "next_block", 1),
            (Kind.LEASE_OPEN, "key", "next_lease", 1),
            (Kind.EPOCH, "id", "epoch", 0),
        ):
            numbers = records[field_name][kinds == kind]
            if len(numbers):
                setattr(self, name, max(getattr(self, name), int(numbers.max()) + above))


@dataclass(frozen=True)
class Rebuilt:
    """``records`` make the state from an empty one, with so many ``blocks``.

    What is not in it: copies that the log called ``dropped`` or whose block was ``deleted``, and
    ``stale`` ones, whose block has a younger one of its name or lacks its beginning.
    """

    records: list[Records]
    blocks: int
    dropped: int
    stale: int
    deleted: int = 0


def rebuild(
    copies: Copies,
    shapes: Sequence[PoolShape],
    words: LastWords,
    deletions: Iterable[Deletion] = (),
) -> Rebuilt:
    """The state that these copies are, as records to be applied one after the other."""
    deleted = _deleted(copies, deletions)
    dropped = _dropped(copies, words) & ~deleted
    alive = ~(dropped | deleted)
    blocks, slots = _blocks_of(copies[alive])
    kept, parents = _chains(blocks)
    numbers, known = _namespaces(blocks[kept], shapes)
    fits = numbers < len(known)
    kept, parents, numbers = kept[fits], parents[fits], numbers[fits]
    places = {tier: column[kept] for tier, column in slots.items()}
    copies_kept = sum(int(np.count_nonzero(column != NO_SLOT)) for column in places.values())
    return Rebuilt(
        records=[_enter_namespaces(known), *_enter_blocks(blocks[kept], parents, numbers, places)],
        blocks=len(kept),
        dropped=int(np.count_nonzero(dropped)),
        stale=int(np.count_nonzero(alive)) - copies_kept,
        deleted=int(np.count_nonzero(deleted)),
    )


# --- reading entries ------------------------------------------------------------------------------


def read_disk(found: FoundCopies, disk: DiskTier, progress: Callable[[int, int], None]) -> None:
    """Read all slot headers; ``progress(done, all)`` counts slots. Raises TierFailed."""
    shapes = disk.shapes()
    for pool, shape in enumerate(shapes):
        disk.add_pool(pool, shape.block_bytes, shape.block_tokens)
    total = sum(disk.present_slots(pool) for pool in range(len(shapes)))
    done = 0
    for pool, shape in enumerate(shapes):
        for scan in disk.scan(pool):
            found.add(Tier.DISK, shape, scan.slots, scan.entries)
            found.damaged += scan.damaged
            done += scan.looked_at
            progress(done, total)


def read_arena(found: FoundCopies, arena: Arena, tier: Tier) -> None:
    """Read the slot tables that an earlier process left. Payloads are proven at first use."""
    for pool, shape in arena.recorded_pools().items():
        arena.add_pool(pool, shape.block_bytes, shape.block_tokens)
        table = arena.table(pool)
        slots = np.flatnonzero(table["id"]).astype(np.uint32)
        for start in range(0, len(slots), ROWS_AT_ONCE):
            part = slots[start : start + ROWS_AT_ONCE]
            entries = table[part]
            sound = whole_entries(entries, shape.block_bytes)
            found.add(tier, shape, part[sound], entries[sound])


def _copies_of(slots: U32, entries: Entries) -> Copies:
    copies = np.zeros(len(slots), COPY)
    for name in ("id", "parent", "extra"):
        copies[name] = entries[name]
    for name in ("hash", "sum"):
        copies[name][:, 0], copies[name][:, 1] = entries[f"{name}_hi"], entries[f"{name}_lo"]
    copies["digest"] = np.ascontiguousarray(entries["digest"]).view("<u8").reshape(-1, 2)
    copies["tokens"] = _token_digests(np.ascontiguousarray(entries["tokens"]))
    copies["slot"] = slots
    return copies


def _token_digests(tokens: U32) -> U64:
    size, data = tokens.shape[1] * tokens.itemsize, tokens.reshape(-1).view(np.uint8).data
    digests = b"".join(
        hashlib.blake2b(data[at : at + size], digest_size=DIGEST_BYTES).digest()
        for at in range(0, len(data), size)
    )
    return np.frombuffer(digests, "<u8").reshape(-1, 2)


def _join(parts: Iterable[Copies]) -> Copies:
    # As bytes: numpy concatenates structured arrays field by field, many times slower.
    views = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    return np.concatenate([np.zeros(0, np.uint8), *views]).view(COPY)


# --- which copies make which blocks ---------------------------------------------------------------


def _dropped(copies: Copies, words: LastWords) -> Bool:
    """Which copies were dropped, and not placed again after, shape [n]."""
    said = join(words.placed) if words.placed else np.zeros(0, RECORD)
    said = said[np.isin(said["id"], copies["id"])]
    last = {
        (block, tier, slot): kind
        for block, tier, slot, kind in zip(
            *(said[name].tolist() for name in ("id", "tier", "loc", "type")), strict=True
        )
    }
    gone = np.zeros(len(copies), np.bool_)
    named = np.flatnonzero(np.isin(copies["id"], said["id"]))
    keys = zip(*(copies[name][named].tolist() for name in ("id", "tier", "slot")), strict=True)
    gone[named] = [last.get(key) == Kind.DROP for key in keys]
    return gone


def _deleted(copies: Copies, deletions: Iterable[Deletion]) -> Bool:
    """Which copies are of blocks that were deleted by name or with their namespace, shape [n].

    Those that followed them lack their beginning then, and go as well.
    """
    gone = np.zeros(len(copies), np.bool_)
    for deletion in deletions:
        named = copies["id"] < deletion.before
        if any(deletion.digest):
            digest = np.frombuffer(deletion.digest, "<u8")
            named &= (copies["digest"] == digest).all(axis=1)
        if deletion.name:
            named &= (copies["hash"] == np.concatenate(split_hashes(deletion.name))).all(axis=1)
        gone |= named
    return gone


def _blocks_of(copies: Copies) -> tuple[Copies, dict[Tier, U32]]:
    """One copy of each block, ids ascending, and where the block lies (NO_SLOT: not in the tier).

    The fastest copy speaks for the block: copies below it may be of an earlier payload.
    """
    copies = copies[np.lexsort((copies["slot"], copies["tier"], copies["id"]))]
    first = _starts(copies, ("id",))
    block_of = np.cumsum(first) - 1
    blocks = copies[first]
    agrees = _equal(copies, blocks[block_of], IDENTITY)
    slots = {tier: np.full(len(blocks), NO_SLOT, np.uint32) for tier in Tier}
    for tier, column in slots.items():
        # Backwards, so that of two slots the first is what stays.
        here = np.flatnonzero(agrees & (copies["tier"] == tier))[::-1]
        column[block_of[here]] = copies["slot"][here]
    return blocks, slots


def _starts(copies: Copies, names: Iterable[str]) -> Bool:
    """Where, among copies in order, one differs from that before it."""
    starts = np.ones(len(copies), np.bool_)
    starts[1:] = ~_equal(copies[1:], copies[:-1], names)
    return starts


def _equal(some: Copies, others: Copies, names: Iterable[str]) -> Bool:
    same = np.ones(len(some), np.bool_)
    for name in names:
        equal = some[name] == others[name]
        same &= equal.all(axis=1) if equal.ndim > 1 else equal
    return same


# --- chains ---------------------------------------------------------------------------------------


def _chains(blocks: Copies) -> tuple[I64, U64]:
    """Positions of the blocks that stay, and the id of each one's parent.

    ``blocks``: ids ascending, each once.
    """
    parent = _positions(blocks["id"], blocks["parent"])
    is_first = blocks["parent"] == 0
    whole = np.flatnonzero(_reaches_start(parent, is_first))
    heir = _heirs(blocks, whole)
    same = _same_chain(blocks, whole, heir, parent, is_first)
    # From here on a child of a block is one of its heir, or of nobody.
    linked = parent >= 0
    linked[linked] = same[parent[linked]]
    parent = np.where(linked, heir[parent], -1)
    whole_now = _reaches_start(parent, is_first)
    kept = whole[(heir[whole] == whole) & whole_now[whole]]
    ids = np.where(parent[kept] >= 0, blocks["id"][parent[kept]], np.uint64(0))
    return kept, ids


def _positions(ids: U64, wanted: U64) -> I64:
    """Where in the ascending ``ids`` each of ``wanted`` is, -1 where it is not."""
    if not len(ids):
        return np.zeros(0, np.int64)
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[at] == wanted, at, -1)


def _reaches_start(parent: I64, is_first: Bool) -> Bool:
    """Which positions have all their ancestors, by doubling the distance looked back each time."""
    count = len(parent)
    start, nowhere = count, count + 1
    ancestor = np.concatenate([np.where(parent >= 0, parent, nowhere), [start, nowhere]])
    ancestor[:count][is_first] = start
    for _ in range(count.bit_length() + 1):
        ancestor = ancestor[ancestor]
    return np.asarray(ancestor[:count] == start)


def _heirs(blocks: Copies, whole: I64) -> I64:
    """For each position the youngest of those with its name; itself for all not in ``whole``."""
    heir = np.arange(len(blocks))
    names = blocks["hash"][whole]
    order = np.lexsort((whole, names[:, 1], names[:, 0]))
    last = np.ones(len(order), np.bool_)
    last[:-1] = (names[order[1:]] != names[order[:-1]]).any(axis=1)
    group: I64 = np.cumsum(last) - last
    heir[whole[order]] = whole[order[last]][group]
    return heir


def _same_chain(blocks: Copies, whole: I64, heir: I64, parent: I64, is_first: Bool) -> Bool:
    """Which positions have the same tokens as their heir, in all blocks from the first one on."""
    same = np.ones(len(blocks), np.bool_)
    old = whole[heir[whole] != whole]
    new = heir[old]
    alike = _equal(blocks[old], blocks[new], ("tokens", "extra", "digest", "shape"))
    alike &= is_first[old] == is_first[new]
    above, above_new = parent[old], parent[new]
    while True:
        # Assumed of all at first; what is found to differ makes its children differ.
        same[old] = alike
        meets = (heir[above] == heir[above_new]) & same[above] & same[above_new]
        still = alike & (is_first[old] | meets)
        if np.array_equal(still, alike):
            return same
        alike = still


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Namespace:
    digest: U64
    shape: PoolShape


def _namespaces(blocks: Copies, shapes: Sequence[PoolShape]) -> tuple[I64, list[_Namespace]]:
    """Each block's namespace by number, and the namespaces, oldest first.

    Numbers are given anew: those in the lost index meant nothing to anybody else.
    """
    shape, digest = blocks["shape"], blocks["digest"]
    order = np.lexsort((shape, digest[:, 1], digest[:, 0]))
    starts = _starts(blocks[order], ("shape", "digest"))
    first = order[starts]  # ids ascend and equals keep their order, so it is the oldest block
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    numbers = np.empty(len(blocks), np.int64)
    numbers[order] = number[np.cumsum(starts) - 1]
    namespaces = [
        _Namespace(one["digest"], shapes[int(one["shape"])]) for one in blocks[np.sort(first)]
    ]
    pools: dict[PoolShape, None] = {}
    for count, namespace in enumerate(namespaces):
        pools[namespace.shape] = None
        if len(pools) > POOLS_MAX or count == NAMESPACES_MAX:
            namespaces = namespaces[:count]
            break
    return numbers, namespaces


def _enter_namespaces(namespaces: Sequence[_Namespace]) -> Records:
    records = blank(len(namespaces), Kind.NAMESPACE)
    for number, namespace in enumerate(namespaces):
        record = records[number]
        record["key"] = number
        record["hash_hi"], record["hash_lo"] = namespace.digest
        record["id"], record["loc"] = namespace.shape.block_bytes, namespace.shape.block_tokens
    return records


def _enter_blocks(
    blocks: Copies, parents: U64, namespaces: I64, places: dict[Tier, U32]
) -> Iterator[Records]:
    """ALLOC, SEAL and PLACE records, some blocks at a time; rows follow the ids."""
    for start in range(0, len(blocks), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        some = blocks[part]
        rows = np.arange(start, start + len(some))
        allocated = of_copies(Kind.ALLOC, 0, rows, some["id"], some["slot"])
        allocated["tier"] = some["tier"]
        allocated["aux"] = namespaces[part]
        sealed = blank(len(some), Kind.SEAL)
        sealed["key"], sealed["id"] = rows, some["id"]
        sealed["hash_hi"], sealed["hash_lo"] = some["hash"].T
        sealed["extra_hi"], sealed["extra_lo"] = some["sum"].T
        sealed["loc"], sealed["gen"] = parents[part], some["extra"]
        sealed["tier"] = 1
        yield join([allocated, sealed])
        for tier, column in places.items():
            more = np.flatnonzero((column[part] != NO_SLOT) & (some["tier"] != tier))
            placed = of_copies(Kind.PLACE, tier, rows[more], some["id"][more], column[part][more])
            placed["extra_hi"], placed["extra_lo"] = some["sum"][more].T
            yield placed
