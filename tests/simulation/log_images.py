"""The log alone, on a device that loses power: many images of few calls.

What the whole daemon does to its log is a small part of what the log allows. Here it is used
without mercy: frames of any size, syncs when nobody expects them, rotations all the time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tierkv_wal import EndKind, SimulatedStorage, WalReader, WalWriter

DIRECTORY = "/wal"
STORE = bytes(16)
SEGMENT_BYTES = 8192
RECORD_BYTES = 64
LOOKED_AT = frozenset({"pwrite", "fdatasync", "fallocate", "rename", "unlink", "fsync_dir"})


class Died(BaseException):
    """The process dies here."""


@dataclass
class LogRun:
    """What one log was told, and what its images showed."""

    happened: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    records: dict[int, bytes] = field(default_factory=dict)
    frame_ends: set[int] = field(default_factory=lambda: {0})
    checkpoint_lsn: int = 0
    counter: int = 0

    def append(self, writer: WalWriter, count: int) -> None:
        """Append records that nobody else has."""
        first, self.counter = self.counter + 1, self.counter + count
        records = [n.to_bytes(8, "little") * 8 for n in range(first, first + count)]
        last_lsn = writer.append(b"".join(records))
        for at, record in enumerate(records):
            self.records[last_lsn - count + 1 + at] = record
        self.frame_ends.add(writer.appended_lsn)

    def look(self, image: SimulatedStorage, durable_lsn: int) -> WalReader | None:
        """Read an image; notes what is wrong with it."""
        reader = WalReader(image, DIRECTORY, STORE, self.checkpoint_lsn)
        found = {}
        for frame in reader.frames():
            for at, record in enumerate(frame.records):
                found[frame.first_lsn + at] = record.tobytes()
            if frame.last_lsn not in self.frame_ends:
                self.violations.append(f"part of a frame, to lsn {frame.last_lsn}")
        end = reader.end
        if end.kind is EndKind.CORRUPT:
            self.violations.append(f"a sound log is called corrupt: {end.reason}")
            return None
        if end.lsn < durable_lsn:
            self.violations.append(f"ends at lsn {end.lsn}, synced was {durable_lsn}")
        expected = {
            lsn: record
            for lsn, record in self.records.items()
            if self.checkpoint_lsn < lsn <= end.lsn
        }
        if found != expected:
            self.violations.append(f"a hole or a wrong record up to lsn {end.lsn}")
        return reader


def run_log(seed: int, images: int = 3, generations: int = 3) -> LogRun:
    """Some generations of a log; before each change, ``images`` of what power loss would leave."""
    rng = Random(seed)
    storage = SimulatedStorage()
    storage.mkdir(DIRECTORY)
    storage.fsync_dir("/")
    run = LogRun()
    for _ in range(generations):
        storage = _generation(run, storage, rng, images)
        if run.violations:
            break
    return run


def _generation(
    run: LogRun, storage: SimulatedStorage, rng: Random, images: int
) -> SimulatedStorage:
    """One process that recovers, works and loses power; returns what is left."""
    writer: WalWriter | None = None
    durable_lsn = run.checkpoint_lsn
    left = rng.randint(10, 80)

    def before_call(call: str, _path: str) -> None:
        nonlocal left
        if call not in LOOKED_AT:
            return
        synced = durable_lsn if writer is None else writer.durable_lsn
        for _ in range(images):
            _look(run, storage.crash(rng, "power"), synced, rng)
        left -= 1
        if left <= 0 or run.violations:
            raise Died

    reader = run.look(storage, durable_lsn)
    if reader is None:
        return storage
    # What a reader has found is durable: it flushed it first.
    durable_lsn = reader.end.lsn
    run.records = {lsn: one for lsn, one in run.records.items() if lsn <= durable_lsn}
    run.frame_ends = {lsn for lsn in run.frame_ends if lsn <= durable_lsn}
    storage.before_call = before_call
    try:
        writer = reader.writer(reader.epoch + 1, SEGMENT_BYTES)
        while True:
            _act(run, writer, rng)
    except Died:
        run.happened["power losses"] += 1
    storage.before_call = lambda _call, _path: None
    return storage.crash(rng, "power")


def _act(run: LogRun, writer: WalWriter, rng: Random) -> None:
    match rng.choice(("append", "append", "append", "write", "write", "sync", "spare", "forget")):
        case "append":
            run.append(writer, rng.randint(1, 25))
        case "write":
            writer.write()
        case "sync":
            writer.sync()
        case "spare":
            writer.prepare_spare()
        case _:
            run.checkpoint_lsn = writer.sync()
            run.happened["segments removed"] += writer.forget(run.checkpoint_lsn)


def _look(run: LogRun, image: SimulatedStorage, durable_lsn: int, rng: Random) -> None:
    """Read an image; every fourth goes on, loses power again, and is read again."""
    run.happened["log images"] += 1
    reader = run.look(image, durable_lsn)
    if reader is None or rng.random() > 0.25:
        return
    end_lsn, left = reader.end.lsn, rng.randint(1, 8)

    def before_call(call: str, _path: str) -> None:
        nonlocal left
        left -= call in LOOKED_AT
        if left <= 0:
            raise Died

    image.before_call = before_call
    try:
        reader.writer(reader.epoch + 1, SEGMENT_BYTES)
    except Died:
        run.happened["double crashes"] += 1
    image.before_call = lambda _call, _path: None
    again = run.look(image.crash(rng, "power"), durable_lsn)
    if again is not None and again.end.lsn != end_lsn:
        run.violations.append(f"a second recovery ends at lsn {again.end.lsn}, not {end_lsn}")
