"""What was acknowledged, and what of it a machine must still hold.

The ledger lives outside of the machine: it is what the workers and the world remember.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tierkv.core.blocks import INDEXED
from tierkv.core.ids import I64, Tier
from tierkv.core.state import State
from tierkv.service.recovered import Recovered


class Violation(Enum):
    """What must never happen. The names of wal.md's invariants are in brackets."""

    LOST = "acknowledged and lost (I1)"
    WRONG = "wrong bytes served (I2)"
    RESURRECTED = "dropped for good, and back (I3)"
    NEVER_ISSUED = "visible, but never put (I5)"
    NOT_THE_STATE = "the recovered state is not the one at the recovered LSN (I6, I7)"
    NOT_TWICE = "recovering again gives another state (I8)"
    NOT_GROWING = "an LSN, epoch or block id was given out before (I9)"
    FLAGGED = "sound data was called damaged (I11)"
    NOT_FLAGGED = "damage to synced data went unnoticed (I11)"
    LEASE_LOST = "a live worker's lease did not wait for it"
    BROKEN = "the program contradicts itself (I4, I12)"
    UNUSABLE = "after recovery a put and get round fails (I13)"


@dataclass
class Promise:
    """What is acknowledged at one moment: may be copied and compared with an image of it.

    The log reaches ``lsn`` if only the process died, ``lasting_lsn`` whatever its mode keeps.
    """

    lsn: int = 0
    lasting_lsn: int = 0
    sealed: frozenset[bytes] = frozenset()
    on_disk: frozenset[bytes] = frozenset()
    """Names of the blocks on disk in the last finished checkpoint, and ever since."""


@dataclass
class Ledger:
    """Everything ever issued, and what is promised now.

    By chain hash of each block: ``payloads`` its bytes, ``parents`` the hash before it, ``tokens``
    all tokens up to its end.
    ``states``: a digest of the state behind each LSN at which a frame may end. ``happened`` counts
    what the run has seen, so that a run that tests nothing is noticed.
    """

    payloads: dict[bytes, bytes] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    tokens: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    promise_now: Promise = field(default_factory=Promise)
    epoch: int = 0
    next_block: int = 0
    end_lsn: int = 0
    violations: list[tuple[Violation, str]] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    unreadable: frozenset[bytes] = frozenset()
    """Names on disk whose bytes an earlier power loss has cost, which is found out by reading."""
    committed: dict[int, set[bytes]] = field(default_factory=dict)
    """By LSN of a checkpoint that the index may hold: what was on disk then, and ever since."""
    device_lies: bool = False
    _on_disk: list[tuple[int, frozenset[bytes]]] = field(default_factory=list)

    def violate(self, kind: Violation, detail: str) -> None:
        """Note it; the run ends at the next chance."""
        self.violations.append((kind, detail))

    def incarnation(self, recovered: Recovered) -> None:
        """A daemon has recovered: numbers must have grown; what it found is what there is."""
        self.check_growth(recovered)
        self.epoch = recovered.state.epoch
        self.next_block = recovered.state.next_block
        self.end_lsn = recovered.writer.written_lsn
        self.committed = {}
        self._on_disk = []
        self.states = {recovered.writer.written_lsn: digest(recovered.state)}

    def check_growth(self, recovered: Recovered) -> None:
        """I9. A device that lied may have cost the whole store; another one counts from 1."""
        if self.device_lies:
            return
        state, writer = recovered.state, recovered.writer
        grows = (
            state.epoch > self.epoch
            and state.next_block >= self.next_block
            and writer.written_lsn >= self.end_lsn
        )
        if not grows:
            self.violate(
                Violation.NOT_GROWING,
                f"epoch {state.epoch} after {self.epoch}, next block {state.next_block} after "
                f"{self.next_block}, lsn {writer.written_lsn} after {self.end_lsn}",
            )

    def appended(self, lsn: int, state: State) -> None:
        """Records went into the log."""
        self.states[lsn] = digest(state)
        self.next_block = max(self.next_block, state.next_block)
        now = on_disk(state) - self.unreadable
        self._on_disk.append((lsn, now))
        self.promise_now.on_disk &= now
        for names in self.committed.values():
            names &= now

    def promise(self, lsn: int, *, lasting: bool) -> None:
        """A reply went out that stands for all records up to ``lsn``."""
        promise = self.promise_now
        promise.lsn = max(promise.lsn, lsn)
        if lasting:
            promise.lasting_lsn = max(promise.lasting_lsn, lsn)

    def issued(self, name: bytes, parent: bytes, tokens: tuple[int, ...], payload: bytes) -> None:
        """A worker is about to seal a block."""
        self.tokens[name] = tokens
        self.payloads[name] = payload
        self.parents[name] = parent

    def sealed(self, names: list[bytes]) -> None:
        """A worker was told that these blocks are sealed."""
        self.promise_now.sealed |= set(names)

    def committing(self, lsn: int) -> None:
        """The index is about to hold the checkpoint at this LSN."""
        since = [names for at, names in self._on_disk if at >= lsn]
        self.committed = {lsn: set(frozenset.intersection(*since))} if since else {}

    def checkpointed(self) -> None:
        """The last commit, and what goes with it, has returned."""
        for names in self.committed.values():
            self.promise_now.on_disk = frozenset(names)


def names_of(state: State, rows: I64) -> list[bytes]:
    """The chain hashes of rows."""
    halves = np.stack([state.blocks.hash_hi[rows], state.blocks.hash_lo[rows]], 1)
    data = halves.astype(">u8").tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def indexed_rows(state: State) -> I64:
    """Rows that a lookup can find."""
    rows = state.live_rows()
    return rows[(state.blocks.flags[rows] & INDEXED) != 0]


def on_disk(state: State) -> frozenset[bytes]:
    """Names of the blocks that a lookup can find on disk."""
    rows = indexed_rows(state)
    return frozenset(names_of(state, rows[state.blocks.has_copy(rows, Tier.DISK)]))


def digest(state: State) -> str:
    """All that a state must keep."""
    rows = state.live_rows()
    blocks = state.blocks
    hashed = hashlib.blake2b(rows.tobytes(), digest_size=16)
    hashed.update(blocks.export(rows).tobytes())
    hashed.update(blocks.refs[rows].tobytes() + blocks.active[rows].tobytes())
    for key in sorted(state.sequences):
        sequence = state.sequences[key]
        hashed.update(f"{key} {sequence.namespace} {sequence.suspended}".encode())
        hashed.update(sequence.rows.tobytes())
    hashed.update(repr(sorted(state.leases.values(), key=lambda one: one.id)).encode())
    hashed.update(repr(sorted(state.namespaces.items())).encode())
    hashed.update(repr((state.pools, state.next_block, state.next_lease, state.epoch)).encode())
    return hashed.hexdigest()
