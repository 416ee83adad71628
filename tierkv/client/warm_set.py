"""Exports cached blocks as a warm set, and imports one: nothing but a worker that reads and writes.

Blocks go by chains, one after the other: so each is read, and written, together with those that
follow it, and no chain is asked for again and again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tierkv.client.aio import Client, Namespace
from tierkv.client.warm_set_format import NO_PARENT, SetBlock, SetDecoder, SetEncoder, SetEnd
from tierkv.core.ids import U8, U32, U64
from tierkv.core.prefix import HASH_BYTES
from tierkv.core.spec import PAGE, KVSpec
from tierkv.errors import CorruptionError, NotFound, PoolExhausted
from tierkv.rpc.messages import Content, Contents, Inspect, Inspected, Selector

PIECE_BYTES = 16 << 20
PIECE_BLOCKS = 256
"""Read or written at a time."""

ROUNDING_BYTES = 2 * PAGE
"""A slot on disk takes no more than that beside payload and tokens, as both are whole pages."""

NOT_CACHED = 255

Progress = Callable[[int], None]
"""Told of blocks that are done."""


@dataclass
class Exported:
    """``missed``: blocks that were gone, or could not be read, when their turn came."""

    namespaces: int = 0
    blocks: int = 0
    missed: int = 0


@dataclass
class Imported:
    """``known`` were cached already; ``left`` found no room."""

    namespaces: int = 0
    blocks: int = 0
    known: int = 0
    left: int = 0


# --- export ---------------------------------------------------------------------------------------


@dataclass
class _Tree:
    """The blocks of one namespace, parents first. ``parents``: places in the tree, -1 = none."""

    names: list[bytes] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)

    def runs(self) -> list[list[int]]:
        """All blocks in runs, each the child of the one before; a run's parent is in one before."""
        children: dict[int, list[int]] = {}
        for place, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(place)
        found, starts = [], children.get(-1, [])[::-1]
        while starts:
            run = [starts.pop()]
            while following := children.get(run[-1]):
                starts += following[:0:-1]
                run.append(following[0])
            found.append(run)
        return found

    def chain(self, place: int) -> list[int]:
        """The blocks from the first one to this one."""
        found = []
        while place >= 0:
            found.append(place)
            place = self.parents[place]
        return found[::-1]


async def export(
    client: Client, selector: Selector, counts: Exported, progress: Progress = lambda _done: None
) -> AsyncIterator[bytes]:
    """The bytes of a warm set of the selected blocks. ``counts`` is filled meanwhile.

    Raises NotFound if nothing is selected, and what the client raises.
    """
    encoder = SetEncoder()
    yield encoder.header()
    for number in await _namespaces(client, selector):
        spec = await _spec_of(client, number)
        tree = await _tree(client, msgspec.structs.replace(selector, namespace=number), counts)
        if not tree.names:
            continue
        yield encoder.namespace(spec)
        namespace = await client.namespace(spec)
        written: dict[int, int] = {}
        for run in tree.runs():
            async for place, payload in _payloads(namespace, tree, run, written):
                above = tree.parents[place]
                parent = written[above] if above >= 0 else NO_PARENT
                written[place] = encoder.blocks
                about = (encoder.namespaces - 1, parent, tree.extras[place], tree.names[place])
                yield encoder.block(SetBlock(*about, tree.tokens[place], payload))
                progress(encoder.blocks)
        counts.missed += len(tree.names) - len(written)
    counts.namespaces, counts.blocks = encoder.namespaces, encoder.blocks
    yield encoder.end()


async def _namespaces(client: Client, selector: Selector) -> list[int]:
    """Those that may have selected blocks."""
    document = await client.stat()
    found = [
        one["id"]
        for one in document["namespaces"]
        if selector.namespace in (-1, one["id"]) and selector.tenant in ("", one["tenant"])
    ]
    if not found:
        raise NotFound("there is no such namespace; see `tierkv ls namespaces`")
    return found


async def _spec_of(client: Client, number: int) -> KVSpec:
    """Raises NotFound if the daemon knows no more than its digest."""
    found = (await client.operate(Inspect("namespace", number), Inspected)).document
    if not found["spec"]:
        raise NotFound(
            f"the daemon does not know yet what namespace {number} is: its index was lost, and no "
            "worker has opened it since"
        )
    return msgspec.json.decode(found["spec"], type=KVSpec)


async def _tree(client: Client, selector: Selector, counts: Exported) -> _Tree:
    tree, places, after = _Tree(), {bytes(HASH_BYTES): -1}, 0
    while True:
        try:
            page = await client.operate(Contents(selector, after), Content)
        except NotFound:
            return tree  # the block that is asked for is of another namespace
        extras = np.frombuffer(page.extras, "<u8").tolist()
        counts.missed += page.missing
        for at, tokens in enumerate(page.tokens):
            part = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
            name, parent = page.hashes[part], places.get(page.parents[part])
            if parent is None:
                counts.missed += 1
                continue
            places[name] = len(tree.names)
            tree.names.append(name)
            tree.parents.append(parent)
            tree.tokens.append(tokens)
            tree.extras.append(extras[at])
        after = page.next
        if not after:
            return tree


async def _payloads(
    namespace: Namespace, tree: _Tree, run: list[int], written: dict[int, int]
) -> AsyncIterator[tuple[int, bytes]]:
    """The run's blocks with their bytes, as far as they are still cached."""
    above = tree.parents[run[0]]
    if above >= 0 and above not in written:
        return
    before, chain = len(tree.chain(run[0])) - 1, [*tree.chain(run[0])[:-1], *run]
    tokens, extras = _said(tree.tokens, tree.extras, chain)
    size = namespace.spec.block_bytes
    step = max(1, min(PIECE_BYTES // size, PIECE_BLOCKS))
    for start in range(before, len(chain), step):
        stop = min(start + step, len(chain))
        out = np.empty((stop - start, size), np.uint8)
        ids = tokens[: stop * namespace.spec.block_tokens]
        count = await namespace.read(ids, out, first=start, extra_keys=extras[:stop])
        for at in range(count):
            yield chain[start + at], out[at].tobytes()
        if count < stop - start:
            return


def _said(tokens: list[bytes], extras: list[int], chain: list[int]) -> tuple[U32, U64]:
    """Token ids and digests of extra keys of a chain."""
    ids = np.frombuffer(b"".join(tokens[place] for place in chain), "<u4")
    return ids, np.array([extras[place] for place in chain], np.uint64)


# --- import ---------------------------------------------------------------------------------------


class Importer:
    """Takes the bytes of a warm set and caches its blocks. Importing again changes nothing.

    Blocks are written while they come: what was whole before damage stays. Nothing is evicted for
    them: what finds no room in the last tier is left out, with all that follows it.
    """

    def __init__(self, client: Client, name: str, progress: Progress = lambda _done: None) -> None:
        self.counts = Imported()
        self._client = client
        self._progress = progress
        self._decoder = SetDecoder(name)
        self._namespaces: list[Namespace] = []
        self._parents: list[int] = []
        self._tokens: list[bytes] = []
        self._extras: list[int] = []
        self._cached: list[bool] = []
        self._run: list[SetBlock] = []
        self._room_bytes = -1

    async def take(self, data: bytes) -> None:
        """Some bytes. Raises CorruptionError, InvalidArgument, and what the client raises."""
        try:
            for found in self._decoder.feed(data):
                if isinstance(found, KVSpec):
                    self._namespaces.append(await self._client.namespace(found))
                    self.counts.namespaces += 1
                elif not isinstance(found, SetEnd):
                    await self._add(found)
        except CorruptionError:
            await self._write()
            raise

    async def finish(self) -> None:
        """All bytes have come. Raises CorruptionError."""
        await self._write()
        self._decoder.finish()

    async def _add(self, block: SetBlock) -> None:
        follows = block.parent == len(self._parents) - 1
        size = self._namespaces[block.namespace].spec.block_bytes
        full = len(self._run) >= max(1, min(PIECE_BYTES // size, PIECE_BLOCKS))
        if self._run and (not follows or full):
            await self._write()
        self._run.append(block)
        self._parents.append(-1 if block.parent == NO_PARENT else block.parent)
        self._tokens.append(block.tokens)
        self._extras.append(block.extra)
        self._cached.append(False)

    async def _write(self) -> None:
        """Cache the blocks of the run."""
        run, self._run = self._run, []
        if not run:
            return
        first_place = len(self._parents) - len(run)
        namespace = self._namespaces[run[0].namespace]
        above = self._parents[first_place]
        if above >= 0 and not self._cached[above]:
            self.counts.left += len(run)
            return
        known = await self._known(namespace, run)
        fits = min(len(run) - known, await self._room(namespace, len(run) - known))
        stored = await self._store(namespace, run[: known + fits], first_place) if fits else 0
        self.counts.known += known
        self.counts.blocks += max(stored - known, 0)
        kept = max(stored, known)
        self.counts.left += len(run) - kept
        self._cached[first_place : first_place + kept] = [True] * kept
        self._progress(len(self._parents))

    async def _known(self, namespace: Namespace, run: list[SetBlock]) -> int:
        """How many leading blocks are cached."""
        hashes = np.frombuffer(b"".join(block.hash for block in run), np.uint8)
        cached = await namespace.exists(hashes.reshape(-1, HASH_BYTES)) != NOT_CACHED
        return int(np.argmin(np.append(cached, False)))

    async def _room(self, namespace: Namespace, blocks: int) -> int:
        """For how many of so many blocks the last tier has free room, to be taken at once.

        What it had when the import began, less what that has brought: blocks reach it later.
        """
        spec = namespace.spec
        slot_bytes = spec.block_bytes + 4 * spec.block_tokens + ROUNDING_BYTES
        if self._room_bytes < 0:
            self._room_bytes = _free_bytes(await self._client.stat())
        count = min(blocks, self._room_bytes // slot_bytes)
        self._room_bytes -= count * slot_bytes
        return count

    async def _store(self, namespace: Namespace, run: list[SetBlock], first_place: int) -> int:
        """How many of the run are cached now."""
        above = [first_place]
        while (parent := self._parents[above[-1]]) >= 0:
            above.append(parent)
        chain = [*above[:0:-1], *range(first_place, first_place + len(run))]
        tokens, extras = _said(self._tokens, self._extras, chain)
        data: U8 = np.frombuffer(b"".join(block.payload for block in run), np.uint8)
        rows = data.reshape(len(run), -1)
        try:
            return await namespace.write(
                tokens, rows, first=len(chain) - len(run), extra_keys=extras
            )
        except PoolExhausted:
            return 0


def _free_bytes(document: dict[str, Any]) -> int:
    """Free room of the last tier that there is."""
    tiers = [one for one in document["tiers"].values() if one["capacity_bytes"]]
    return max(0, int(tiers[-1]["capacity_bytes"]) - int(tiers[-1]["used_bytes"]))
