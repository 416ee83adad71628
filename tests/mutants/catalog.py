"""The mutants: each breaks one rule on which crash safety rests.

``Simulated``: the simulation must find a violation within so many runs. ``Tests``: these tests
must fail. What breaks a rule that only a second rule's failure would show is left out; the text
of the rule that stands behind it is in docs/DURABILITY.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.mutants.mutation import Edit


@dataclass(frozen=True)
class Simulated:
    """Plans of the simulation, narrowed to where the rule matters."""

    durability: str
    dies_by: str = "power"
    device: int = 6
    host: int = 0
    disk: int = 48
    write: str = "through"
    faults: tuple[tuple[str, str, str], ...] = ()
    """(kind, call, path) of a fault in every life."""
    images: float = 0.5
    lived_on: float = 0.02
    runs: int = 400
    lives: int = 3


@dataclass(frozen=True)
class Tests:
    """Tests that must fail."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """One broken rule."""

    name: str
    edits: tuple[Edit, ...]
    caught_by: Simulated | Tests
    note: str = field(default="")


def _one(name: str, module: str, old: str, new: str, caught_by: Simulated | Tests) -> Mutant:
    return Mutant(name, (Edit(module, old, new),), caught_by)


WRITER = "tierkv_wal.writer"
SEGMENT = "tierkv_wal.segment"
SCAN = "tierkv_wal.scan"
READER = "tierkv_wal.reader"
JOURNAL = "tierkv.service.journal"
CHECKPOINT = "tierkv.service.checkpoint"
RECOVERY = "tierkv.service.recovery"
UNDO = "tierkv.service.undo"
MOVER = "tierkv.tiers.mover"
DISK = "tierkv.tiers.disk"
SEGMENTS = "tierkv.tiers.segments"
COPY = "tierkv.tiers.copy"
STORE = "tierkv.service.store"
READING = "tierkv.native.reading"

WAL_SYNC = """        try:
            durable_lsn = await self._in_thread(self._writer.sync)
        except (OSError, WalError) as error:
            self._journal.die(error)
            raise
        self.on_sync(durable_lsn, time.monotonic() - started)
"""
DISK_SYNC = """        if self._disk is not None:
            try:
                await self._in_thread(self._disk.sync)
            except (TierFull, TierFailed) as error:
                # Waiting would bring nothing back: such copies are found out when they are read.
                extra = {"tier": "disk", "lsn": lsn}
                log.error("copies on disk may not survive power loss: %s", error, extra=extra)
"""
COMMIT = """        await self._in_thread(lambda: self._index.commit(content))
"""
FORGET = """        try:
            await self._in_thread(lambda: self._writer.forget(lsn))
        except OSError as error:
            log.warning("cannot remove old log segments: %s", error, extra={"lsn": lsn})
"""
STEPS = WAL_SYNC + DISK_SYNC + COMMIT + FORGET

UNCHECKED = (
    Edit(
        DISK,
        '    ok &= (entries["id"] == ids) & has_sum(entries)\n',
        "    ok &= has_sum(entries)\n"
        "    from tierkv.tiers.entry import set_checks\n"
        "    entries['id'] = ids\n"
        "    set_checks(entries)\n",
    ),
    Edit(
        "tierkv.core.placement",
        "        sound = result.ok & self._sums_agree(source, rows, result)\n",
        "        sound = result.ok\n",
    ),
    Edit(
        "tierkv.core.matching",
        "        same = headers.ok & (headers.tokens == chain.tokens[cold]).all(1)\n"
        "        same &= headers.extras == chain.extras[cold]\n",
        "        same = np.ones(len(cold), np.bool_)\n",
    ),
    Edit(
        "tierkv.core.matching",
        "                good[left[here]] = self._same(tier, rows, chain, left[here])\n",
        "                pass\n",
    ),
)
"""Whatever a slot on disk holds is served: the rules about overwriting show only so."""

MUTANTS = (
    # --- syncs that are skipped -------------------------------------------------------------------
    _one(
        "payload not synced before its PLACE",
        MOVER,
        "        if self._durable_writes:\n            self._need_disk().sync()\n",
        "",
        Simulated("power"),
    ),
    _one(
        "log not synced before the reply",
        WRITER,
        "                with self._dying():\n"
        "                    self._storage.fdatasync(self._fd)\n"
        "                self._durable_lsn = written_lsn\n",
        "                self._durable_lsn = written_lsn\n",
        Simulated("power"),
    ),
    _one(
        "old log segment not synced before its successor",
        WRITER,
        "            self._storage.fdatasync(self._fd)\n"
        "            self._durable_lsn = self._written_lsn\n",
        "",
        Simulated("kill"),
    ),
    _one(
        "log segment's name not synced",
        SEGMENT,
        "        storage.fsync_dir(directory)\n",
        "",
        Simulated("power"),
    ),
    _one(
        "log segment's header not synced before its name",
        SEGMENT,
        "        storage.pwrite(fd, header.pack(), 0)\n        storage.fdatasync(fd)\n",
        "        storage.pwrite(fd, header.pack(), 0)\n",
        Simulated("power"),
    ),
    _one(
        "payload segment's name not synced",
        SEGMENTS,
        "            raise\n        storage.fsync_dir(self._directory)\n",
        "            raise\n",
        Simulated("power"),
    ),
    _one(
        "checkpoint does not sync the log",
        CHECKPOINT,
        WAL_SYNC,
        "",
        Simulated("kill"),
    ),
    _one(
        "checkpoint does not sync payload",
        CHECKPOINT,
        DISK_SYNC,
        "",
        Simulated("kill"),
    ),
    _one(
        "payload of an earlier process counts as synced",
        SEGMENTS,
        "self._dirty = set(self._present)",
        "self._dirty = set()",
        Simulated("kill", dies_by="kill"),
    ),
    _one(
        "FORMAT not synced before its name",
        STORE,
        "            storage.fdatasync(fd)\n",
        "            pass\n",
        Simulated("power"),
    ),
    _one(
        "recovery reads a log it did not flush",
        SEGMENT,
        "            storage.fdatasync(fd)\n            storage.drop_cache(fd)\n",
        "            storage.drop_cache(fd)\n",
        Tests(("tests/wal/test_crash.py::test_what_a_reader_has_found_survives_power_loss",)),
    ),
    # --- steps in another order -------------------------------------------------------------------
    _one(
        "index committed before the log is synced",
        CHECKPOINT,
        STEPS,
        COMMIT + WAL_SYNC + DISK_SYNC + FORGET,
        Simulated("kill"),
    ),
    _one(
        "index committed before payload is synced",
        CHECKPOINT,
        DISK_SYNC + COMMIT,
        COMMIT + DISK_SYNC,
        Simulated("kill"),
    ),
    _one(
        "log removed before the index is committed",
        CHECKPOINT,
        COMMIT + FORGET,
        FORGET + COMMIT,
        Simulated("power"),
    ),
    _one(
        "recovery goes on in the log before its checkpoint",
        RECOVERY,
        "    index.commit(index_changes(state, state.take_changes(), loaded.specs, meta))\n",
        "    reader.writer(state.epoch, config.wal.segment_bytes).forget(lsn)\n"
        "    reader._has_writer = False\n"
        "    index.commit(index_changes(state, state.take_changes(), loaded.specs, meta))\n",
        Simulated("power"),
    ),
    _one(
        "log segment named before it is written",
        SEGMENT,
        "        storage.pwrite(fd, header.pack(), 0)\n"
        "        storage.fdatasync(fd)\n"
        "        storage.rename(posixpath.join(directory, SPARE), "
        "segment_path(directory, header.seq))\n",
        "        storage.rename(posixpath.join(directory, SPARE), "
        "segment_path(directory, header.seq))\n"
        "        storage.pwrite(fd, header.pack(), 0)\n"
        "        storage.fdatasync(fd)\n",
        Simulated("power"),
    ),
    _one(
        "block copied down after its PLACE is logged",
        MOVER,
        "        result = self._need_disk().write(pool, target[chosen], blocks, source)\n",
        "        from tierkv.tiers.entry import blank_entries\n"
        "        from tierkv.tiers.disk import WriteResult\n"
        "        late = blocks.table(pool)[source]\n"
        "        every = np.ones(len(chosen), np.bool_)\n"
        "        result = WriteResult(every, every, late['sum_hi'], late['sum_lo'], None)\n",
        Simulated("kill"),
    ),
    # --- acknowledged too early -------------------------------------------------------------------
    _one(
        "reply before the frame is written",
        JOURNAL,
        'if self._durability == "none" or lsn <= self._acked_lsn(synced):',
        "if True:",
        Simulated("kill", dies_by="kill"),
    ),
    _one(
        "reply before the frame is synced",
        JOURNAL,
        "        if synced:\n            return self._writer.durable_lsn\n",
        "",
        Simulated("power"),
    ),
    _one(
        "the reply to a seal counts as one that need not last",
        "tierkv.service.call",
        "LASTING = (m.Seal, m.Store, m.Flush, m.Pin, m.Delete)\n",
        "LASTING = (m.Flush, m.Pin, m.Delete)\n",
        Simulated("power"),
    ),
    _one(
        "seal answered before its blocks are on disk",
        "tierkv.service.engine",
        "        if self._durable_seal:\n",
        "        if False:\n",
        Simulated("power"),
    ),
    _one(
        "the log lets go of a stock before its blocks have their names",
        "tierkv.core.storing",
        "            records = join([named, records])\n",
        "            records = join([records, named])\n",
        Tests(("tests/core/test_storing.py",)),
    ),
    _one(
        "blocks are stored behind others that are not cached",
        "tierkv.core.storing",
        "        if len(found) < wanted.first:\n",
        "        if False:\n",
        Simulated("kill", "kill"),
    ),
    _one(
        "a failed sync of the log is tried again",
        WRITER,
        "                with self._dying():\n"
        "                    self._storage.fdatasync(self._fd)\n"
        "                self._durable_lsn = written_lsn\n",
        "                try:\n"
        "                    self._storage.fdatasync(self._fd)\n"
        "                except OSError:\n"
        "                    self._storage.fdatasync(self._fd)\n"
        "                self._durable_lsn = written_lsn\n",
        Simulated("power", faults=(("eio", "fdatasync", ".wal"),)),
    ),
    _one(
        "a failed sync of payload is forgotten",
        SEGMENTS,
        "                    raise self._sync_failure from error\n",
        "                    self._sync_failure = None\n",
        Simulated("power", faults=(("eio", "fdatasync", ".seg"),)),
    ),
    # --- numbers ----------------------------------------------------------------------------------
    _one(
        "checkpoint's LSN one too high",
        CHECKPOINT,
        'meta = {"checkpoint_lsn": lsn}',
        'meta = {"checkpoint_lsn": lsn + 1}',
        Simulated("power"),
    ),
    _one(
        "checkpoint's LSN one too low",
        CHECKPOINT,
        'meta = {"checkpoint_lsn": lsn}',
        'meta = {"checkpoint_lsn": lsn - 1}',
        Simulated("power"),
    ),
    _one(
        "block ids are given out again after a crash",
        RECOVERY,
        "    state.next_block = max(state.next_block, state.epoch * BLOCK_IDS_PER_EPOCH)\n",
        "",
        Simulated("kill"),
    ),
    Mutant(
        "epoch not bumped",
        (
            Edit(
                RECOVERY,
                "    state.epoch = max(state.epoch, reader.epoch) + 1\n",
                "    state.epoch = max(state.epoch, 1)\n",
            ),
            Edit(
                RECOVERY,
                "        writer = reader.writer(state.epoch, segment_bytes)\n",
                "        writer = reader.writer(reader.epoch + 1, segment_bytes)\n",
            ),
        ),
        Simulated("power"),
    ),
    # --- slots ------------------------------------------------------------------------------------
    Mutant(
        "slot overwritten before its DROP is written, and nothing checked",
        (
            Edit(
                JOURNAL,
                "        lsn = self._freed_lsn\n        self.write_freed()\n",
                "        lsn = 0\n",
            ),
            *UNCHECKED,
        ),
        Simulated("kill", dies_by="kill", disk=6, write="demote", lived_on=0.5),
    ),
    Mutant(
        "slot overwritten before its DROP is synced, and nothing checked",
        (
            Edit(
                JOURNAL,
                '        if self._durability == "power" and self._writer.durable_lsn < lsn:\n',
                "        if False:\n",
            ),
            *UNCHECKED,
        ),
        Simulated("power", disk=6, write="demote", lived_on=0.5),
    ),
    _one(
        "slot entry changed before the record that freed the slot is written",
        JOURNAL,
        "        if self._freed_lsn > self._writer.written_lsn:\n",
        "        if False:\n",
        Simulated("kill", dies_by="kill", host=3, write="demote", images=0.0),
    ),
    # --- checks -----------------------------------------------------------------------------------
    _one(
        "payload from disk is not checked",
        DISK,
        "    ok[likely] = sums_agree(entries, likely, sums)\n",
        "",
        Simulated("kill"),
    ),
    _one(
        "header from disk may be another block's",
        DISK,
        '    ok &= (entries["id"] == ids) & has_sum(entries)\n',
        "    ok &= has_sum(entries)\n",
        Tests(("tests/tiers/test_disk.py",)),
    ),
    _one(
        "the log's checksum is not compared",
        "tierkv.core.placement",
        "        sound = result.ok & self._sums_agree(source, rows, result)\n",
        "        sound = result.ok\n",
        Tests(("tests/recovery/test_lost_tail.py",)),
    ),
    _one(
        "RAM slots trusted without their slot table",
        UNDO,
        "    good[chosen] = agrees & (same_sum | ~sealed)\n",
        "    good[chosen] = True\n",
        Tests(("tests/recovery/test_slot_entries.py",)),
    ),
    _one(
        "RAM tiers of another boot are taken over",
        "tierkv.tiers.arena",
        "or not is_tmpfs(fds.payload)",
        "or True",
        Tests(("tests/tiers/test_arena.py",)),
    ),
    _one(
        "device copies are not verified after a restart",
        "tierkv.service.assembly",
        "    placement.doubt.mark(unverified_rows(state))\n",
        "",
        Tests(("tests/simulation/test_memory_that_rots.py",)),
    ),
    _one(
        "entry of a slot stays while its payload is overwritten",
        COPY,
        "    dst.empty(pool, dst_slots)\n",
        "",
        Tests(("tests/tiers/test_copy.py",)),
    ),
    _one(
        "a table that workers look into is cut off",
        "tierkv.service.fd_store",
        "            punch_hole(fd, 0, os.fstat(fd).st_size)\n",
        "            os.ftruncate(fd, 0)\n",
        Tests(("tests/service/test_fd_store.py",)),
    ),
    # --- reading without asking -------------------------------------------------------------------
    _one(
        "whatever bytes an entry leads to are read",
        READING,
        '    return words["id"] if copied == sums[0] << 64 | sums[1] else 0\n',
        '    return words["id"]\n',
        Tests(("tests/native/test_reading.py",)),
    ),
    _one(
        "a torn entry counts",
        READING,
        "    if sums == (0, 0) or check != xxhash.xxh3_64_intdigest(entry[:-CHECK_BYTES]):\n",
        "    if sums == (0, 0):\n",
        Tests(("tests/native/test_reading.py",)),
    ),
    _one(
        "a block is read whatever came before it",
        READING,
        '    if (words["parent"], words["hash_hi"], words["hash_lo"], words["extra"]) != said:\n',
        '    if (words["hash_hi"], words["hash_lo"], words["extra"]) != said[1:]:\n',
        Tests(("tests/native/test_reading.py",)),
    ),
    # --- the end of the log -----------------------------------------------------------------------
    _one(
        "a torn tail is taken for corruption",
        READER,
        "        return EndKind.TORN, scan.fault\n",
        "        return EndKind.CORRUPT, scan.fault\n",
        Simulated("power"),
    ),
    _one(
        "corruption is taken for a torn tail",
        READER,
        "    proof = scan.proof_of_loss()\n    if proof is None:\n",
        "    proof = None\n    if proof is None:\n",
        Tests(("tests/wal/test_faults.py",)),
    ),
    _one(
        "no checksum of the frame",
        SCAN,
        "        if frame_checksum(self._data[offset:end], self._header.salt) != frame.checksum:\n",
        "        if False:\n",
        Simulated("power"),
    ),
    _one(
        "frames need not follow on one another",
        SCAN,
        "        if frame.previous_checksum != self._checksum:\n",
        "        if False:\n",
        Tests(("tests/wal",)),
    ),
    _one(
        "a shorter log segment is no damage",
        READER,
        "    if is_short:\n",
        "    if False:\n",
        Tests(("tests/wal",)),
    ),
    # --- leases -----------------------------------------------------------------------------------
    _one(
        "workers find a deleted block in memory",
        "tierkv.core.placement",
        "            slots = blocks.slot[Tier.DEVICE][members].astype(np.int64)\n"
        "            self.tables.leave(Tier.DEVICE, pool, slots)\n"
        "        going",
        "            slots = blocks.slot[Tier.DEVICE][members].astype(np.int64)\n        going",
        Tests(("tests/core/test_deleting.py",)),
    ),
    _one(
        "what moves is deleted under the move",
        "tierkv.core.deleting",
        "min(leading(~holds.has(rows)) for holds in self._placement.holds.values())",
        "len(rows)",
        Tests(("tests/core/test_deleting.py",)),
    ),
    _one(
        "an index made anew has what was deleted",
        "tierkv.service.rebuild",
        "    deleted = _deleted(copies, deletions)\n",
        "    deleted = _deleted(copies, ())\n",
        Tests(("tests/recovery/test_rebuild_rules.py",)),
    ),
    _one(
        "pins end with the daemon",
        "tierkv.service.undo",
        "        if is_pins(lease):\n",
        "        if False:\n",
        Tests(("tests/recovery/test_leases.py",)),
    ),
    _one(
        "grace period ignored",
        "tierkv.service.leases",
        "        timer = loop.call_later(self.grace_s,",
        "        timer = loop.call_later(0.0,",
        Simulated("kill", dies_by="kill"),
    ),
    _one(
        "slots of a worker that was not told are given away",
        "tierkv.core.planner",
        '        records["type"][fenced] = Kind.SEQ_FENCE\n',
        "",
        Tests(("tests/core/test_random_work.py",)),
    ),
    _one(
        "copies of open blocks in lower tiers are kept",
        UNDO,
        "            _drop_stale_copies(state, sequence)\n",
        "            pass\n",
        Tests(("tests/recovery/test_open_blocks.py",)),
    ),
    _one(
        "memory of slots that may be in use is given back",
        "tierkv.service.leads",
        "        keep = max(rich.goal(lead_bytes), ",
        "        keep = max(0, ",
        Tests(("tests/service/test_leads.py",)),
    ),
    _one(
        "leases outlive the memory they name",
        UNDO,
        "        if device_kept and machine.is_alive(",
        "        if machine.is_alive(",
        Tests(("tests/recovery/test_lost_tail.py",)),
    ),
)

CONTROLS = (
    Mutant("nothing is broken", (), Simulated("power", runs=12)),
    Mutant(
        "nothing is checked, but the order is kept",
        UNCHECKED,
        Simulated("kill", dies_by="kill", disk=6, write="demote", images=0.0),
    ),
    Mutant(
        "nothing is checked, but every DROP is synced first",
        UNCHECKED,
        Simulated("power", disk=6, write="demote", lived_on=0.5, runs=20),
    ),
)
"""What must survive: the hunters accuse nobody without reason."""
