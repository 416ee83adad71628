"""An index that is lost or damaged costs sequences and leases, but no block that was on disk."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from recovery_harness import (
    SIZE,
    SPEC,
    Daemon,
    Machine,
    chain_of,
    config_of,
    content,
)

from tierkv.core.blocks import INDEXED
from tierkv.core.ids import RAM_TIERS, Tier
from tierkv.core.invariants import check_invariants
from tierkv.core.spec import KVSpec
from tierkv.core.state import State
from tierkv.errors import PoolExhausted
from tierkv.service import recovery
from tierkv.service.recovery import BLOCK_IDS_PER_EPOCH, recover
from tierkv.service.store import StateDirectory
from tierkv.service.verify import verify

Start = Callable[..., Daemon]

PAGE = 4096
OTHER = KVSpec(model="other", layers=1, kv_heads=1, head_dim=8, block_tokens=5)
A = list(range(100, 100 + 3 * SIZE))
B = [*A[: 2 * SIZE], *range(200, 200 + SIZE)]
C = list(range(300, 300 + SIZE))
D = list(range(400, 400 + 2 * OTHER.block_tokens))
PROMPTS = [(A, SPEC), (B, SPEC), (C, SPEC), (D, OTHER)]


def worked(machine: Machine, **settings: Any) -> Daemon:
    """Blocks of two geometries on disk, part of them in the checkpoint, the others in the log."""
    daemon = machine.start(**({"device": 16, "host": 4, "disk": 40} | settings))
    lease = daemon.hello()
    for local, (tokens, spec) in enumerate(PROMPTS[:2], 1):
        daemon.store(lease, local, tokens, spec)
    daemon.write_behind()
    daemon.checkpoint()
    daemon.checkpoint()
    for local, (tokens, spec) in enumerate(PROMPTS[2:], 3):
        daemon.store(lease, local, tokens, spec)
    daemon.write_behind()
    daemon.planner.suspend(lease, 2)
    daemon.write()
    return daemon


def has_all(daemon: Daemon) -> None:
    """Every block of every prompt is found, and has its bytes."""
    check_invariants(daemon.state)
    for tokens, spec in PROMPTS:
        has_bytes(daemon, tokens, spec)


def has_bytes(daemon: Daemon, tokens: list[int], spec: KVSpec = SPEC) -> None:
    assert daemon.cached(tokens, spec) == len(tokens) // spec.block_tokens
    lease, namespace = daemon.hello(), daemon.namespace(spec)
    view = daemon.run(daemon.planner.acquire(lease, namespace, 1, chain_of(tokens, spec)))
    assert len(view.slots) == len(tokens) // spec.block_tokens
    pool = daemon.state.namespaces[namespace].pool
    for block, slot in enumerate(view.slots.tolist()):
        assert np.array_equal(daemon.payload(slot, pool), content(tokens, block, spec))
    daemon.planner.close_lease(lease)
    daemon.write()


def index_of(machine: Machine) -> Path:
    return machine.folder / "state" / "index"


# --- ways to lose an index ------------------------------------------------------------------------


def _deleted(index: Path) -> None:
    shutil.rmtree(index)


def _emptied(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"")


def _zeroed(index: Path) -> None:
    data = index / "data.mdb"
    data.write_bytes(bytes(data.stat().st_size))


def _halved(index: Path) -> None:
    data = index / "data.mdb"
    os.truncate(data, data.stat().st_size // 2 // PAGE * PAGE)


def _cut_within_a_page(index: Path) -> None:
    data = index / "data.mdb"
    os.truncate(data, data.stat().st_size - 100)


def _rotten(table: bytes) -> Callable[[Path], None]:
    """One value of a table is not what its checksum says."""

    def damage(index: Path) -> None:
        with _changing(index) as (txn, database):
            key, value = next(iter(txn.cursor(database(table))))
            txn.put(key, value[:1] + bytes([value[1] ^ 1]) + value[2:], db=database(table))

    damage.__name__ = f"rotten {table.decode()}"
    return damage


def _lacks_a_row(index: Path) -> None:
    """All checksums hold, but the log speaks of a row that is not there."""
    with _changing(index) as (txn, database):
        rows = [key for key, _ in txn.cursor(database(b"blocks"))]
        txn.delete(rows[-1], db=database(b"blocks"))


class _changing:
    """A transaction behind the daemon's back."""

    def __init__(self, index: Path) -> None:
        self._env = lmdb.open(str(index), max_dbs=5, map_size=8 << 20)

    def __enter__(self) -> tuple[Any, Callable[[bytes], Any]]:
        self._txn = self._env.begin(write=True)
        return self._txn, lambda name: self._env.open_db(name, txn=self._txn)

    def __exit__(self, *exc: object) -> None:
        self._txn.commit()
        self._env.close()


LOSSES = [
    _deleted,
    _emptied,
    _zeroed,
    _halved,
    _cut_within_a_page,
    *map(_rotten, (b"blocks", b"namespaces", b"leases", b"sequences", b"meta")),
    _lacks_a_row,
]


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__.strip("_"))
def test_blocks_on_disk_outlive_their_index(machine: Machine, lose: Callable[[Path], None]) -> None:
    before = worked(machine)
    epoch, block = before.state.epoch, before.state.next_block
    lsn, leases = before.writer.written_lsn, before.state.next_lease
    machine.crash()
    lose(index_of(machine))
    daemon = machine.start()
    assert daemon.report.rebuilt
    assert daemon.report.wal_end == "set aside"
    assert not daemon.state.leases
    assert not daemon.state.sequences
    assert daemon.state.epoch > epoch
    assert daemon.state.next_block > block
    assert daemon.state.next_lease >= leases
    assert daemon.writer.written_lsn > lsn
    has_all(daemon)
    daemon = machine.start()
    assert daemon.report.rebuilt == ""
    assert daemon.report.wal_end == "clean"
    has_all(daemon)


def test_a_flipped_bit_in_any_page_of_the_index_costs_no_block(folder: Path) -> None:
    """LMDB has no checksums: its verifier, the values' checksums or the log find it, or it was
    where nothing lies. An older checkpoint is not taken for the last one, either."""
    origin = Machine(folder / "origin")
    worked(origin)
    origin.crash()
    size = (index_of(origin) / "data.mdb").stat().st_size
    rebuilt = 0
    for at in [page + place for page in range(0, size, PAGE) for place in (8, 13, 26, 4088)]:
        for part in ("state", "data"):
            shutil.copytree(folder / "origin" / part, folder / "copy" / part)
        machine = Machine(folder / "copy")
        with (index_of(machine) / "data.mdb").open("r+b") as file:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), at)
        daemon = machine.start(device=16, host=4, disk=40)
        rebuilt += bool(daemon.report.rebuilt)
        has_all(daemon)
        machine.crash()
        shutil.rmtree(folder / "copy")
    assert rebuilt > 5


def test_headers_alone_are_enough(machine: Machine) -> None:
    """Neither index nor log nor RAM: as after a reboot that also cost the state directory."""
    before = worked(machine)
    ids = before.state.blocks.id[before.state.rows_in(Tier.DISK)]
    machine.crash()
    for path in (index_of(machine), machine.folder / "state" / "wal", machine.folder / "arena"):
        shutil.rmtree(path)
    daemon = machine.start()
    assert "it was lost" in daemon.report.rebuilt
    assert daemon.state.next_block > ids.max() + BLOCK_IDS_PER_EPOCH // 2
    assert daemon.report.tiers[Tier.DISK].kept == len(ids)
    has_all(daemon)


def test_the_host_tier_says_what_it_holds_as_well(machine: Machine) -> None:
    """A chain's beginning may be in RAM only: without it the rest could not be found."""
    daemon = machine.start(device=3, host=4, disk=8)
    lease = daemon.hello()
    daemon.store(lease, 1, A)
    daemon.planner.suspend(lease, 1)
    daemon.store(lease, 2, list(range(900, 900 + 3 * SIZE)))
    rows = daemon.planner.sequence(lease, 1).rows
    daemon.run(daemon.placement.clean_down(rows, daemon.state.blocks.id[rows]))
    daemon.placement._drop(Tier.DISK, rows[:1], "capacity")
    daemon.placement._drop(Tier.HOST, rows[1:], "capacity")
    daemon.write()
    machine.crash()
    _deleted(index_of(machine))
    has_bytes(machine.start(), A)


def test_an_index_from_before_the_last_checkpoint_is_not_believed(machine: Machine) -> None:
    """As when its newest meta page is lost. The log in between is gone, the blocks are not."""
    daemon = machine.start(device=16, host=4, disk=40, wal_segment_bytes=8 << 10)
    lease = daemon.hello()
    daemon.store(lease, 1, C)
    daemon.checkpoint()
    old = (index_of(machine) / "data.mdb").read_bytes()
    local = 2
    while len(list((machine.folder / "state" / "wal").glob("*.wal"))) < 2:
        daemon.store(lease, local, A)
        daemon.planner.release(lease, [local])
        daemon.write()
        local += 1
    daemon.store(lease, local, B)
    daemon.write_behind()
    daemon.checkpoint()
    machine.crash()
    (index_of(machine) / "data.mdb").write_bytes(old)
    daemon = machine.start()
    assert "older than the log" in daemon.report.rebuilt
    for tokens in (A, B, C):
        assert daemon.cached(tokens) == len(tokens) // SIZE


# --- what was dropped, and what has a twin --------------------------------------------------------


def stored(daemon: Daemon, tokens: list[int]) -> None:
    """On disk, and nobody's."""
    lease = daemon.hello()
    daemon.store(lease, 1, tokens)
    daemon.write_behind()
    daemon.planner.close_lease(lease)
    daemon.write()


def forgotten(daemon: Daemon, tokens: list[int]) -> None:
    """In all tiers; the slots still hold the bytes."""
    chain = chain_of(tokens)
    blocks = daemon.state.blocks
    rows = daemon.state.index.get(chain.hi, chain.lo, blocks.hash_hi, blocks.hash_lo)
    for tier in (*RAM_TIERS, Tier.DISK):
        daemon.placement._drop(tier, rows[blocks.has_copy(rows, tier)], "capacity")
    daemon.write()
    assert daemon.cached(tokens) == 0


def test_what_the_log_calls_dropped_does_not_come_back(machine: Machine, start: Start) -> None:
    daemon = start(device=16, host=4, disk=40)
    stored(daemon, A)
    stored(daemon, C)
    forgotten(daemon, A)
    machine.crash()
    _deleted(index_of(machine))
    daemon = start()
    assert daemon.cached(A) == 0
    has_bytes(daemon, C)


def test_a_copy_that_was_dropped_and_placed_again_counts(machine: Machine, start: Start) -> None:
    daemon = start(device=16, host=4, disk=1)
    lease = daemon.hello()
    daemon.store(lease, 1, C)
    daemon.write_behind()
    rows = daemon.planner.sequence(lease, 1).rows
    daemon.placement._drop(Tier.DISK, rows, "capacity")
    daemon.run(daemon.placement.clean_down(rows, daemon.state.blocks.id[rows]))
    assert daemon.state.blocks.slot[Tier.DISK][rows].tolist() == [0]
    daemon.write()
    machine.crash()
    _deleted(index_of(machine))
    has_bytes(start(), C)


def test_what_was_evicted_before_the_checkpoint_may_come_back_sound(
    machine: Machine, start: Start
) -> None:
    daemon = start(device=16, host=4, disk=40)
    stored(daemon, A)
    forgotten(daemon, A)
    daemon = start()  # its checkpoint ends the log that knew of it
    daemon.checkpoint()
    machine.crash()
    _deleted(index_of(machine))
    has_bytes(start(), A)


def test_a_block_keeps_its_children_when_an_old_twin_comes_back(
    machine: Machine, start: Start
) -> None:
    """The twin was evicted, then the block was sealed under the same name with a lower id."""
    daemon = start(device=16, host=4, disk=40)
    lease = daemon.hello()
    other = list(range(900, 900 + 3 * SIZE))
    stored(daemon, other)
    # The ids of the whole chain are given before those of the twin.
    namespace = daemon.namespace()
    daemon.run(daemon.planner.acquire(lease, namespace, 1, chain_of([])))
    daemon.run(daemon.planner.reserve(lease, 1, 0, len(A)))
    daemon.write()
    stored(daemon, A[: 2 * SIZE])
    forgotten(daemon, A[: 2 * SIZE])
    forgotten(daemon, other)  # its slots are used next
    daemon.seal(lease, 1, A, 0)
    daemon.write_behind()
    blocks = daemon.state.blocks
    ids = blocks.id[daemon.planner.sequence(lease, 1).rows]
    daemon.checkpoint()
    machine.crash()
    shutil.rmtree(machine.folder / "state" / "wal")
    _deleted(index_of(machine))
    daemon = start()
    has_bytes(daemon, A)
    kept = daemon.state.blocks.id[daemon.state.live_rows()]
    assert ids[2] in kept
    assert ids[0] not in kept


def test_blocks_that_were_never_sealed_do_not_come_back(machine: Machine, start: Start) -> None:
    """A suspended sequence's tail is on disk, too, but it has no name."""
    daemon = start(device=4, host=0, disk=40)
    lease, tokens = daemon.hello(), [*C, 1, 2]
    daemon.store(lease, 1, tokens)
    daemon.write_behind()
    daemon.run(daemon.planner.reserve(lease, 1, SIZE, len(tokens)))
    daemon.planner.suspend(lease, 1)
    daemon.store(lease, 2, list(range(900, 900 + 3 * SIZE)))
    tail = daemon.planner.sequence(lease, 1).rows[1:]
    assert daemon.state.blocks.has_copy(tail, Tier.DISK).all()
    ids = daemon.state.blocks.id[tail]
    daemon.write()
    machine.crash()
    _deleted(index_of(machine))
    daemon = start()
    assert not np.isin(daemon.state.blocks.id, ids).any()
    has_bytes(daemon, C)


def test_a_smaller_disk_keeps_what_fits(machine: Machine, start: Start) -> None:
    worked(machine)
    machine.crash()
    _deleted(index_of(machine))
    daemon = start(disk=4)
    check_invariants(daemon.state)
    assert daemon.state.used_bytes(Tier.DISK) <= daemon.config.disk.bytes
    assert daemon.report.tiers[Tier.DISK].kept > 0


def test_segments_of_another_store_are_left_alone(machine: Machine) -> None:
    worked(machine)
    machine.crash()
    shutil.rmtree(machine.folder / "state")
    daemon = machine.start()
    assert daemon.report.rebuilt == ""
    assert daemon.report.blocks == 0
    for tokens, spec in PROMPTS:
        assert daemon.cached(tokens, spec) == 0


# --- random work ----------------------------------------------------------------------------------


def findable_on_disk(state: State) -> set[tuple[int, int]]:
    """Names of the blocks that have a copy on disk, with all blocks before them."""
    blocks = state.blocks
    rows = state.rows_in(Tier.DISK)
    rows = rows[(blocks.flags[rows] & INDEXED) != 0]
    by_id = {int(blocks.id[row]): row for row in rows}

    def whole(row: int) -> bool:
        parent = int(blocks.parent[row])
        return parent == 0 or (parent in by_id and whole(by_id[parent]))

    return {(int(blocks.hash_hi[row]), int(blocks.hash_lo[row])) for row in rows if whole(row)}


class Work:
    """Prompts of few kinds in tiny tiers, so that twins meet and evicted slots are left behind."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = machine
        self.prompts: set[tuple[int, ...]] = set()
        sizes = {"device": 6, "host": self.random.choice((0, 2)), "disk": 9}
        self.daemon = machine.start(**sizes)
        self.lease = self.daemon.hello()
        self.open: dict[int, tuple[int, ...]] = {}
        self.next = 1

    def run(self, steps: int) -> None:
        verbs = {
            self.store: 8,
            self.reserve_ahead: 3,
            self.seal_what_was_reserved: 3,
            self.release: 5,
            self.write_behind: 4,
            self.evict: 5,
            self.checkpoint: 1,
            self.restart: 1,
        }
        for verb in self.random.choices(list(verbs), list(verbs.values()), k=steps):
            verb()
            self.daemon.write()

    def _tokens(self) -> tuple[int, ...]:
        blocks = self.random.randint(1, 3)
        return tuple(self.random.choice((0, 10)) + t for _ in range(blocks) for t in range(SIZE))

    def store(self) -> None:
        tokens, local, self.next = self._tokens(), self.next, self.next + 1
        try:
            self.daemon.store(self.lease, local, list(tokens))
        except PoolExhausted:
            self.daemon.planner.release(self.lease, [local])
            return
        self.prompts.add(tokens)
        self.open[local] = ()

    def reserve_ahead(self) -> None:
        """Take ids that are sealed only later, when others may have the same names."""
        daemon, tokens, local, self.next = self.daemon, self._tokens(), self.next, self.next + 1
        chain = chain_of([])
        daemon.run(daemon.planner.acquire(self.lease, daemon.namespace(), local, chain))
        try:
            daemon.run(daemon.planner.reserve(self.lease, local, 0, len(tokens)))
        except PoolExhausted:
            daemon.planner.release(self.lease, [local])
            return
        self.open[local] = tokens

    def seal_what_was_reserved(self) -> None:
        for local, tokens in self.open.items():
            if tokens:
                self.daemon.seal(self.lease, local, list(tokens), 0)
                self.prompts.add(tokens)
                self.open[local] = ()
                return

    def release(self) -> None:
        if self.open:
            local = self.random.choice(list(self.open))
            self.daemon.planner.release(self.lease, [local])
            del self.open[local]

    def write_behind(self) -> None:
        self.daemon.write_behind()

    def evict(self) -> None:
        """Copies leave a tier; on disk their bytes stay in the slots."""
        state, tier = self.daemon.state, self.random.choice(list(Tier))
        rows = state.rows_in(tier)
        idle = rows[state.blocks.refs[rows] == 0]
        if len(idle):
            chosen = self.random.sample(idle.tolist(), self.random.randint(1, len(idle)))
            self.daemon.placement._drop(tier, np.array(sorted(chosen)), "capacity")

    def checkpoint(self) -> None:
        self.daemon.checkpoint()

    def restart(self) -> None:
        self.daemon = self.machine.start()
        assert self.daemon.report.rebuilt == ""

    def lose_index(self) -> None:
        expected = findable_on_disk(self.daemon.state)
        self.machine.crash()
        _deleted(index_of(self.machine))
        if self.random.random() < 0.5:
            shutil.rmtree(self.machine.folder / "state" / "wal")
        self.daemon = self.machine.start()
        assert self.daemon.report.rebuilt
        check_invariants(self.daemon.state)
        assert expected <= findable_on_disk(self.daemon.state)
        self.open.clear()
        self.lease = self.daemon.hello()
        for tokens in sorted(self.prompts):
            found = self.daemon.cached(list(tokens))
            has_bytes(self.daemon, list(tokens[: found * SIZE]))
        assert not any(self.daemon.counters.checksum_failures.values())


@pytest.mark.parametrize("seed", range(16))
def test_no_block_on_disk_is_lost_with_the_index(machine: Machine, seed: int) -> None:
    work = Work(machine, seed)
    for _ in range(4):
        work.run(30)
        work.lose_index()


# --- verify and repair ----------------------------------------------------------------------------


def findings(machine: Machine, **options: bool) -> list[str]:
    config = config_of(machine.folder, **machine.settings)
    return verify(config, **({"deep": False} | options)).findings


def is_sound(machine: Machine) -> None:
    assert findings(machine) == []
    assert findings(machine, deep=True) == []


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__.strip("_"))
def test_repair_makes_a_lost_index_anew(machine: Machine, lose: Callable[[Path], None]) -> None:
    worked(machine)
    machine.crash()
    lose(index_of(machine))
    before = sorted(machine.folder.rglob("*"))
    assert len(findings(machine)) == 1
    assert sorted(machine.folder.rglob("*")) == before
    report = verify(config_of(machine.folder, **machine.settings), deep=False, repair=True)
    assert report.repaired
    assert len(report.findings) == 1
    assert report.blocks == 7
    is_sound(machine)
    daemon = machine.start()
    assert daemon.report.rebuilt == ""
    has_all(daemon)


@pytest.mark.parametrize("part", ["header", "payload"])
def test_repair_forgets_damaged_slots_and_keeps_the_rest(machine: Machine, part: str) -> None:
    """The block of one sequence: it ends before it. The slot is used again."""
    daemon = worked(machine, device=16, host=0)
    lease = next(iter(daemon.state.leases))
    daemon.planner.suspend(lease, 1)
    rows = daemon.planner.sequence(lease, 1).rows
    slot = int(daemon.state.blocks.slot[Tier.DISK][rows[2]])
    daemon.placement._drop(Tier.DEVICE, rows[2:], "capacity")
    daemon.write()
    machine.crash()
    (path,) = (machine.folder / "data").glob(f"{SPEC.block_bytes}x*.seg")
    with path.open("r+b") as file:
        at = slot * 2 * PAGE + (40 if part == "header" else PAGE)
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
    deep = part == "payload"
    (finding,) = findings(machine, deep=deep)
    assert f"slot {slot}, byte {slot * 2 * PAGE} of {path}" in finding
    assert len(findings(machine, deep=deep, repair=True)) == 1
    is_sound(machine)
    daemon = machine.start()
    assert daemon.cached(A) == 2
    assert len(daemon.planner.sequence(lease, 1).rows) == 2
    has_bytes(daemon, B)
    daemon.store(daemon.hello(), 1, A)
    daemon.write_behind()
    machine.crash()
    is_sound(machine)


def test_repair_sets_a_corrupt_log_aside(machine: Machine) -> None:
    daemon = worked(machine)
    daemon.writer.sync()
    daemon.store(daemon.hello(), 1, list(range(500, 500 + SIZE)))
    daemon.write()
    machine.crash()
    (segment,) = (machine.folder / "state" / "wal").glob("*.wal")
    content = bytearray(segment.read_bytes())
    content[PAGE + 70] ^= 1
    segment.write_bytes(bytes(content))
    assert "log" in findings(machine)[0]
    assert "the log was corrupt" in findings(machine, repair=True)[0]
    is_sound(machine)
    assert (machine.folder / "state" / "quarantine" / segment.name).exists()
    for tokens in (A, B):
        has_bytes(machine.daemon or machine.start(), tokens)


def test_a_sound_store_is_not_repaired(machine: Machine) -> None:
    epoch = worked(machine).state.epoch
    machine.crash()
    assert findings(machine, deep=True, repair=True) == []
    daemon = machine.start()
    assert daemon.state.epoch == epoch + 1
    assert len(daemon.state.sequences) == len(PROMPTS)
    has_all(daemon)


def steps_of_a_start(machine: Machine) -> list[tuple[str, int, int]]:
    """What the next start tells of how far it is."""
    config = config_of(machine.folder, **machine.settings)
    told: list[tuple[str, int, int]] = []
    directory = StateDirectory.open(Path(config.server.state_dir))
    recovered = recover(config, directory, lambda *step: told.append(step))
    recovered.close()
    directory.close()
    return told


def test_a_start_tells_how_far_it_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    worked(machine)
    machine.crash()
    monkeypatch.setattr(recovery, "RECORDS_AT_ONCE", 4)
    told = steps_of_a_start(machine)
    assert list(dict.fromkeys(what for what, _, _ in told)) == [
        "reading the index",
        "replaying the log",
        "writing the checkpoint",
    ]
    replayed = [(done, total) for what, done, total in told if what == "replaying the log"]
    assert len(replayed) > 1
    assert replayed == sorted(replayed)
    assert all(0 < done <= total for done, total in replayed)


def test_a_rebuild_tells_how_far_it_is(machine: Machine) -> None:
    worked(machine)
    machine.crash()
    _emptied(index_of(machine))
    told = steps_of_a_start(machine)
    read = [(done, total) for what, done, total in told if what == "reading slot headers"]
    assert read
    assert read[-1][0] == read[-1][1] > 0
    assert told[-1] == ("writing the checkpoint", 0, 0)
