"""Logs of other versions: what may be skipped is skipped, what may not is refused and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from recovery_harness import SIZE, Daemon, Machine
from tierkv_wal import RealStorage, WalReader
from tierkv_wal.format import HEADER_BYTES, frame_checksum, unpack_segment_header

from tierkv.core.records import Kind, blank
from tierkv.errors import ConfigError
from tierkv.service.store import read_format

A = list(range(100, 100 + 3 * SIZE))
Start = Callable[..., Daemon]


@pytest.fixture
def log(machine: Machine, start: Start) -> Path:
    """The log of a daemon that stored A on disk and was killed."""
    daemon = start()
    daemon.store(daemon.hello(), 1, A)
    daemon.write_behind()
    daemon.write()
    machine.crash()
    return machine.folder / "state" / "wal"


def files(machine: Machine) -> dict[str, bytes]:
    return {
        str(path.relative_to(machine.folder)): path.read_bytes()
        for path in machine.folder.rglob("*")
        if path.is_file() and path.name not in ("lock.mdb", "LOCK")
    }


def append(log: Path, kind: int) -> None:
    """A frame as another version might write it: a record of a type that is not known here."""
    stored = read_format(log.parent)
    assert stored is not None
    reader = WalReader(RealStorage(), str(log), stored.store_uuid, None)
    for _ in reader.frames():
        pass
    writer = reader.writer(reader.epoch + 1, 16384)
    records = blank(2, Kind.EPOCH)
    records["type"] = kind
    records["id"] = 2**64 - 1
    writer.append(records.view(np.uint8).data)
    writer.write()
    writer.close()


def rewrite_header(log: Path, change: Callable[[bytearray], None]) -> None:
    (path,) = log.glob("*.wal")
    with path.open("r+b") as file:
        page = bytearray(file.read(HEADER_BYTES))
        change(page)
        page[-8:] = xxhash.xxh3_64_intdigest(bytes(page[:-8])).to_bytes(8, "little")
        file.seek(0)
        file.write(page)


@pytest.mark.parametrize("kind", [128, 200, 255])
def test_records_that_may_be_skipped_are_skipped(
    machine: Machine, start: Start, log: Path, kind: int
) -> None:
    append(log, kind)
    daemon = start()
    assert daemon.cached(A) == 3
    assert daemon.report.quarantined == []


@pytest.mark.parametrize("kind", [0, 100, 127])
def test_records_that_must_be_known_are_refused_and_nothing_is_quarantined(
    machine: Machine, start: Start, log: Path, kind: int
) -> None:
    append(log, kind)
    before = files(machine)
    with pytest.raises(ConfigError, match=f"records of type {kind}.*newer tierkv"):
        start()
    assert files(machine) == before


def test_a_newer_major_version_is_refused_and_nothing_is_quarantined(
    machine: Machine, start: Start, log: Path
) -> None:
    rewrite_header(log, lambda page: page.__setitem__(slice(8, 10), b"\x02\x00"))
    before = files(machine)
    with pytest.raises(ConfigError, match="newer tierkv"):
        start()
    assert files(machine) == before


def test_a_newer_frame_version_is_refused_and_nothing_is_quarantined(
    machine: Machine, start: Start, log: Path
) -> None:
    (path,) = log.glob("*.wal")
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 4] += 1
    records = int.from_bytes(data[HEADER_BYTES + 32 : HEADER_BYTES + 36], "little")
    frame = memoryview(data)[HEADER_BYTES : HEADER_BYTES + 64 * (1 + records)]
    salt = unpack_segment_header(bytes(data[:HEADER_BYTES])).salt
    frame[48:56] = frame_checksum(frame, salt).to_bytes(8, "little")
    path.write_bytes(data)
    before = files(machine)
    with pytest.raises(ConfigError, match="frame version 2"):
        start()
    assert files(machine) == before


def test_a_newer_minor_version_is_read(machine: Machine, start: Start, log: Path) -> None:
    def newer(page: bytearray) -> None:
        page[10:12] = b"\x01\x00"
        page[88:4088] = b"?" * 4000

    rewrite_header(log, newer)
    assert start().cached(A) == 3


def test_without_an_index_too_records_that_must_be_known_are_refused(
    machine: Machine, start: Start, log: Path
) -> None:
    append(log, 100)
    before = files(machine)
    (machine.folder / "state" / "index" / "data.mdb").unlink()
    with pytest.raises(ConfigError, match=r"records of type 100.*newer tierkv"):
        start()
    after = files(machine)
    data = "state/index/data.mdb"
    assert {**after, data: b""} == {**before, data: b""}
