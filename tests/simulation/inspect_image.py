"""Looks at one machine after a crash: recovers it and holds the result against the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.simulation.daemon import open_store
from tests.simulation.ledger import Ledger, Promise, Violation, digest, indexed_rows, names_of
from tests.simulation.machine import STATE_DIR, CrashKind, SimulatedMachine
from tierkv.config import schema
from tierkv.core.ids import I64, U8, U32, U64, Bool, Tier
from tierkv.core.state import PoolShape
from tierkv.service.progress import tell_nobody
from tierkv.service.recovered import Recovered
from tierkv.service.recovery import load
from tierkv.service.site import Site
from tierkv.service.store import StateDirectory
from tierkv.tiers.copy import verify_blocks
from tierkv.tiers.sizes import slot_bytes


@dataclass(frozen=True)
class Expected:
    """What an image must show. ``keeps_all``: the disk tier has room, so nothing is evicted.

    ``exact``: no other daemon recovered it before, so the state must be the one at the recovered
    LSN. ``lies``: the device claimed what it did not do, or its bits flipped. ``sync_failed``: it
    refused a sync, and may have lost what that should have saved.
    """

    promise: Promise
    durability: str
    kind: CrashKind
    keeps_all: bool
    exact: bool = True
    lies: bool = False
    sync_failed: bool = False

    @property
    def _keeps_every_reply(self) -> bool:
        """The files are as the process left them, and it waited for its writes."""
        unharmed = self.kind == "kill" and not self.sync_failed and not self.lies
        return unharmed and self.durability != "none"

    @property
    def _keeps_seals(self) -> bool:
        return self._keeps_every_reply or (self.durability == "power" and not self.lies)

    @property
    def lsn(self) -> int:
        """The log must reach at least here."""
        if self._keeps_every_reply:
            return self.promise.lsn
        return self.promise.lasting_lsn if self._keeps_seals else 0

    @property
    def sealed(self) -> frozenset[bytes]:
        """These blocks must be found."""
        return self.promise.sealed if self._keeps_seals and self.keeps_all else frozenset()

    @property
    def on_disk(self) -> frozenset[bytes]:
        """These must be readable from disk, whatever the mode."""
        return frozenset() if self.lies or self.sync_failed else self.promise.on_disk


class Inspector:
    """Recovers machines and notes every violation. Close it at the end."""

    def __init__(self, config: schema.Config, shape: PoolShape) -> None:
        self._config = config
        budget = slot_bytes(Tier.DEVICE, shape) * (
            config.disk.bytes // slot_bytes(Tier.DISK, shape) + 1
        )
        self._machine = SimulatedMachine()
        self._scratch = self._machine.open_arena(STATE_DIR, "scratch", budget, bytes(16))
        self._scratch.add_pool(0, shape.block_bytes, shape.block_tokens)

    def close(self) -> None:
        """Remove what it needed."""
        self._machine.close()

    def inspect(self, machine: SimulatedMachine, ledger: Ledger, expected: Expected) -> Recovered:
        """Recover the machine and look at what is there. The caller closes the machine."""
        if expected.exact and not expected.lies:
            checkpoint_lsn = self._check_log(machine, ledger, expected)
            if not expected.sync_failed:
                # It may be there though the call that makes it has not returned.
                promise = expected.promise
                on_disk = promise.on_disk | ledger.committed.get(checkpoint_lsn, set())
                expected = replace(expected, promise=replace(promise, on_disk=on_disk))
        recovered = open_store(self._config, machine)
        ledger.check_growth(recovered)
        report = recovered.report
        if report.wal_end not in ("clean", "torn") and not expected.lies:
            ledger.violate(Violation.FLAGGED, f"the log ends {report.wal_end}")
        self.check(recovered, ledger, expected)
        return recovered

    def _check_log(self, machine: SimulatedMachine, ledger: Ledger, expected: Expected) -> int:
        """The state that index and log give is the live one of that moment.

        Returns the LSN of the checkpoint in the index, -1 without a store.
        """
        directory = StateDirectory(STATE_DIR, machine.storage)
        stored = directory.read_format()
        if stored is None:
            if expected.lsn:
                ledger.violate(Violation.LOST, "the store has no FORMAT")
            return -1
        index = machine.open_index(directory.index, 0)
        site = Site(self._config, directory, stored, False, machine, tell_nobody)
        loaded = load(site, index)
        lsn = loaded.reader.end.lsn
        if lsn < expected.lsn:
            ledger.violate(Violation.LOST, f"the log ends at {lsn}, promised was {expected.lsn}")
        known = ledger.states.get(lsn)
        if known is None:
            ledger.violate(Violation.NOT_THE_STATE, f"no frame ends at lsn {lsn}")
        elif known != digest(loaded.state):
            ledger.violate(Violation.NOT_THE_STATE, f"the state at lsn {lsn} is another one")
        return int(index.load().meta.get("checkpoint_lsn", 0))

    def check(self, recovered: Recovered, ledger: Ledger, expected: Expected) -> frozenset[bytes]:
        """Every block that can be found was put and has its bytes; what must be found is.

        Returns the names that a lookup finds, but of which no copy is sound.
        """
        state = recovered.state
        rows = indexed_rows(state)
        names = names_of(state, rows)
        if not ledger.payloads.keys() >= set(names):
            ledger.violate(Violation.NEVER_ISSUED, "a block that nobody ever put")
            return frozenset()
        sound = self._readable(recovered, rows, names, ledger)
        row_of = dict(zip(names, rows.tolist(), strict=True))
        for name in expected.sealed:
            # Its parent may be another block of the same name by now: a newer one has replaced it.
            parent = ledger.parents[name]
            if name not in sound or (parent in ledger.payloads and parent not in row_of):
                ledger.violate(Violation.LOST, f"block {name.hex()} was sealed")
                break
        if not sound.issuperset(expected.on_disk):
            ledger.violate(Violation.LOST, "a block that the last checkpoint held on disk")
        return frozenset(names) - sound

    def _readable(
        self, recovered: Recovered, rows: I64, names: list[bytes], ledger: Ledger
    ) -> set[bytes]:
        """Names of the blocks with a copy that passes the daemon's own checks.

        Notes a violation if such a copy has other bytes than were put.
        """
        state, sound = recovered.state, set()
        for tier in Tier:
            chosen = np.flatnonzero(state.blocks.has_copy(rows, tier))
            if not len(chosen):
                continue
            slots = state.blocks.slot[tier][rows[chosen]]
            ids = state.blocks.id[rows[chosen]]
            if tier is Tier.DISK:
                payloads, good = self._read(recovered, rows[chosen], slots, ids)
            else:
                arena = recovered.arenas[tier]
                payloads, good = arena.payload(0)[slots], verify_blocks(arena, 0, slots, ids)
            for at in np.flatnonzero(good).tolist():
                name = names[chosen[at]]
                if payloads[at].tobytes() != ledger.payloads[name]:
                    ledger.violate(Violation.WRONG, f"{name.hex()} in the {tier.label} tier")
                sound.add(name)
        return sound

    def _read(self, recovered: Recovered, rows: I64, slots: U32, ids: U64) -> tuple[U8, Bool]:
        """Read blocks from disk as a promotion does: payloads, and which of them it would serve."""
        assert recovered.disk is not None
        targets = np.arange(len(slots), dtype=np.uint32)
        good = recovered.disk.read(0, slots, ids, self._scratch, targets).ok
        entries, blocks = self._scratch.table(0)[targets], recovered.state.blocks
        good &= entries["sum_hi"] == blocks.sum_hi[rows]
        good &= entries["sum_lo"] == blocks.sum_lo[rows]
        return self._scratch.payload(0)[targets], good
