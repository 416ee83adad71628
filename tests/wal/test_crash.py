"""Crashes at any call, in any generation: what was promised survives, in order and whole."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tierkv_wal import EndKind, SimulatedStorage, WalReader, WalWriter


class Crash(BaseException):
    """The process dies here. Not an Exception: nothing may handle it."""


STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 25)),
    st.tuples(st.just("write"), st.just(0)),
    st.tuples(st.just("sync"), st.just(0)),
    st.tuples(st.just("spare"), st.just(0)),
)
GENERATION = st.fixed_dictionaries(
    {
        "steps": st.lists(STEP, max_size=25),
        # Calls until the process dies, counted from its start; many never get that far.
        "dies_at": st.integers(1, 80),
        "torn_bytes": st.sampled_from([0, 64, 200, 512, 1024]),
        "forgets": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)


class Model:
    """What was appended, and what of it must have survived the last crash."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.frame_ends = {0}
        self.promised_lsn = {"kill": 0, "power": 0}
        self.checkpoint_lsn = 0
        self.counter = 0

    def make(self, count: int) -> bytes:
        self.counter += count
        first = self.counter - count
        return b"".join((first + i).to_bytes(8, "little") * 8 for i in range(count))

    def note(self, last_lsn: int, records: bytes) -> None:
        count = len(records) // 64
        for i in range(count):
            self.records[last_lsn - count + 1 + i] = records[i * 64 : i * 64 + 64]

    def crash(self, mode: str) -> None:
        """After power loss there is no more to rely on than what was durable."""
        if mode == "power":
            self.promised_lsn["kill"] = self.promised_lsn["power"]

    def check(self, reader: WalReader) -> None:
        """Read the log; from here on what survived is all there ever was, and durable."""
        found = {}
        for frame in reader.frames():
            assert frame.last_lsn in self.frame_ends, "part of a frame"
            for i, record in enumerate(frame.records):
                found[frame.first_lsn + i] = record.tobytes()
        end = reader.end
        assert end.kind is not EndKind.CORRUPT, end
        assert end.lsn >= self.promised_lsn["kill"], "lost what was promised"
        assert end.lsn in self.frame_ends
        survivors = {lsn: r for lsn, r in self.records.items() if lsn <= end.lsn}
        beyond = {lsn: r for lsn, r in survivors.items() if lsn > self.checkpoint_lsn}
        assert found == beyond, "a hole, or a wrong record"
        self.records = survivors
        self.frame_ends = {lsn for lsn in self.frame_ends if lsn <= end.lsn}
        self.promised_lsn = {"kill": end.lsn, "power": end.lsn}


def live(model: Model, storage: SimulatedStorage, generation: dict) -> None:
    """One process: recover, work, die."""
    writer: WalWriter | None = None
    storage.inject(Crash(), nth=generation["dies_at"], written_bytes=generation["torn_bytes"])
    appended_lsn = 0
    try:
        reader = WalReader(storage, "/wal", bytes(16), model.checkpoint_lsn)
        model.check(reader)
        writer = reader.writer(reader.epoch + 1, 8192)
        if generation["forgets"]:
            writer.sync()
            model.checkpoint_lsn = writer.durable_lsn
            writer.forget(model.checkpoint_lsn)
        for step, count in generation["steps"]:
            appended_lsn = writer.appended_lsn
            if step == "append":
                records = model.make(count)
                model.note(writer.append(records), records)
            elif step == "write":
                writer.write()
            elif step == "sync":
                writer.sync()
            else:
                writer.prepare_spare()
            model.frame_ends.add(writer.written_lsn)
    except Crash:
        # The frame that was being written may be on disk in full.
        model.frame_ends.add(appended_lsn)
    if writer is not None:
        model.promised_lsn = {"kill": writer.written_lsn, "power": writer.durable_lsn}
        model.frame_ends.add(writer.written_lsn)


def run(generations: list[dict], modes: list[str]) -> None:
    storage = SimulatedStorage()
    storage.mkdir("/wal")
    storage.fsync_dir("/")
    model = Model()
    for generation, mode in zip(generations, modes, strict=True):
        live(model, storage, generation)
        model.crash(mode)
        rng = Random(generation["seed"])
        # Each crash is looked at in several outcomes; life goes on with the last.
        for _ in range(3):
            storage_after = storage.crash(rng, mode)
            copy = Model()
            copy.__dict__.update(model.__dict__)
            copy.check(WalReader(storage_after, "/wal", bytes(16), model.checkpoint_lsn))
        storage = storage.crash(rng, mode)
    model.check(WalReader(storage, "/wal", bytes(16), model.checkpoint_lsn))


@given(st.lists(GENERATION, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_a_killed_process_loses_no_written_frame(generations):
    run(generations, ["kill"] * len(generations))


@given(st.lists(GENERATION, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_power_loss_takes_no_synced_frame_and_leaves_no_hole(generations):
    run(generations, ["power"] * len(generations))


@given(st.lists(st.tuples(GENERATION, st.sampled_from(["kill", "power"])), min_size=2, max_size=5))
@settings(max_examples=150, deadline=None)
def test_a_process_that_recovered_from_a_kill_survives_power_loss(generations):
    """What recovery read counts as durable: it was flushed before it was read."""
    run([generation for generation, _ in generations], [mode for _, mode in generations])


def test_every_call_of_a_fixed_history_is_a_crash_point():
    """Rotations and a spare included, 4 images per point and mode."""
    steps = [("append", 20), ("write", 0), ("append", 20), ("sync", 0), ("append", 25)]
    steps += [("write", 0), ("spare", 0), ("append", 25), ("write", 0), ("sync", 0)] * 2
    points = range(1, 75)
    for dies_at in points:
        generation = {
            "steps": steps,
            "dies_at": dies_at,
            "torn_bytes": 512,
            "forgets": False,
            "seed": dies_at,
        }
        for mode in ("kill", "power"):
            run([generation] * 2, [mode] * 2)


def test_what_a_reader_has_found_survives_power_loss():
    """The process died before it synced; the next one builds on what it reads."""
    storage = SimulatedStorage()
    storage.mkdir("/wal")
    storage.fsync_dir("/")
    reader = WalReader(storage, "/wal", bytes(16), 0)
    assert list(reader.frames()) == []
    writer = reader.writer(1, 8192)
    writer.append(bytes(64) * 20)
    written_lsn = writer.write()
    killed = storage.crash(Random(0), "kill")
    found = WalReader(killed, "/wal", bytes(16), 0)
    assert sum(len(frame.records) for frame in found.frames()) == 20
    for seed in range(20):
        again = WalReader(killed.crash(Random(seed), "power"), "/wal", bytes(16), 0)
        assert sum(len(frame.records) for frame in again.frames()) == 20
        assert again.end.lsn == written_lsn
