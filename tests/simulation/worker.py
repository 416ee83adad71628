"""A worker on the simulated machine: writes blocks, checks every byte it is given, remembers.

Tokens come from a small tree, so that workers share prefixes. The bytes of a token follow from it
and all tokens before it.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from tests.simulation.daemon import SimulatedDaemon, Wire
from tests.simulation.ledger import Ledger, Violation
from tierkv.client.attach import MappedArena, map_shared
from tierkv.client.core import ClientCore
from tierkv.client.namespaces import NamespaceCore
from tierkv.core.ids import Tier
from tierkv.core.prefix import chain_hashes
from tierkv.core.spec import KVSpec
from tierkv.rpc import messages as m

SPEC = KVSpec(model="simulated", layers=1, kv_heads=1, head_dim=32, block_tokens=4)
SIZE = SPEC.block_tokens
TOKEN_BYTES = SPEC.token_bytes
BRANCHES = 2
TOKENS_MAX = 5 * SIZE - 1
SEQUENCES_MAX = 4

REFUSALS = frozenset({"pool_exhausted", "tier_full", "tier_failed", "corruption", "limit_exceeded"})
"""What a daemon may answer when it cannot. Anything else is a fault of the program."""


@functools.lru_cache(maxsize=4096)
def token_bytes(prefix: tuple[int, ...]) -> bytes:
    """K and V of the last token of a prefix."""
    seed = xxhash.xxh3_128_digest(np.array(prefix, "<u4").tobytes())
    return seed * (TOKEN_BYTES // len(seed))


@functools.lru_cache(maxsize=1024)
def block_payload(prefix: tuple[int, ...]) -> bytes:
    """The payload of the full block at the end of a prefix."""
    at = range(len(prefix) - SIZE + 1, len(prefix) + 1)
    return b"".join(token_bytes(prefix[:end]) for end in at)


@functools.lru_cache(maxsize=1024)
def names(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """Chain hashes of the full blocks."""
    hashes = chain_hashes(SPEC.digest, np.array(tokens, np.uint32), SIZE)
    return tuple(one.tobytes() for one in hashes)


@dataclass
class Sequence:
    """``tokens`` are written; ``slots`` is the block table as the daemon last said."""

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sealed: int = 0
    suspended: bool = False


class Worker:
    """Outlives the daemons. ``uncertain``: sequences that the request under way begins or ends."""

    def __init__(self, number: int, ledger: Ledger) -> None:
        self.number = number
        self.token = b""
        self.sequences: dict[int, Sequence] = {}
        self.uncertain: set[int] = set()
        self._next = 1
        self._ledger = ledger
        self._daemon: SimulatedDaemon
        self._wire: Wire
        self._namespace = 0

    # --- connecting -------------------------------------------------------------------------------

    async def connect(self, daemon: SimulatedDaemon, *, must_resume: bool) -> None:
        """Begin with a daemon; ``must_resume``: it has to know the lease and all it held."""
        self._daemon, self._wire = daemon, daemon.connect()
        welcome = await self._ask(m.Hello(m.PROTOCOL_VERSION, f"worker {self.number}", self.token))
        if self.token and must_resume and not welcome.resumed:
            self._ledger.violate(Violation.LEASE_LOST, f"of worker {self.number}")
        self.token = welcome.token
        opened = await self._ask(m.OpenNamespace(SPEC, SPEC.digest))
        self._namespace = opened.namespace
        self._reader = self._map(opened)
        held = {one.sequence: one for one in welcome.sequences}
        for local in list(self.sequences):
            if local not in self.uncertain and local in held:
                self._take_up(local, held[local])
                continue
            del self.sequences[local]
            if must_resume and local not in self.uncertain:
                self._ledger.violate(Violation.LEASE_LOST, f"sequence {local} is gone")
        self.uncertain.clear()
        strangers = [local for local in held if local not in self.sequences]
        if strangers:
            await self._ask(m.Release(strangers))

    def _take_up(self, local: int, state: m.SequenceState) -> None:
        sequence = self.sequences[local]
        slots = _slots(state.slots)
        full = min(sequence.sealed, len(sequence.tokens) // SIZE)
        if len(slots) * SIZE < len(sequence.tokens) or state.sealed < full:
            self._ledger.violate(Violation.LOST, f"part of sequence {local}")
            return
        was_suspended, sequence.suspended = sequence.suspended, state.suspended
        if state.suspended:
            if not was_suspended:
                # It died while blocks were coming up. The worker asks again, before it looks.
                self._ledger.happened["suspended by recovery"] += 1
            return
        sequence.slots, sequence.sealed = slots, state.sealed
        self._check(sequence)

    def forget(self) -> None:
        """Power was lost: this is a new process."""
        self.token = b""
        self.sequences.clear()
        self.uncertain.clear()

    # --- verbs ------------------------------------------------------------------------------------

    async def do(self, verb: str, a: int, b: int) -> None:
        """Carry out one step of a plan; ``a`` and ``b`` choose what on."""
        local = self._pick(a)
        if verb == "begin" or local is None:
            path = self._path([], 1 + b % TOKENS_MAX, a)
            if b % 3 == 0:
                await self._read(path)
            elif b % 3 == 1:
                await self._ask(m.Lookup(self._namespace, b"".join(names(tuple(path))), True))
            else:
                await self._put(path, a % 3)
            await self.begin(path)
            return
        sequence = self.sequences[local]
        if verb == "release":
            await self.release(local)
        elif verb == "suspend" and not sequence.suspended:
            await self._suspend(local)
        elif sequence.suspended:
            await self._resume(local)
        elif verb == "fork":
            await self._fork(local, b)
        elif verb == "truncate":
            await self._truncate(local, b)
        else:
            await self.grow(local, self._path(sequence.tokens, 1 + b % 6, a))

    async def begin(self, tokens: list[int]) -> int | None:
        """Begin a sequence on what is cached of ``tokens``, write the rest; None if refused."""
        local = await self.acquire(tokens)
        if local is None:
            return None
        sequence = self.sequences[local]
        if len(tokens) > len(sequence.tokens) and not await self.grow(local, tokens):
            return None
        return local

    async def acquire(self, tokens: list[int]) -> int | None:
        """Begin a sequence on what is cached of ``tokens``, and look at it; None if refused."""
        if len(self.sequences) >= SEQUENCES_MAX:
            await self.release(min(self.sequences))
        local, self._next = self._next, self._next + 1
        chain = names(tuple(tokens))
        sequence = Sequence()
        self.uncertain.add(local)
        self.sequences[local] = sequence
        full = np.array(tokens[: len(chain) * SIZE], "<u4").tobytes()
        # In turn: as it is, with room for the rest, and without waiting for what must come up.
        room, wait = len(tokens) if local % 3 == 1 else 0, local % 3 != 2
        message = m.Acquire(self._namespace, local, b"".join(chain), full, b"", room, wait)
        if not await self._table(local, message):
            return None
        if not wait and not await self._table(local, m.Await(local, len(chain) + 1)):
            return None
        self._ledger.happened["blocks hit"] += sequence.sealed
        sequence.tokens = tokens[: sequence.sealed * SIZE]
        self.uncertain.discard(local)
        self._check(sequence)
        return local

    async def _read(self, tokens: list[int]) -> None:
        """Copy what lies in the device tier of ``tokens`` without asking; and say so."""
        out = np.zeros((len(tokens) // SIZE, SPEC.block_bytes), np.uint8)
        read = self._reader.read_here(tokens, out, None)
        for block in range(read.copied):
            if out[block].tobytes() != block_payload(tuple(tokens[: (block + 1) * SIZE])):
                self._ledger.violate(Violation.WRONG, f"block {block} that was read")
        self._ledger.happened["blocks read"] += read.copied
        used, missed = read.hashes[: read.copied][::-1].tobytes(), len(read.hashes) - read.copied
        await self._ask(m.Used(self._namespace, used, missed))

    async def _put(self, tokens: list[int], first: int) -> None:
        """Store the full blocks of ``tokens`` from ``first`` on, out of a stock."""
        chain = names(tuple(tokens))
        first = min(first, max(len(chain) - 1, 0))
        stock = await self._stock(len(chain) - first) if chain else None
        if stock is None:
            return
        sums = b""
        for block, slot in zip(range(first, len(chain)), self.sequences[stock].slots, strict=False):
            upto = tuple(tokens[: (block + 1) * SIZE])
            payload = block_payload(upto)
            parent = chain[block - 1] if block else SPEC.digest
            self._ledger.issued(chain[block], parent, upto, payload)
            self._payload(slot)[: len(payload)] = np.frombuffer(payload, np.uint8)
            sums += xxhash.xxh3_128_digest(payload)
        new, self._next = self._next, self._next + 1
        ids = np.array(tokens[: len(chain) * SIZE], "<u4").tobytes()
        self.uncertain |= {stock, new}
        answer = await self._ask(
            m.Store(self._namespace, stock, new, first, b"".join(chain), ids, sums, b"", first + 1)
        )
        if isinstance(answer, m.Failure):  # it may have been stored, though not as promised
            await self._ask(m.Release([stock, new]))
            del self.sequences[stock]
        elif answer.blocks:
            del self.sequences[stock]
            self.sequences[new] = Sequence([], _slots(answer.slots))
            self._ledger.sealed(list(chain))
        self._ledger.happened["blocks stored"] += getattr(answer, "blocks", 0)
        self.uncertain -= {stock, new}

    async def _stock(self, blocks: int) -> int | None:
        """A sequence that only has room, for so many blocks; None if refused."""
        for local, sequence in self.sequences.items():
            if not sequence.tokens and not sequence.suspended:
                reserved = await self._table(local, m.Reserve(local, 0, blocks * SIZE))
                return local if reserved else None
        if len(self.sequences) >= SEQUENCES_MAX:
            await self.release(min(self.sequences))
        local, self._next = self._next, self._next + 1
        self.uncertain.add(local)
        self.sequences[local] = Sequence()
        message = m.Acquire(self._namespace, local, b"", b"", b"", blocks * SIZE)
        begun = await self._table(local, message)
        self.uncertain.discard(local)
        return local if begun else None

    async def grow(self, local: int, tokens: list[int]) -> bool:
        """Write on until the sequence holds ``tokens``, sealing what is full."""
        return await self.write(local, tokens) and await self.seal(local)

    async def write(self, local: int, tokens: list[int]) -> bool:
        """Write on until the sequence holds ``tokens``; what is full is not sealed yet."""
        sequence = self.sequences[local]
        written = len(sequence.tokens)
        if not await self._table(local, m.Reserve(local, written, len(tokens))):
            return False
        self._check(sequence)
        for position in range(written, len(tokens)):
            self._write(sequence, position, tokens)
        sequence.tokens = list(tokens)
        return True

    async def release(self, local: int) -> None:
        """End a sequence."""
        self.uncertain.add(local)
        await self._ask(m.Release([local]))
        self.sequences.pop(local, None)
        self.uncertain.discard(local)

    async def seal(self, local: int) -> bool:
        """Name the blocks that are full."""
        sequence = self.sequences[local]
        chain = names(tuple(sequence.tokens))
        first = sequence.sealed
        if first >= len(chain):
            return True
        sums = b""
        for block in range(first, len(chain)):
            upto = tuple(sequence.tokens[: (block + 1) * SIZE])
            payload = block_payload(upto)
            parent = chain[block - 1] if block else SPEC.digest
            self._ledger.issued(chain[block], parent, upto, payload)
            sums += xxhash.xxh3_128_digest(payload)
        ids = np.array(sequence.tokens[first * SIZE : len(chain) * SIZE], "<u4").tobytes()
        message = m.Seal(local, first, b"".join(chain[first:]), ids, sums)
        if not await self._table(local, message):
            return False
        self._ledger.sealed(list(chain[: sequence.sealed]))
        self._check(sequence)
        return True

    async def _suspend(self, local: int) -> None:
        if not isinstance(await self._ask(m.Suspend(local)), m.Failure):
            self.sequences[local].suspended = True

    async def _resume(self, local: int) -> None:
        sequence = self.sequences[local]
        if await self._table(local, m.Resume(local)):
            sequence.suspended = False
            self._check(sequence)

    async def _fork(self, local: int, b: int) -> None:
        sequence = self.sequences[local]
        if not sequence.tokens:
            return
        if len(self.sequences) >= SEQUENCES_MAX:
            await self.release(next(one for one in self.sequences if one != local))
        keep = 1 + b % len(sequence.tokens)
        new, self._next = self._next, self._next + 1
        self.sequences[new] = Sequence(sequence.tokens[:keep])
        self.uncertain.add(new)
        if await self._table(new, m.Fork(local, new, keep)):
            self._check(self.sequences[new])
        self.uncertain.discard(new)

    async def _truncate(self, local: int, b: int) -> None:
        sequence = self.sequences[local]
        keep = b % (len(sequence.tokens) + 1)
        self.uncertain.add(local)
        if await self._table(local, m.Truncate(local, keep)):
            sequence.tokens = sequence.tokens[:keep]
            self._check(sequence)
        self.uncertain.discard(local)

    # --- parts ------------------------------------------------------------------------------------

    def _map(self, opened: m.NamespaceOpened) -> NamespaceCore:
        """The namespace's memory, as any worker maps it."""
        arena = self._daemon.recovered.arenas[Tier.DEVICE]
        data = map_shared(arena.fd, arena.size_bytes)
        client = ClientCore()
        client.arena = MappedArena(arena.identity, data, os.dup(arena.shown_table_fd))
        namespace = NamespaceCore(client, SPEC)
        namespace.adopt(opened)
        return namespace

    async def _ask(self, message: m.Message) -> Any:
        answer = await self._daemon.ask(self._wire, message)
        if isinstance(answer, m.Failure):
            self._ledger.happened[answer.code] += 1
            if answer.code not in REFUSALS:
                self._ledger.violate(Violation.BROKEN, f"{message} was answered {answer}")
        return answer

    async def _table(self, local: int, message: m.Message) -> bool:
        """Ask for a change of a sequence; refused, the sequence ends."""
        answer = await self._ask(message)
        if isinstance(answer, m.Failure):
            if isinstance(message, m.Resume):
                return False
            await self.release(local)
            return False
        sequence = self.sequences[local]
        sequence.slots, sequence.sealed = _slots(answer.slots), answer.sealed
        return True

    def _write(self, sequence: Sequence, position: int, tokens: list[int]) -> None:
        block, place = divmod(position, SIZE)
        content = token_bytes(tuple(tokens[: position + 1]))
        payload = self._payload(sequence.slots[block])
        payload[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES] = np.frombuffer(content, np.uint8)

    def _check(self, sequence: Sequence) -> None:
        """Every byte written is there (I2)."""
        tokens = tuple(sequence.tokens)
        for start in range(0, len(tokens), SIZE):
            part = tokens[: start + SIZE]
            expected = b"".join(token_bytes(tokens[: i + 1]) for i in range(start, len(part)))
            found = self._payload(sequence.slots[start // SIZE])[: len(expected)]
            if found.tobytes() != expected:
                self._ledger.violate(Violation.WRONG, f"block {start // SIZE} of a sequence")

    def _payload(self, slot: int) -> Any:
        return self._daemon.recovered.arenas[Tier.DEVICE].payload(0)[slot]

    def _pick(self, a: int) -> int | None:
        locals_ = sorted(self.sequences)
        return locals_[a % len(locals_)] if locals_ else None

    def _path(self, tokens: list[int], more: int, choice: int) -> list[int]:
        """``tokens`` and ``more`` behind them, along the branches that ``choice`` names."""
        path = list(tokens)
        for position in range(len(path), min(len(path) + more, TOKENS_MAX)):
            branch = choice >> position // SIZE & 1 if position % SIZE == 0 else 0
            path.append(position * BRANCHES + branch + 1)
        return path


def _slots(blob: bytes) -> list[int]:
    return np.frombuffer(blob, "<u4").tolist()
