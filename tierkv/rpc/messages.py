"""Every message of the protocol, as msgspec structs.

Arrays travel as raw little-endian blobs, never as lists: ``hashes`` is n x 16 bytes, ``tokens``
n x u32, ``slots`` n x u32, ``checksums`` n x 16 bytes, ``extras`` n x u64 (empty = no extra keys).
Blocks of one request travel together: no verb works on a single block at a time.

Every verb is idempotent: a worker that lost its connection re-attaches and sends its last request
again. Numbers are therefore absolute ("make room for 48 tokens", never "16 more"), and the worker
chooses the names of its sequences (1 .. 2**32 - 1, unique within its lease, never used twice).

docs/PROTOCOL.md describes the bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tierkv.core.spec import KVSpec

PROTOCOL_VERSION = 3


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages: encoded as an array, the type's tag first."""


# --- greeting: sent by the daemon on connect, before anything else; carries descriptors ----------


class Greeting(Message, tag="greeting"):
    """First frame of a connection, with three descriptors: arena, its table file, scratch memory.

    ``arena`` is the 16-byte identity of the device arena: a worker that reconnects and sees
    another identity must map it anew and has lost its sequences. ``state`` is "serving", or why
    the daemon cannot serve ("recovering", "draining"). ``gpu``: which GPU's memory the arena is, by
    its 16-byte UUID; empty if it is host memory.
    """

    version: int
    epoch: int
    arena: bytes
    arena_bytes: int
    scratch_bytes: int
    state: str
    gpu: bytes = b""


# --- requests -------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """Opens a lease, or takes one up again by its token (16 bytes; empty = a new lease).

    Without ``lease`` it opens none: an operator holds nothing, and is let in while a daemon drains.
    """

    version: int
    name: str = ""
    token: bytes = b""
    lease: bool = True


class OpenNamespace(Message, tag="open_namespace"):
    """Opens a namespace on this connection. ``digest`` is the worker's own KVSpec digest."""

    spec: KVSpec
    digest: bytes


class Lookup(Message, tag="lookup"):
    """How many leading blocks of a chain are cached, and where. Touches nothing.

    With ``prefetch`` those that are not in the device tier start coming up, if the daemon has
    time for it: the worker is about to ask for them.
    """

    namespace: int
    hashes: bytes
    prefetch: bool = False


class Exists(Message, tag="exists"):
    """Which of some blocks are cached, whatever chains they belong to. Touches nothing."""

    namespace: int
    hashes: bytes


class Used(Message, tag="used"):
    """Blocks that the worker has read in the device tier by itself: they count as used.

    Least valuable first. ``missed``: how many more it looked for in vain. ``damaged``: blocks that
    it held and found damaged there; they are checked before anybody is given them again.
    """

    namespace: int
    hashes: bytes
    missed: int = 0
    damaged: bytes = b""


class Acquire(Message, tag="acquire"):
    """Begins a sequence on the longest cached prefix: verified, pinned, in the device tier.

    The blocks offered are all those the worker is willing to reuse; it leaves out the last one
    itself when it must keep a token to compute. With ``room_tokens`` there is room for so many
    tokens in all, as after ``reserve``; the sequence ends if there cannot be. Without ``wait``
    the reply comes at once and says how many blocks are ready; see ``Await``.
    """

    namespace: int
    sequence: int
    hashes: bytes
    tokens: bytes
    extras: bytes = b""
    room_tokens: int = 0
    wait: bool = True


class Await(Message, tag="await"):
    """Returns when the first ``blocks`` blocks of a sequence that is coming up can be used."""

    sequence: int
    blocks: int


class Reserve(Message, tag="reserve"):
    """Room for ``total_tokens``; from token ``written_tokens`` on the blocks become exclusive.

    A shared or sealed block at the write position is copied first (copy-on-write).
    """

    sequence: int
    written_tokens: int
    total_tokens: int


class Seal(Message, tag="seal"):
    """Blocks ``first`` .. ``first + n - 1`` of a sequence are full: they get their names.

    ``tokens`` holds n x block_tokens ids, ``checksums`` the payload's xxh3_128 of each block.
    """

    sequence: int
    first: int
    hashes: bytes
    tokens: bytes
    checksums: bytes
    extras: bytes = b""


class Store(Message, tag="store"):
    """Blocks of a stock are full: they are cached as a part of a chain, and nobody holds them.

    A stock is a sequence that only has room, as after ``acquire`` with ``room_tokens`` and no
    hashes. Its first n blocks are blocks ``first`` .. ``first + n - 1`` of the chain that
    ``hashes``, ``tokens`` and ``extras`` describe from its beginning; n is the number of
    ``checksums``. The blocks before must be cached. What is left of the stock becomes
    ``new_stock``, with room for ``room_blocks`` blocks, if that can be had.
    """

    namespace: int
    stock: int
    new_stock: int
    first: int
    hashes: bytes
    tokens: bytes
    checksums: bytes
    extras: bytes = b""
    room_blocks: int = 0


class Truncate(Message, tag="truncate"):
    """Keeps the first ``tokens`` tokens of a sequence."""

    sequence: int
    tokens: int


class Fork(Message, tag="fork"):
    """A new sequence that shares the first ``tokens`` tokens of another one."""

    sequence: int
    new_sequence: int
    tokens: int


class Suspend(Message, tag="suspend"):
    """The worker does not touch the sequence's blocks until it resumes: they may spill."""

    sequence: int


class Resume(Message, tag="resume"):
    """Brings a suspended sequence back into the device tier; its slots may have changed."""

    sequence: int


class Release(Message, tag="release"):
    """Ends sequences. Full blocks stay cached. Names the daemon does not know are ignored."""

    sequences: list[int]


class Attend(Message, tag="attend"):
    """Paged attention in the daemon: query and output lie in the scratch memory.

    ``q_offset`` .. holds [tokens, q_heads, head_dim] of the namespace's dtype; ``out_offset``
    receives the same shape, ``lse_offset`` [tokens, q_heads] float32. Row i of the query belongs
    to sequence k with q_indptr[k] <= i < q_indptr[k + 1] (u32 blob); ``seq_lens`` (u32 blob) are
    the tokens of K and V, the query's own included.
    """

    namespace: int
    layer: int
    sequences: list[int]
    seq_lens: bytes
    q_indptr: bytes
    q_heads: int
    q_offset: int
    out_offset: int
    lse_offset: int
    scale: float = 0.0
    causal: bool = True
    window: int = -1
    softcap: float = 0.0


class Stat(Message, tag="stat"):
    """Asks for the daemon's status document."""


class Flush(Message, tag="flush"):
    """Returns when all that was sealed is on disk and the index holds it.

    Fails with ``tier_failed`` while the disk is out of service.
    """


# --- requests of operators: what changes something is open to those whom it is granted -----------


class Drain(Message, tag="drain"):
    """No new leases from now on, and what is only in RAM goes to disk; with ``undo`` back again.

    Asked again, it tells how far that is. With ``look`` that is all it does.
    """

    undo: bool = False
    look: bool = False


class Reload(Message, tag="reload"):
    """Reads the configuration anew and takes over what can change in a running daemon.

    Fails with ``config`` and changes nothing if anything is wrong with it.
    """


class Selector(Message, tag="selector"):
    """Which blocks a verb is about: all that fulfil each condition that is given.

    ``namespace``: by its number; -1: any. ``tenant``: by name; empty: any. ``hash``: hexadecimal
    digits with which the chain hash of one block begins; what that means is the verb's to say.
    """

    namespace: int = -1
    tenant: str = ""
    hash: str = ""


class List(Message, tag="list"):
    """A page of ``kind``: "blocks", "chains", "sequences", "leases" or "pins".

    ``after``: where the last page ended, 0 at first. ``limit``: most items of the page.
    """

    kind: str
    selector: Selector
    after: int = 0
    limit: int = 100


class Inspect(Message, tag="inspect"):
    """All about one thing: ``hash``: a block, else the ``number`` of a ``kind``.

    ``kind``: "block", "namespace", "sequence" or "lease".
    """

    kind: str
    number: int = 0
    hash: str = ""


class Contents(Message, tag="contents"):
    """What the selected blocks are, all but their payload: in pages, parents before children.

    ``hash`` selects that block, those before it and those that follow it.
    """

    selector: Selector
    after: int = 0
    limit: int = 1024


class Pin(Message, tag="pin"):
    """Selected blocks are never dropped from now on, whatever happens to the daemon.

    ``hash`` selects the chain that ends in that block. With ``undo`` they are as all others again.
    """

    selector: Selector
    undo: bool = False


class Delete(Message, tag="delete"):
    """Nobody finds the selected blocks any more, whatever happens to the daemon.

    ``hash`` selects that block and all that follow it. Unless ``really``, it only says what would
    go.
    """

    selector: Selector
    really: bool = False


class Warm(Message, tag="warm"):
    """Brings selected blocks up from disk into RAM, as far as there is free room.

    ``hash`` selects that block, those before it and those that follow it.
    """

    selector: Selector


OperatorRequest = Drain | Reload | List | Inspect | Contents | Pin | Delete | Warm

Request = (
    Hello
    | OpenNamespace
    | Lookup
    | Exists
    | Used
    | Acquire
    | Await
    | Reserve
    | Seal
    | Store
    | Truncate
    | Fork
    | Suspend
    | Resume
    | Release
    | Attend
    | Stat
    | Flush
    | OperatorRequest
)


# --- replies --------------------------------------------------------------------------------------


class SequenceState(Message, tag="sequence"):
    """What the daemon holds of one sequence; sent to a worker that takes up its lease again."""

    sequence: int
    namespace: int
    slots: bytes
    sealed: int
    suspended: bool


class Welcome(Message, tag="welcome"):
    """The lease is open. ``resumed``: it is the old one, and ``sequences`` still stand."""

    lease: int
    token: bytes
    epoch: int
    resumed: bool
    sequences: list[SequenceState]


class NamespaceOpened(Message, tag="namespace_opened"):
    """Where the namespace's slots lie in the device arena (bytes), and how many there can be.

    In its table file lie the slots' entries, ``entry_bytes`` each, and a directory of ``buckets``
    buckets of 64 bytes.
    """

    namespace: int
    slot_offset: int
    slot_stride: int
    slots: int
    entries_offset: int
    entry_bytes: int
    directory_offset: int
    buckets: int


class Found(Message, tag="found"):
    """Leading blocks cached: how many, and of these how many have a copy in which best tier.

    ``load_us``: how long it should take to bring them up, for a worker that may rather compute.
    """

    blocks: int
    device: int
    host: int
    disk: int
    load_us: int = 0


class Existing(Message, tag="existing"):
    """For each block the number of its fastest tier (u8; 255: not cached)."""

    tiers: bytes


class Table(Message, tag="table"):
    """A sequence's whole block table: device slots (u32 blob) in order.

    ``sealed`` leading blocks are full and shared. For ``acquire``: device, host, disk say where
    these blocks came from. While blocks are still coming up only the first ``ready`` ones may be
    used, the slots of others mean nothing, and ``load_us`` is how long the rest should take; else
    ``ready`` is -1.
    """

    sequence: int
    slots: bytes
    sealed: int
    device: int = 0
    host: int = 0
    disk: int = 0
    ready: int = -1
    load_us: int = 0


class Stored(Message, tag="stored"):
    """``blocks`` of those that were to be stored are cached; ``slots``: of the new stock.

    0 blocks: those before them are not cached (any more), and the old stock is as it was.
    """

    blocks: int
    slots: bytes


class Done(Message, tag="done"):
    """It is done, and as durable as the daemon's mode promises."""


class Status(Message, tag="status"):
    """The status document (stable keys; see tierkv/obs/status.py)."""

    document: dict[str, Any]


class Draining(Message, tag="draining"):
    """What a drain still waits for. ``drains``: whether the daemon takes no new leases now.

    ``unwritten`` sealed blocks are only in RAM; ``writing``: some of them are on their way.
    """

    drains: bool
    leases: int
    unwritten: int
    writing: bool


class Reloaded(Message, tag="reloaded"):
    """Keys whose new values hold now, and keys whose new values need a restart."""

    changed: list[str]
    needs_restart: list[str]


class Listed(Message, tag="listed"):
    """A page: ``items`` have stable keys. ``next``: ``after`` of the next page, 0 after the last.

    ``total``: how many there are, -1 where counting would take long.
    """

    items: list[dict[str, Any]]
    next: int = 0
    total: int = -1


class Inspected(Message, tag="inspected"):
    """``document`` has stable keys."""

    document: dict[str, Any]


class Content(Message, tag="content"):
    """A page of blocks: names, names of their parents (zeroes: none), token ids, extra digests.

    ``namespaces`` are i32 [n]. ``next``: ``after`` of the next page, 0 = it was the last.
    ``missing``: of this page, so many could not be read or had gone.
    """

    namespaces: bytes
    hashes: bytes
    parents: bytes
    tokens: list[bytes]
    extras: bytes
    next: int
    missing: int


class Pinned(Message, tag="pinned"):
    """``pins`` were made or undone; pins hold ``blocks`` now, ``change`` more than before."""

    pins: int
    blocks: int
    change: int


class Deleted(Message, tag="deleted"):
    """``blocks`` are deleted, or would be; ``bytes`` by tier.

    ``in_use`` of them stay with sequences that hold them. ``pinned`` ones keep all from going.
    """

    blocks: int
    bytes: dict[str, int]
    in_use: int
    pinned: int
    done: bool


class Warmed(Message, tag="warmed"):
    """``blocks`` came up, ``were`` in RAM before, ``left`` are only on disk."""

    blocks: int
    were: int
    left: int


class Failure(Message, tag="failure"):
    """The request failed; nothing was changed. ``code`` is one of tierkv.errors."""

    code: str
    message: str
    details: dict[str, Any]


Reply = (
    Welcome
    | NamespaceOpened
    | Found
    | Existing
    | Table
    | Stored
    | Done
    | Status
    | Draining
    | Reloaded
    | Listed
    | Inspected
    | Content
    | Pinned
    | Deleted
    | Warmed
    | Failure
)
